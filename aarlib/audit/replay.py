"""The oracle: the exact loss of every fixed-dispatch action, by suffix replay (DESIGN 6.3).

Acting on token t at layer l changes that token's residual after l and nothing else at or below l. The prefix [0, t) runs once
with a cache, the native suffix once with what layer l read and wrote; then, for each action, layer l runs on the one
token with the action's weights, and only layers above l run on the suffix. B sites, A actions, R rows (site, action),
H suffix columns, K top_k, D d_model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from aarlib.audit.actions import action_names, action_weights, check_freedom
from aarlib.audit.forward import Cached, continue_from, leave_out, prefill, replace_output, rows_of, token_ce
from aarlib.audit.sites import Aligned, Site, align, documents, sites
from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.families import Family
from aarlib.moe.patching import Rank, wrap_forward

Isolation = Literal["exact", "batched"]
MAX_TOKENS = 16_384
"""Tokens, prefixes included, of the rows that run together under `batched`."""
COLUMNS = ("row", "position", "layer", "action", "ce", "delta_ce")


class Native(NamedTuple):
    """What one layer did with the suffix of a batch, and with token t."""

    read: Float[Tensor, "B D"]
    """The residual that entered the layer, at t."""
    wrote: Float[Tensor, "B H D"]
    """The residual that left it."""
    weights: Float[Tensor, "B K"]
    expert_ids: Int[Tensor, "B K"]


class Suffix(NamedTuple):
    """A batch of sites after its native forward."""

    batch: Aligned
    cached: Cached
    native: dict[int, Native]
    ce: Float[Tensor, "B H"]


def oracle(
    model: nn.Module,
    input_ids: Int[Tensor, "B S"],
    samples: Sequence[tuple[int, int, int]],
    attention_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    horizon: int | None = None,
    isolation: Isolation = "exact",
    *,
    position_ids: Int[Tensor, "B S"] | None = None,
    max_tokens: int = MAX_TOKENS,
    family: Family | None = None,
) -> pd.DataFrame:
    """Loss of every action at every sample (row, position, layer); columns row, position, layer, action, ce, delta_ce.

    ce is the mean next-token CE, in nats, over the targets of positions t .. t + horizon - 1 (to the document's end where
    horizon is None or reaches beyond it); delta_ce = ce - ce(native). `exact` runs every (sample, action) alone;
    `batched` runs as many together as `max_tokens` allows. position_ids restart at 0 where packed documents start.
    Rows of the frame are in the order of `samples`, then of the actions. ValueError for a layer without router, a
    position that is outside, padding or without a target, horizon < 1, or a model with top_k = 1.
    """
    losses = {
        sample.key: sample.ce.double().mean(-1)
        for sample in action_ce(
            model, input_ids, samples, attention_mask, horizon, isolation, position_ids, max_tokens, family
        )
    }
    return _frame(samples, losses, action_names(anatomy(model, family).top_k))


class SampleCE(NamedTuple):
    key: tuple[int, int, int]
    """Row, position, layer."""
    ce: Float[Tensor, "A N"]
    """CE of each of the N targets that the horizon covers, under each action."""


@torch.no_grad()
def action_ce(
    model: nn.Module,
    input_ids: Int[Tensor, "B S"],
    samples: Sequence[tuple[int, int, int]],
    attention_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    horizon: int | None = None,
    isolation: Isolation = "exact",
    position_ids: Int[Tensor, "B S"] | None = None,
    max_tokens: int = MAX_TOKENS,
    family: Family | None = None,
) -> Iterator[SampleCE]:
    """What `oracle` averages, target by target, so that one replay serves every shorter horizon; in no particular order."""
    parts = anatomy(model, family)
    check_freedom(parts.top_k)
    for layer in sorted({int(sample[2]) for sample in samples}):
        parts.moe_layer(layer)
    places = sites(input_ids, documents(input_ids, attention_mask, position_ids), samples, horizon)
    max_tokens = 1 if isolation == "exact" else max_tokens
    for batch in site_batches(places, parts.top_k, max_tokens):
        suffix = native_suffix(model, parts, batch)
        for layer, rows in _acted_on(batch).items():
            for row, ce in zip(rows.tolist(), _replay(model, parts, suffix, layer, rows, max_tokens), strict=True):
                site = batch[row]
                yield SampleCE((site.row, site.position, layer), ce[:, : site.num_targets].cpu())


def site_batches(places: Sequence[Site], top_k: int, max_tokens: int) -> Iterator[list[Site]]:
    """Sites of like length together, so many that all their actions at one layer fit into `max_tokens`."""
    num_actions = len(action_names(top_k))
    batch: list[Site] = []
    for site in sorted(places, key=lambda site: (site.offset, site.num_targets)):
        grown = [*batch, site]
        columns = max(item.offset for item in grown) + max(item.num_targets for item in grown)
        if batch and len(grown) * num_actions * columns > max_tokens:
            yield batch
            grown = [site]
        batch = grown
    if batch:
        yield batch


def native_suffix(model: Any, parts: Anatomy, batch: Sequence[Site]) -> Suffix:
    """Prefix and native suffix of a batch, once for all its layers."""
    aligned = align(batch)
    cached = prefill(parts, aligned)
    rows = torch.arange(len(batch), device=aligned.input_ids.device)
    seen: dict[int, dict[str, Tensor]] = {layer: {} for site in batch for layer in site.layers}
    with ExitStack() as stack:
        for layer in seen:
            for remove in _watch(parts, layer, len(batch), seen[layer]):
                stack.callback(remove)
        own = rows_of(cached, rows, range(len(parts.layers)))
        hidden = continue_from(parts, aligned, own, rows, aligned.targets.shape[1])
    native = {layer: Native(**values) for layer, values in seen.items()}
    return Suffix(aligned, cached, native, token_ce(model, hidden, aligned.targets))


def _watch(parts: Anatomy, index: int, num_rows: int, seen: dict[str, Tensor]) -> list[Callable[[], None]]:
    layer = parts.moe_layer(index)
    assert layer.router is not None

    def around_layer(inner: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = inner(hidden, *args, **kwargs)
        seen["read"], seen["wrote"] = hidden[:, 0], output
        return output

    def around_router(inner: Callable[..., Any], hidden: Tensor) -> RouterOutput:
        output = RouterOutput(*inner(hidden))
        seen["weights"] = output.weights.unflatten(0, (num_rows, -1))[:, 0]
        seen["expert_ids"] = output.expert_ids.unflatten(0, (num_rows, -1))[:, 0]
        return output

    return [
        wrap_forward(layer.layer, around_layer, Rank.RECORD),
        wrap_forward(layer.router, around_router, Rank.RECORD),
    ]


def _acted_on(batch: Sequence[Site]) -> dict[int, Int[Tensor, " R"]]:
    """The rows of the batch that have each layer."""
    layers = sorted({layer for site in batch for layer in site.layers})
    device = batch[0].tokens.device
    return {
        layer: torch.tensor([row for row, site in enumerate(batch) if layer in site.layers], device=device)
        for layer in layers
    }


def _replay(
    model: Any, parts: Anatomy, suffix: Suffix, layer: int, rows: Int[Tensor, " B"], max_tokens: int
) -> Float[Tensor, "B A H"]:
    """CE under every action at `rows` of the batch, in chunks of at most `max_tokens` tokens (at least one row)."""
    weights = action_weights(take(suffix.native[layer].weights, rows))
    flat = weights.flatten(0, 1)
    of_row = rows.repeat_interleave(weights.shape[1])
    size = max(1, max_tokens // suffix.batch.input_ids.shape[1])
    ce = [
        replay_rows(model, parts, suffix, layer, chunk, chunk_weights)
        for chunk, chunk_weights in zip(of_row.split(size), flat.split(size), strict=True)
    ]
    return torch.cat(ce).unflatten(0, weights.shape[:2])


def replay_rows(
    model: Any, parts: Anatomy, suffix: Suffix, layer: int, rows: Int[Tensor, " R"], weights: Float[Tensor, "R K"]
) -> Float[Tensor, "R H"]:
    """CE of each target when token t of the batch `rows` has these weights at `layer`; 0 beyond the horizon."""
    native, batch = suffix.native[layer], suffix.batch
    acted = act(parts, suffix, layer, rows, weights)
    last = len(parts.layers) - 1
    if layer == last:
        ce = take(suffix.ce, rows)
        return torch.cat([token_ce(model, acted.hidden[:, None], batch.targets[rows, :1]), ce[:, 1:]], dim=1)
    wrote = take(native.wrote, rows)
    wrote[:, 0] = acted.wrote
    above = range(layer + 1, last + 1)
    with leave_out(parts, range(layer)), replace_output(parts, layer, wrote):
        cached = rows_of(suffix.cached, rows, above)
        hidden = continue_from(parts, batch, cached, rows, batch.targets.shape[1])
    return token_ce(model, hidden, batch.targets[rows])


def take(values: Tensor, rows: Int[Tensor, " R"]) -> Tensor:
    """`values[rows]`; a layer's tensors are on its own device, the rows on that of the tokens."""
    return values[rows.to(values.device)]


class Acted(NamedTuple):
    wrote: Float[Tensor, "R D"]
    """The residual that leaves the layer, at t."""
    hidden: Float[Tensor, "R D"]
    """The same through the final norm: the last hidden state where the layer is the last one."""


def act(parts: Anatomy, suffix: Suffix, layer: int, rows: Int[Tensor, " R"], weights: Float[Tensor, "R K"]) -> Acted:
    """Run `layer` alone on token t of the batch `rows`, its selected experts weighted by `weights`."""
    module = parts.moe_layer(layer)
    native = suffix.native[layer]
    written: list[Tensor] = []

    def around_layer(inner: Callable[..., Any], _: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        written.append(inner(take(native.read, rows)[:, None], *args, **kwargs))
        return written[0]

    def around_router(inner: Callable[..., Any], hidden: Tensor) -> RouterOutput:
        stock = RouterOutput(*inner(hidden))
        return RouterOutput(stock.router_logits, weights.to(native.weights), take(native.expert_ids, rows))

    assert module.router is not None
    others = [index for index in range(len(parts.layers)) if index != layer]
    with ExitStack() as stack:
        stack.callback(wrap_forward(module.layer, around_layer, Rank.INTERVENTION))
        stack.callback(wrap_forward(module.router, around_router, Rank.INTERVENTION))
        stack.enter_context(leave_out(parts, others))
        hidden = continue_from(parts, suffix.batch, rows_of(suffix.cached, rows, (layer,)), rows, 1)
    return Acted(written[0][:, 0], hidden[:, 0])


def _frame(
    samples: Sequence[tuple[int, int, int]], losses: dict[tuple[int, int, int], Tensor], names: tuple[str, ...]
) -> pd.DataFrame:
    records = []
    for row, position, layer in samples:
        values = losses[int(row), int(position), int(layer)].tolist()
        records += [
            (int(row), int(position), int(layer), name, value, value - values[0])
            for name, value in zip(names, values, strict=True)
        ]
    return pd.DataFrame(records, columns=list(COLUMNS))

"""Really taking parts of a model away, and what later routers and the loss make of it.

B batch, S sequence, E num_experts, K top_k.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aarlib.lens.capture import check_inputs, in_float32
from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.dispatch import EXCLUDED_LOGIT, RouterOutput, Selector
from aarlib.moe.families import Family
from aarlib.moe.patching import Rank, wrap_forward
from aarlib.moe.record import intervene, record

How = Literal["zero", "route_around"]


class Expert(NamedTuple):
    layer: int
    expert: int


@contextmanager
def without_experts(
    model: nn.Module, experts: Sequence[Expert], how: How = "route_around", family: Family | None = None
) -> Iterator[None]:
    """Remove experts, one or several together: `zero` their outputs, or exclude them so that the family's rule selects others.

    Raises ValueError for an expert that does not exist, and where fewer than top_k would be left.
    """
    parts = anatomy(model, family)
    by_layer: dict[int, list[int]] = {}
    for layer, expert in experts:
        parts.moe_layer(layer)
        if not 0 <= expert < parts.num_experts:
            raise ValueError(f"experts: layer {layer} has no expert {expert}; it has 0..{parts.num_experts - 1}")
        by_layer.setdefault(layer, []).append(expert)
    for layer, removed in by_layer.items():
        if how == "route_around" and parts.num_experts - len(set(removed)) < parts.top_k:
            raise ValueError(
                f"experts: without {len(set(removed))} of layer {layer} fewer than top_k = {parts.top_k} are left"
            )
    changes = {layer: _removal(parts, layer, removed, how) for layer, removed in by_layer.items()}
    with intervene(model, changes, family):
        yield


def _removal(
    parts: Anatomy, layer: int, removed: Sequence[int], how: How
) -> Callable[[RouterOutput, Tensor], RouterOutput]:
    router = parts.layers[layer].router
    assert router is not None
    select = Selector(parts, router)

    def zero(output: RouterOutput, _: Tensor) -> RouterOutput:
        gone = torch.isin(output.expert_ids, torch.tensor(removed, device=output.expert_ids.device))
        return RouterOutput(output.router_logits, output.weights.masked_fill(gone, 0), output.expert_ids)

    def route_around(output: RouterOutput, _: Tensor) -> RouterOutput:
        logits = output.router_logits.float().clone()
        logits[:, list(removed)] = EXCLUDED_LOGIT
        chosen = select(logits, output.weights.dtype)
        return RouterOutput(output.router_logits, chosen.weights, chosen.expert_ids)

    return zero if how == "zero" else route_around


@contextmanager
def without_attention(model: nn.Module, layers: Sequence[int], family: Family | None = None) -> Iterator[None]:
    """Zero the attention (or linear-attention) output of `layers`."""
    parts = anatomy(model, family)
    wrong = [layer for layer in layers if not 0 <= layer < len(parts.layers)]
    if wrong:
        raise ValueError(f"layers = {list(layers)}: {wrong} do not exist; the model has 0..{len(parts.layers) - 1}")

    def zero(inner: Callable[..., Any], hidden: Tensor) -> Tensor:
        return torch.zeros_like(inner(hidden))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(wrap_forward(parts.layers[layer].output_projection, zero, Rank.INTERVENTION))
        yield


class Outcome(NamedTuple):
    """One forward: per document CE, and what every router did."""

    ce_sums: Float[Tensor, " B"]
    num_targets: Int[Tensor, " B"]
    logits: dict[int, Float[Tensor, "B S E"]]
    expert_ids: dict[int, Int[Tensor, "B S K"]]


def outcome(
    model: Any,
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | None = None,
    family: Family | None = None,
) -> Outcome:
    """In float32; every next token that is not padding is a target."""
    check_inputs(anatomy(model, family), input_ids, attention_mask)
    with torch.no_grad(), in_float32(model), record(model, router_logits=True, dispatch=True, family=family) as kept:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits.to(input_ids.device)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    is_target = mask[:, 1:] & mask[:, :-1]
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), input_ids[:, 1:], reduction="none")
    sums = (losses * is_target).double().sum(1).float()
    ids = {layer: dispatch.expert_ids.to(mask.device) for layer, dispatch in kept.dispatch.items()}
    router_logits = {layer: values.to(mask.device) for layer, values in kept.router_logits.items()}
    return Outcome(sums, is_target.sum(1), router_logits, ids)


class Effect(NamedTuple):
    """How an outcome differs from the stock one, per document."""

    ce_delta: Float[Tensor, " B"]
    """Of the document's mean CE, nats per token; NaN for a document of one token."""
    picks_changed: dict[int, Float[Tensor, " B"]]
    """Share of a layer's picks that the stock model did not make."""
    logits_moved: dict[int, Float[Tensor, " B"]]
    """Root mean square change of a layer's logits after centring over experts."""


def effect(stock: Outcome, changed: Outcome, mask: Tensor) -> Effect:
    tokens = mask.sum(1)
    picks, moved = dict[int, Tensor](), dict[int, Tensor]()
    for layer, ids in changed.expert_ids.items():
        kept = (ids[..., :, None] == stock.expert_ids[layer][..., None, :]).any(-1).float().mean(-1)
        picks[layer] = ((1 - kept) * mask).sum(1) / tokens
        shift = changed.logits[layer].float() - stock.logits[layer].float()
        square = (shift - shift.mean(-1, keepdim=True)).square().mean(-1)
        moved[layer] = ((square * mask).sum(1) / tokens).sqrt()
    return Effect((changed.ce_sums - stock.ce_sums) / stock.num_targets, picks, moved)


def pair_removals(first: Expert, second: Expert) -> dict[str, list[Expert]]:
    """What is taken away, by name."""
    return {"first": [first], "second": [second], "both": [first, second]}


def coexistence(
    model: Any,
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | None,
    first: Expert,
    second: Expert,
    how: How = "route_around",
    family: Family | None = None,
) -> dict[str, Effect]:
    """Effects of taking the first away, the second, both; by the names of `pair_removals`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    stock = outcome(model, input_ids, attention_mask, family)
    effects: dict[str, Effect] = {}
    for name, experts in pair_removals(first, second).items():
        with without_experts(model, experts, how, family):
            effects[name] = effect(stock, outcome(model, input_ids, attention_mask, family), mask.bool())
    return effects

"""Parts of a decoder's forward: from a cached prefix, with layers left out or stood in for. The model's own code runs.

A layer is left out by a stand-in for its forward; masks, rotary positions and the cache remain the model's business, so
sliding windows, linear attention and attached routers behave as in generation.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from aarlib.audit.sites import IGNORED, Aligned
from aarlib.moe.anatomy import Anatomy
from aarlib.moe.patching import Rank, wrap_forward

CACHE_NAMES = ("cache", "past_key_values")
"""What releases of transformers call the cache, in arguments and outputs."""
LOGIT_ROWS = 2048
"""Rows of logits held at a time."""


class Cached(NamedTuple):
    """A cache and the name of its argument; `cache` None before any token."""

    name: str
    cache: Any


def prefill(parts: Anatomy, batch: Aligned) -> Cached:
    """Run columns before P of every row, once."""
    if batch.prefix == 0:
        return Cached("", None)
    ids, mask, positions = (part[:, : batch.prefix] for part in (batch.input_ids, batch.mask, batch.position_ids))
    output = parts.decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    name = next(name for name in CACHE_NAMES if getattr(output, name, None) is not None)
    return Cached(name, getattr(output, name))


def rows_of(cached: Cached, rows: Int[Tensor, " R"], layers: Collection[int]) -> Cached:
    """A cache of its own for the batch `rows` of `cached`, in `layers` only; the others must be left out of the forward."""
    if cached.cache is None:
        return cached
    new = copy.copy(cached.cache)
    new.layers = [
        _layer_rows(layer, rows) if index in layers else layer for index, layer in enumerate(cached.cache.layers)
    ]
    return Cached(cached.name, new)


def _layer_rows(layer: Any, rows: Tensor) -> Any:
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, dict(value))
    new.reorder_cache(rows)
    return new


def continue_from(
    parts: Anatomy, batch: Aligned, cached: Cached, rows: Int[Tensor, " R"], length: int
) -> Float[Tensor, "R H D"]:
    """Last hidden states (after the final norm) of columns P .. P + length - 1 of the batch `rows`; writes to the cache."""
    start, stop = batch.prefix, batch.prefix + length
    arguments: dict[str, Any] = {} if cached.cache is None else {cached.name: cached.cache}
    output = parts.decoder(
        input_ids=batch.input_ids[rows, start:stop],
        attention_mask=batch.mask[rows, :stop],
        position_ids=batch.position_ids[rows, start:stop],
        use_cache=cached.cache is not None,
        **arguments,
    )
    return output.last_hidden_state


@contextmanager
def leave_out(parts: Anatomy, layers: Collection[int]) -> Iterator[None]:
    """These layers hand on the residual stream as it came."""

    def hand_on(_: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden

    with ExitStack() as stack:
        for index in layers:
            stack.callback(wrap_forward(parts.layers[index].layer, hand_on, Rank.INTERVENTION))
        yield


@contextmanager
def replace_output(parts: Anatomy, index: int, output: Float[Tensor, "R H D"]) -> Iterator[None]:
    """Layer `index` does not run; it returns `output`."""

    def stand_in(_: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return output

    remove = wrap_forward(parts.layers[index].layer, stand_in, Rank.INTERVENTION)
    try:
        yield
    finally:
        remove()


def token_ce(model: Any, hidden: Float[Tensor, "R H D"], targets: Int[Tensor, "R H"]) -> Float[Tensor, "R H"]:
    """Next-token cross-entropy in float32 from float32 logits; 0 where the target is -100."""
    flat, labels = hidden.flatten(0, 1), targets.flatten()
    output_embedding = model.get_output_embeddings()

    def ce(rows: Tensor, label: Tensor) -> Tensor:
        logits = output_embedding(rows).float()
        return cross_entropy(logits, label.to(logits.device), ignore_index=IGNORED, reduction="none")

    parts = [ce(*part) for part in zip(flat.split(LOGIT_ROWS), labels.split(LOGIT_ROWS), strict=True)]
    return torch.cat(parts).view(targets.shape)

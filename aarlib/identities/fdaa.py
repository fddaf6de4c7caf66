"""The golden identities of the aggregation head (DESIGN 2.5, 7), each a function that returns its measured error."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from aarlib.aar.measure import picks_changed
from aarlib.fdaa.attach import AggregationHandle, attach_fdaa
from aarlib.fdaa.config import FDAAConfig
from aarlib.identities.routing import Bite, Inputs, Measure, error
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.families import Family
from aarlib.moe.patching import Rank, wrap_forward
from aarlib.moe.record import record


class FixedDispatch(NamedTuple):
    """What an aggregation must keep, given the same input h."""

    mass_error: float
    """Of sum_j w'_j against sum_j w_j, in the sense of `error`."""
    ids_changed: float
    """Share of selected experts that differ from the native selection."""
    weights_moved: float
    """Largest |w'_j - w_j|: 0 proves nothing."""


def attach_random_head(
    model: Any,
    seed: int = 0,
    family: Family | None = None,
    scale: float = 4.0,
    layers: Sequence[int] | None = None,
) -> AggregationHandle:
    """A head whose scores are of order 1 on `layers`, by default every MoE layer."""
    chosen = anatomy(model, family).moe_layers if layers is None else tuple(layers)
    handle = attach_fdaa(model, FDAAConfig(layers=chosen), seed, family)
    randomise_head(handle, seed, scale)
    return handle


def randomise_head(handle: AggregationHandle, seed: int = 0, scale: float = 4.0) -> None:
    """Draw the last layer, or the calibrator's table, from N(0, scale^2)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in handle.trainable():
            if name in ("head.score.weight", "head.table"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter) * scale)


def head_bite(model: Any, handle: AggregationHandle, inputs: Inputs) -> Bite:
    """Share of picks of the last layer that heads below change (none changes its own), and the largest move of a logit."""
    with record(model, handle.layers, dispatch=True, family=handle.anatomy.family) as patched:
        moved = _logits(model, inputs)
    handle.enabled = False
    with record(model, handle.layers, dispatch=True, family=handle.anatomy.family) as stock:
        expected = _logits(model, inputs)
    handle.enabled = True
    last = handle.layers[-1]
    changed = picks_changed(patched.dispatch[last].expert_ids, stock.dispatch[last].expert_ids)
    return Bite(changed, float((moved - expected).abs().max()))


def fixed_dispatch(model: Any, handle: AggregationHandle, inputs: Inputs) -> FixedDispatch:
    """What leaves the head's wrapper at every layer against what the router below it returned in the same forward."""
    native: dict[int, RouterOutput] = {}
    with ExitStack() as stack:
        for index in handle.layers:
            router = handle.anatomy.moe_layer(index).router
            assert router is not None
            stack.callback(wrap_forward(router, _keep_output(native, index), Rank.ROUTER))
        with record(model, handle.layers, dispatch=True, family=handle.anatomy.family) as rec:
            _logits(model, inputs)
    masses, moves, changed = [], [], []
    for index, (_, before, ids) in native.items():
        after = rec.dispatch[index].weights.flatten(0, 1).float()
        masses.append(error(after.sum(-1), before.float().sum(-1)))
        moves.append(float((after - before.float()).abs().max()))
        changed.append(picks_changed(rec.dispatch[index].expert_ids.flatten(0, 1), ids))
    return FixedDispatch(max(masses), max(changed), max(moves))


def step0_against_stock(
    model: Any,
    inputs: Inputs,
    family: Family | None = None,
    layers: Sequence[int] | None = None,
    measure: Measure = error,
) -> float:
    """Logits with an untrained head on `layers`, by default every MoE layer, against those without."""
    expected = _logits(model, inputs)
    chosen = anatomy(model, family).moe_layers if layers is None else tuple(layers)
    handle = attach_fdaa(model, FDAAConfig(layers=chosen), family=family)
    with handle.scoring() as scored:
        found = _logits(model, inputs)
    handle.detach()
    assert set(scored) == set(handle.layers), "the head was not reached"
    return measure(found, expected)


def _keep_output(kept: dict[int, RouterOutput], index: int) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], hidden: torch.Tensor) -> Any:
        kept[index] = RouterOutput(*inner(hidden))
        return kept[index]

    return wrapper


def _logits(model: Any, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits

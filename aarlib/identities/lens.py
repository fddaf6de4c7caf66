"""The lens's identities (DESIGN 7): components add up to the router's logits, finer ones to their parent."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from aarlib.identities.routing import Measure, error
from aarlib.lens.decomposition import Decomposition, decompose
from aarlib.lens.names import parse
from aarlib.moe.families import Family


def closure(
    model: Any,
    inputs: Mapping[str, Tensor],
    by: str = "layer",
    family: Family | None = None,
    receivers: Sequence[int] | None = None,
) -> float:
    """Sum over components against the router's logits, the largest error over receivers; attached routers included."""
    options: dict[str, Any] = dict(inputs)
    return decompose(model, **options, receivers=receivers, by=by, family=family).closure_error


def parts_against_whole(
    model: Any,
    inputs: Mapping[str, Tensor],
    by: str,
    family: Family | None = None,
    receivers: Sequence[int] | None = None,
    measure: Measure = error,
) -> float:
    """Scores of the finer components against those of their parent; the largest over parents and receivers."""
    options: dict[str, Any] = dict(inputs)
    return parts_error(decompose(model, **options, receivers=receivers, by=by, family=family), measure)


def parts_error(found: Decomposition, measure: Measure = error) -> float:
    return max(
        measure(total, found.scores(receiver, parent))
        for receiver in found.receivers
        for parent, total in sums_of_parts(found, receiver).items()
    )


def sums_of_parts(found: Decomposition, receiver: int) -> dict[str, Tensor]:
    """By parent: the sum of its finer components' scores; parents that the level leaves whole are not in it."""
    sums: dict[str, Tensor] = {}
    for name in found.components(receiver):
        component = parse(name)
        assert component is not None
        if component.parent != name:
            scores = found.scores(receiver, name)
            sums[component.parent] = sums[component.parent] + scores if component.parent in sums else scores
    return sums

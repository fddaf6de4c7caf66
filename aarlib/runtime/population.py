"""Aggregation heads that train side by side: seeds and lambdas on one pass of the frozen prefix."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from aarlib.data.chat import Encoded
from aarlib.fdaa.config import AggregationConfig
from aarlib.runtime.checkpoints import TrainingState
from aarlib.runtime.engine import Setup
from aarlib.runtime.session import Session
from aarlib.training.aggregation import PREFIX, AggregationMethod
from aarlib.training.config import Run
from aarlib.training.prefix import FrozenPrefix, ResidualCache

CACHE_FOLDER = "prefix_cache"


class Pending(NamedTuple):
    """A run to train, and where it stopped."""

    run: Run
    state: TrainingState | None


def groups(pending: Iterable[Pending], population: bool) -> list[list[Pending]]:
    """Runs that can train side by side: aggregation methods on the same layers that stopped at the same step."""
    together: dict[Any, list[Pending]] = {}
    for item in pending:
        method, step = item.run.method, 0 if item.state is None else item.state.step
        key: Any = item.run.name
        if population and isinstance(method, AggregationConfig):
            key = (method.layers, step)
        together.setdefault(key, []).append(item)
    return list(together.values())


def enable_only(handle: Any, handles: Sequence[Any]) -> None:
    """Of several handles on one model, the one that acts; None: the base as it is."""
    for other in handles:
        if other is not handle:
            other.enabled = False
    if handle is not None:
        handle.enabled = True


def with_own_rate(setup: Setup, method: Any) -> Setup:
    """`setup` with the learning rate of the method, where that has one of its own."""
    rate = getattr(method, "learning_rate", None)
    return setup if rate is None else setup._replace(optim=setup.optim.model_copy(update={"learning_rate": rate}))


class PrefixCounts(NamedTuple):
    """Micro-batches whose frozen prefix was run, and read from the cache, for however many heads."""

    run: int
    cached: int


class SharedPrefix:
    """Hands the batches of a step their prefix, run or read once for all heads."""

    def __init__(self, session: Session, methods: Sequence[AggregationMethod], handles: Sequence[Any]) -> None:
        self._method, self._handles = methods[0], handles
        budget = int(session.config.optim.prefix_cache_gib * 2**30)
        self._cache = ResidualCache(session.folder / CACHE_FOLDER, budget) if budget else None
        self._frozen = FrozenPrefix(handles[0].anatomy, self._method.first_trainable_layer, self._cache)

    def __call__(self, batch: dict[str, Tensor], rows: Sequence[Encoded], step: int) -> dict[str, Any]:
        enable_only(None, self._handles)
        layer = self._method.acting_layer(batch, step)
        return {**batch, PREFIX: self._frozen(batch, layer, [row.row_id for row in rows])}

    def counts(self) -> PrefixCounts:
        """Of this worker, since it started."""
        return PrefixCounts(self._frozen.num_runs, self._frozen.num_cached)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()


@contextmanager
def shared_prefix(session: Session, methods: Sequence[Any], handles: Sequence[Any]) -> Iterator[SharedPrefix | None]:
    """None for methods that train below the aggregation."""
    if not all(isinstance(method, AggregationMethod) for method in methods):
        yield None
        return
    prefix = SharedPrefix(session, methods, handles)
    try:
        yield prefix
    finally:
        prefix.close()

"""One reversible way to stand around a module's forward: nothing is left on the module once the last wrapper is gone."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from torch import nn

Wrapper = Callable[..., Any]
"""Called as wrapper(inner, *args, **kwargs); `inner` is the next forward towards the stock one."""


class Rank(IntEnum):
    """Order of wrappers on one module, innermost first, whatever the order of attaching."""

    ROUTER = 0
    AGGREGATION = 1
    INTERVENTION = 2
    RECORD = 3


class _Entry(NamedTuple):
    rank: Rank
    wrapper: Wrapper


class _WrappedForward:
    """Stands in the instance's `forward` and calls the wrappers around the stock one."""

    def __init__(self, stock: Callable[..., Any], previous: Any) -> None:
        self.stock = stock
        self.previous = previous
        self.entries: list[_Entry] = []
        self.below: Rank | None = None
        """Only wrappers of lower rank take part, while set."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taking_part = [entry for entry in self.entries if self.below is None or entry.rank < self.below]
        return self._call(len(taking_part) - 1, args, kwargs)

    def _call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index < 0:
            return self.stock(*args, **kwargs)

        def inner(*inner_args: Any, **inner_kwargs: Any) -> Any:
            return self._call(index - 1, inner_args, inner_kwargs)

        return self.entries[index].wrapper(inner, *args, **kwargs)


def wrap_forward(module: nn.Module, wrapper: Wrapper, rank: Rank) -> Callable[[], None]:
    """Put `wrapper` around `module.forward`; the returned function takes it away again (once; later calls do nothing)."""
    wrapped = module.__dict__.get("forward")
    if not isinstance(wrapped, _WrappedForward):
        wrapped = _WrappedForward(module.forward, wrapped)
        module.__dict__["forward"] = wrapped
    entry = _Entry(rank, wrapper)
    wrapped.entries.append(entry)
    wrapped.entries.sort(key=lambda item: item.rank)

    def remove() -> None:
        remaining = [item for item in wrapped.entries if item is not entry]
        if len(remaining) == len(wrapped.entries):
            return
        wrapped.entries = remaining
        if not remaining and module.__dict__.get("forward") is wrapped:
            if wrapped.previous is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = wrapped.previous

    return remove


def wrapper_at(module: nn.Module, rank: Rank) -> Wrapper | None:
    """The innermost wrapper of `rank` around `module`."""
    wrapped = module.__dict__.get("forward")
    entries = wrapped.entries if isinstance(wrapped, _WrappedForward) else []
    return next((entry.wrapper for entry in entries if entry.rank == rank), None)


def call_below(module: nn.Module, rank: Rank, *args: Any) -> Any:
    """Call `module` as a wrapper of `rank` around it sees it: wrappers of that rank and above left out, hooks included."""
    wrapped = module.__dict__.get("forward")
    if not isinstance(wrapped, _WrappedForward):
        return module(*args)
    before, wrapped.below = wrapped.below, rank
    try:
        return module(*args)
    finally:
        wrapped.below = before


def has_wrapper(module: nn.Module, rank: Rank) -> bool:
    return wrapper_at(module, rank) is not None

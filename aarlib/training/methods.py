"""Methods: what is attached, what is trained and on which loss. One dict from a config's `name` to its class."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.fdaa.attach import AggregationHandle
from aarlib.training.aggregation import AggregationMethod
from aarlib.training.objectives import Term, next_token_ce


class Method(Protocol):
    """`loss` gives sums over target tokens, never means: the trainer divides by the global count of the optimizer step."""

    @property
    def first_trainable_layer(self) -> int: ...

    def attach(self, model: nn.Module) -> RoutingHandle | AggregationHandle: ...

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], step: int) -> dict[str, Term]: ...


class RoutingMethod:
    """Routing-only SFT and AAR: next-token CE on the targets, nothing else (DESIGN 2.2)."""

    def __init__(self, config: RouterSFTConfig | AARConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._handle: RoutingHandle | None = None

    @property
    def first_trainable_layer(self) -> int:
        """Index of the first layer with trained parameters; below it no graph is needed."""
        if self._handle is None:
            raise ValueError("first_trainable_layer is known once the method is attached; call attach(model) first")
        return min(self._handle.routers)

    def attach(self, model: nn.Module) -> RoutingHandle:
        self._handle = attach_aar(model, self.config, seed=self.seed)
        return self._handle

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], step: int) -> dict[str, Term]:
        """{"ce": (summed CE over target tokens, number of target tokens)}."""
        ce_sum_B, num_targets_B = next_token_ce(model, batch)
        return {"ce": Term(ce_sum_B.sum(), num_targets_B.sum())}


METHODS = {
    "router_sft": RoutingMethod,
    "aar": RoutingMethod,
    "fdaa": AggregationMethod,
    "static_calibrator": AggregationMethod,
}


def build_method(config: Any, seed: int = 0) -> RoutingMethod | AggregationMethod:
    """The method of a config; `seed` initialises its trained parameters."""
    return METHODS[config.name](config, seed)

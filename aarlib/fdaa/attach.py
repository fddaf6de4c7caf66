"""Attach an aggregation head to a frozen model. Selection, expert outputs and mass stay; only the weights change.

Around the router (outside any trained one): u from the family's experts, s from the head, w' = M q; around the experts:
sum_j w'_j u_j of the same u, so that no expert runs twice. What records or intervenes on the router sees w'.
T tokens, D d_model, K top_k.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from aarlib.audit.actions import check_freedom
from aarlib.audit.head import AggregationHead, Mask, aggregate
from aarlib.fdaa.config import FDAAConfig, FixedConfig, StaticCalibratorConfig
from aarlib.fdaa.controls import StaticCalibrator, Tempered, permuted_scores
from aarlib.moe.anatomy import Anatomy, LayerAnatomy, anatomy
from aarlib.moe.dispatch import RouterOutput, exact_float32, expert_outputs
from aarlib.moe.families import Family
from aarlib.moe.handle import PatchHandle
from aarlib.moe.patching import Rank, call_below, has_wrapper, wrap_forward

AnyConfig = FDAAConfig | StaticCalibratorConfig | FixedConfig


class Scored(NamedTuple):
    """What the head did at one layer: native weights and scores, float32, with their graph."""

    weights: Float[Tensor, "T K"]
    scores: Float[Tensor, "T K"]


class Evaluated(NamedTuple):
    """The router's own output at a layer, and the outputs u of the experts it selected."""

    native: RouterOutput
    outputs: Float[Tensor, "T K D"]


class AggregationHandle(PatchHandle):
    """What attach_fdaa returns: owns the float32 head and the patches that put it to work.

    `enabled` switches between patched and stock, bit for bit; `detach()` gives the stock model back for good. `acting` names the
    layers at which the head acts in the next forwards (all of its layers, unless set).
    """

    def __init__(
        self,
        parts: Anatomy,
        config: AnyConfig,
        head: AggregationHead | StaticCalibrator | Tempered,
    ) -> None:
        super().__init__(parts, nn.ModuleDict({"head": head}))
        self.config = config
        self.head = head
        self.layers = config.layers
        self.acting: Collection[int] = config.layers
        self.masked: Collection[Mask] = ()
        """Projected features zeroed in the next forwards: inference-time feature masks."""
        self.permutation: Tensor | None = None
        """[B, S]: positions whose score vectors the next forward uses, a control."""
        self.known: dict[int, Evaluated] = {}
        """Layers whose router and experts need not run again (training/prefix.py)."""
        self._scored: dict[int, Scored] | None = None
        self._pending: dict[int, _Pending] = {}
        self._shape: tuple[int, int] = (0, 0)
        self.enabled = True

    def _forget(self) -> None:
        self._pending.clear()

    @contextmanager
    def scoring(self) -> Iterator[dict[int, Scored]]:
        """Inside, the forwards leave weights and scores of each acting layer in the dict it yields."""
        self._scored = {}
        try:
            yield self._scored
        finally:
            self._scored = None

    def _install(self) -> None:
        layers = [self.anatomy.layers[index] for index in self.layers]
        taken = [layer.index for layer in layers if layer.router and has_wrapper(layer.router, Rank.AGGREGATION)]
        if taken:
            raise ValueError(
                f"layers {taken}: another aggregation head is enabled there; disable or detach() that handle first"
            )
        self._removers.append(wrap_forward(self.anatomy.decoder, self._around_decoder, Rank.AGGREGATION))
        for layer in layers:
            assert layer.router is not None and layer.experts is not None
            self._removers.append(wrap_forward(layer.router, self._around_router(layer), Rank.AGGREGATION))
            self._removers.append(wrap_forward(layer.experts, self._around_experts(layer), Rank.AGGREGATION))

    def _around_decoder(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Expert outputs of a forward that raised must not keep its graph alive."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        self._shape = (tokens.shape[0], tokens.shape[1])
        try:
            return inner(*args, **kwargs)
        finally:
            self._pending.clear()

    def _around_router(self, layer: LayerAnatomy) -> Callable[..., Any]:
        def wrapper(inner: Callable[..., Any], hidden: Tensor) -> Any:
            if layer.index not in self.acting:
                return inner(hidden)
            rows = hidden.reshape(-1, hidden.shape[-1])
            native, outputs = self.known.get(layer.index) or evaluate(layer, inner, hidden)
            scores = self._scores(layer.index, rows, outputs, native)
            weights = aggregate(native.weights, scores)
            if self._scored is not None:
                self._scored[layer.index] = Scored(native.weights.float(), scores)
            self._pending[layer.index] = _Pending(native.expert_ids, outputs, native.weights.dtype)
            return native.router_logits, weights, native.expert_ids

        return wrapper

    def _scores(self, layer: int, hidden: Tensor, outputs: Tensor, native: RouterOutput) -> Tensor:
        """On the layer's device; the head, one for all layers, stays on that of its first one."""
        place = next((parameter.device for parameter in self.head.parameters()), hidden.device)
        features = (part.to(place) for part in (hidden, outputs, native.weights, native.expert_ids))
        scores = self.head(*features, layer, masked=self.masked).to(native.weights.device)
        if self.permutation is None:
            return scores
        rows = (native.weights.unflatten(0, self._shape), scores.unflatten(0, self._shape))
        return permuted_scores(*rows, self.permutation.to(scores.device)).flatten(0, 1)

    def _around_experts(self, layer: LayerAnatomy) -> Callable[..., Any]:
        def wrapper(inner: Callable[..., Any], hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Any:
            pending = self._pending.get(layer.index)
            if pending is None:
                return inner(hidden, expert_ids, weights)
            if expert_ids is not pending.expert_ids:
                return inner(hidden, expert_ids, weights.to(pending.weights_dtype))
            del self._pending[layer.index]
            return weighted_sum(weights, pending.outputs)

        return wrapper


class _Pending(NamedTuple):
    """Expert outputs on their way from the router's wrapper to the experts' one."""

    expert_ids: Int[Tensor, "T K"]
    outputs: Float[Tensor, "T K D"]
    weights_dtype: torch.dtype


def evaluate(layer: LayerAnatomy, router: Callable[..., Any], hidden: Tensor) -> Evaluated:
    """What `router`, the forward below an aggregation, selects for `hidden`, and the outputs of those experts."""
    native = RouterOutput(*router(hidden))
    experts = layer.experts
    assert experts is not None

    def call(*args: Tensor) -> Tensor:
        return call_below(experts, Rank.AGGREGATION, *args)

    return Evaluated(native, expert_outputs(call, hidden.reshape(-1, hidden.shape[-1]), native.expert_ids))


def weighted_sum(weights: Float[Tensor, "T K"], outputs: Float[Tensor, "T K D"]) -> Float[Tensor, "T D"]:
    """m_t = sum_j w_j u_j, summed in float32, in the dtype of u."""
    with exact_float32(outputs.device):
        total_T1D = torch.bmm(weights.float().unsqueeze(1), outputs.float())
    return total_T1D.squeeze(1).to(outputs.dtype)


def attach_fdaa(model: nn.Module, config: AnyConfig, seed: int = 0, family: Family | None = None) -> AggregationHandle:
    """Attach a learned aggregation head, or a control in its place, to `model`, which may carry attention-aware routers.

    `seed` draws the head. Works on a meta-device model. Raises ValueError for a layer without router, top_k = 1 (no freedom), and
    a layer where another head is enabled.
    """
    parts = anatomy(model, family)
    check_freedom(parts.top_k)
    routers = [parts.moe_layer(index).router for index in config.layers]
    assert routers[0] is not None
    device = routers[0].get_parameter("weight").device
    if isinstance(config, FDAAConfig):
        head = AggregationHead(
            parts.hidden_size,
            parts.num_experts,
            config.layers,
            projection_size=config.projection_size,
            hidden_size=config.hidden_size,
            seed=seed,
            device=device,
        )
    elif isinstance(config, StaticCalibratorConfig):
        head = StaticCalibrator(parts.num_experts, config.layers, device)
    else:
        head = Tempered(config.tau)
    return AggregationHandle(parts, config, head)

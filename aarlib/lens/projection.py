"""All receiving routers as one matrix: scores of a component are one matrix product, then one factor per token.

D d_model, R receivers, E num_experts, T tokens, H heads, Dv their size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from aarlib.aar.attach import attached_router
from aarlib.lens.capture import Capture, inverse_rms, norm_scale, num_heads
from aarlib.moe.anatomy import Anatomy, LayerAnatomy


class Projection:
    """W_r * gamma_r of every receiver r, side by side; made once for a model, used on any number of forwards."""

    def __init__(self, parts: Anatomy, receivers: Sequence[int] | None = None) -> None:
        self.parts = parts
        self.receivers = _check_receivers(parts, receivers)
        self.device = next(parts.decoder.parameters()).device
        """Of the embedding: where everything is gathered if the layers are spread over several devices."""
        columns = [_router_matrix(parts, parts.layers[index], self.device) for index in self.receivers]
        self.router: Float[Tensor, "D R E"] = torch.stack([column.weight for column in columns], dim=1)
        self.gamma: Float[Tensor, "D R"] = torch.stack([column.gamma for column in columns], dim=1)
        self.weight: Float[Tensor, "D R E"] = self.router * self.gamma[..., None]
        has_bias = columns[0].bias is not None
        self.bias: Float[Tensor, "R E"] | None = torch.stack([c.bias for c in columns]) if has_bias else None  # pyright: ignore[reportArgumentType]
        self._heads: dict[int, Tensor] = {}

    def start(self, depth: int) -> int:
        """Index of the first receiver that a component at `depth` reaches (receivers are in layer order)."""
        return next((i for i, receiver in enumerate(self.receivers) if depth <= 2 * receiver), len(self.receivers))

    def of_sublayer(self, layer: int, is_attention: bool) -> Float[Tensor, "D R E"]:
        """The matrix for raw outputs of a sub-layer: with its own output norm's gamma where the sender is normalised."""
        if self.parts.family.norm_side == "receiver":
            return self.weight
        gamma = norm_scale(self.parts, sender_norm(self.parts.layers[layer], is_attention)).to(self.device)
        return self.weight * gamma[:, None, None]

    def of_heads(self, layer: int) -> Float[Tensor, "H Dv R E"]:
        """The output projection folded in: from each head's output straight to the routers' scores."""
        if layer not in self._heads:
            anatomy = self.parts.layers[layer]
            output = anatomy.output_projection.get_parameter("weight").detach().to(self.device, torch.float32)
            matrix = self.of_sublayer(layer, is_attention=True)
            folded = (output.T @ matrix.flatten(1)).unflatten(1, matrix.shape[1:])
            self._heads[layer] = folded.unflatten(0, (num_heads(self.parts, anatomy), -1))
        return self._heads[layer]


class _RouterMatrix(NamedTuple):
    weight: Float[Tensor, "D E"]
    gamma: Float[Tensor, " D"]
    """Of the norm before the router; 1 where senders are normalised."""
    bias: Float[Tensor, " E"] | None


def _router_matrix(parts: Anatomy, layer: LayerAnatomy, device: torch.device) -> _RouterMatrix:
    assert layer.router is not None
    router = attached_router(layer.router) or layer.router
    weight = router.get_parameter("weight").detach().to(device, torch.float32).T
    receives = parts.family.norm_side == "receiver"
    gamma = norm_scale(parts, layer.moe_norm).to(device) if receives else torch.ones_like(weight[:, 0])
    name = "bias" if router is not layer.router else parts.family.router_bias
    bias = getattr(router, name) if name is not None else None
    return _RouterMatrix(weight, gamma, None if bias is None else bias.detach().to(device, torch.float32))


def sender_norm(layer: LayerAnatomy, is_attention: bool) -> torch.nn.Module:
    return layer.attention_norm if is_attention else layer.moe_norm


def _check_receivers(parts: Anatomy, receivers: Sequence[int] | None) -> tuple[int, ...]:
    if receivers is None:
        return parts.moe_layers
    wrong = sorted(set(receivers) - set(parts.moe_layers))
    if wrong or not receivers:
        have = ", ".join(str(layer) for layer in parts.moe_layers)
        raise ValueError(f"receivers = {list(receivers)}: layers {wrong} have no router; layers that have one: {have}")
    return tuple(sorted(set(receivers)))


class ReceiverState(NamedTuple):
    """What turns products with `Projection` into scores of one forward."""

    logits: Float[Tensor, "T R E"]
    scale: Float[Tensor, "T R"]
    """1 / rms of the residual stream before each receiver's norm; 1 where senders are normalised."""
    factor: Float[Tensor, "T R E"] | None
    """1 - mean alpha of AAR routers (1 on others); None: all are stock."""
    constants: dict[str, Float[Tensor, "T R E"]]
    """Parts that come from no component of the residual stream: bias and views; NaN at receivers without them."""


def receiver_state(projection: Projection, capture: Capture) -> ReceiverState:
    parts, receivers = projection.parts, projection.receivers
    routed = [capture.routed(index) for index in receivers]
    logits = torch.stack([item.logits for item in routed], dim=1)
    scale = torch.ones_like(logits[..., 0])
    if parts.family.norm_side == "receiver":
        norms = [parts.layers[index].moe_norm for index in receivers]
        columns = [
            inverse_rms(capture.layers[index].residual, norm, parts.family.norm_eps)
            for index, norm in zip(receivers, norms, strict=True)
        ]
        scale = torch.stack(columns, dim=1)
    factor, constants = None, dict[str, Tensor]()
    if any(item.terms is not None and item.terms.gates for item in routed):
        factor = torch.ones_like(logits)
        for index, item in enumerate(routed):
            for view in item.terms.gates if item.terms is not None else ():
                assert item.terms is not None
                share = 1 / len(item.terms.gates)
                factor[:, index] -= share * item.terms.gates[view]
                constant = constants.setdefault(f"view.{view}", torch.full_like(logits, float("nan")))
                constant[:, index] = share * item.terms.views[view]
    if projection.bias is not None:
        constants["bias"] = projection.bias * (torch.ones_like(logits) if factor is None else factor)
    return ReceiverState(logits, scale, factor, constants)


def scores_from(
    products: Float[Tensor, "n T Rs E"], state: ReceiverState, start: int, sender_scale: Float[Tensor, " T"] | None
) -> Float[Tensor, "n T Rs E"]:
    """Scores of components from their products with the projection; in place. Receivers from `start` on."""
    scale = state.scale[:, start:]
    products *= (scale if sender_scale is None else scale * sender_scale[:, None])[..., None]
    if state.factor is not None:
        products *= state.factor[:, start:]
    return products

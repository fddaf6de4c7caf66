"""The trained router of one MoE layer (AAR paper, equations 3-5); without views it is a float32 copy of the stock one.

T tokens, D d_model, E num_experts, M window, M_v features of a view.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from aarlib.aar.config import View
from aarlib.aar.views import view_of, view_size
from aarlib.moe.dispatch import exact_float32

CLOSED_GATE_BIAS = -4.0


class RouterTerms(NamedTuple):
    """What the logits are made of: g = (1 - mean_v gate_v) * standard + mean_v view_v."""

    standard: Float[Tensor, "T E"]
    gates: dict[View, Float[Tensor, "T E"]]
    """alpha_v."""
    views: dict[View, Float[Tensor, "T E"]]
    """alpha_v * g_v."""


class AttentionAwareRouter(nn.Module):
    """g = (1 - mean_v alpha_v) * g_std + mean_v(alpha_v * g_v), elementwise over experts, in float32.

    g_std = W h + b;  g_v = A_v^T view_v;  alpha_v = sigmoid(G_v [h || view_v] (+ gate bias with init `closed`)).
    Parameters: weight [E, D], bias [E] where the family has one, and per view attention_<view> = A_v [M_v, E],
    gate_<view> = G_v [E, D + M_v], gate_bias_<view> [E] with init `closed`.
    """

    def __init__(self, weight: Float[Tensor, "E D"], bias: Float[Tensor, " E"] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(torch.float32, copy=True))
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(torch.float32, copy=True))
        self.views: tuple[View, ...] = ()
        self.window = 0

    def add_views(
        self, views: Sequence[View], window: int, init: Literal["default", "closed"], generator: torch.Generator
    ) -> None:
        """Create A and G: A_v ~ U(+-1/sqrt(M_v)), G_v ~ U(+-1/sqrt(D+M_v)); `closed` adds a gate bias of -4."""
        num_experts, hidden_size = self.weight.shape
        self.views, self.window = tuple(views), window
        for view in views:
            size = view_size(view, window)
            attention = _uniform((size, num_experts), 1 / math.sqrt(size), self.weight.device, generator)
            gate = _uniform(
                (num_experts, hidden_size + size), 1 / math.sqrt(hidden_size + size), self.weight.device, generator
            )
            self.register_parameter(f"attention_{view}", attention)
            self.register_parameter(f"gate_{view}", gate)
            if init == "closed":
                bias = torch.full((num_experts,), CLOSED_GATE_BIAS, device=self.weight.device)
                self.register_parameter(f"gate_bias_{view}", nn.Parameter(bias))

    @property
    def attention_weights(self) -> dict[str, nn.Parameter]:
        """A_v [M_v, E] by view."""
        return {view: getattr(self, f"attention_{view}") for view in self.views}

    @property
    def gate_weights(self) -> dict[str, nn.Parameter]:
        """G_v [E, D + M_v] by view."""
        return {view: getattr(self, f"gate_{view}") for view in self.views}

    def forward(
        self, hidden: Float[Tensor, "T D"], windows: Float[Tensor, "T M"] | None = None
    ) -> Float[Tensor, "T E"]:
        with exact_float32(hidden.device):
            terms = self.terms(hidden, windows)
            if not self.views:
                return terms.standard
            share = 1 / len(self.views)
            return (1 - sum(terms.gates.values()) * share) * terms.standard + sum(terms.views.values()) * share

    def terms(self, hidden: Float[Tensor, "T D"], windows: Float[Tensor, "T M"] | None) -> RouterTerms:
        hidden = hidden.float()
        terms = RouterTerms(linear(hidden, self.weight, self.bias), {}, {})
        for view in self.views:
            assert windows is not None
            features = view_of(view, windows)
            alpha_TE = self._alpha(view, hidden, features)
            terms.gates[view] = alpha_TE
            terms.views[view] = alpha_TE * (features @ getattr(self, f"attention_{view}"))
        return terms

    def _alpha(self, view: View, hidden: Tensor, features: Tensor) -> Tensor:
        gate, bias = getattr(self, f"gate_{view}"), getattr(self, f"gate_bias_{view}", None)
        hidden_size = hidden.shape[-1]
        return torch.sigmoid(linear(hidden, gate[:, :hidden_size], bias) + linear(features, gate[:, hidden_size:]))


def _uniform(shape: tuple[int, int], bound: float, device: torch.device, generator: torch.Generator) -> nn.Parameter:
    """Drawn on the CPU, so that a seed gives the same values on every device; shapes only on the meta device."""
    if device.type == "meta":
        return nn.Parameter(torch.empty(shape, device=device))
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator).to(device))

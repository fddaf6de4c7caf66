"""The aggregation head (DESIGN 2.5; "Beyond Routing", equations 5-7): one residual score for each selected expert.

T tokens, D d_model, K top_k, P projection size, F features of a slot. Permutation-equivariant over the K slots.
"""

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu

from aarlib.moe.dispatch import exact_float32

EXPERT_EMBEDDING = 8
LAYER_EMBEDDING = 32
ROUTER_FEATURES = 3
"""p_j, log p_j, M_t."""
SMALLEST_SHARE = 1e-30
"""Shares and masses are clamped here before a logarithm or a division."""

Mask = Literal["hidden", "outputs"]
"""Projected features that can be zeroed: those of the token's h, those of the experts' u."""


class Shares(NamedTuple):
    """Native weights as mass and shares, float32: w = mass * exp(log_p)."""

    log_p: Float[Tensor, "T K"]
    mass: Float[Tensor, "T 1"]


class AggregationHead(nn.Module):
    """s = head(h, u, w, expert ids, layer), float32; the last layer starts at zero, so s = 0 before training.

    Features of slot j: a = P_h h and b_j = P_u u_j (no bias), a*b_j, b_j - mean_j b, expert embedding (8, shared by all layers),
    layer embedding (32), [p_j, log p_j, M_t]; then Linear(F, hidden_size) -> GELU -> Linear(hidden_size, 1).
    With `context_size`, a further vector c of each token enters as P_c c and (P_c c)*b_j.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        layers: Sequence[int],
        *,
        projection_size: int = 64,
        hidden_size: int = 128,
        context_size: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.context_size = context_size
        num_projected = 4 if context_size == 0 else 6
        num_features = num_projected * projection_size + EXPERT_EMBEDDING + LAYER_EMBEDDING + ROUTER_FEATURES
        self.project_hidden = nn.Linear(d_model, projection_size, bias=False, device="meta")
        self.project_outputs = nn.Linear(d_model, projection_size, bias=False, device="meta")
        if context_size:
            self.project_context = nn.Linear(context_size, projection_size, bias=False, device="meta")
        self.expert_embedding = nn.Embedding(num_experts, EXPERT_EMBEDDING, device="meta")
        self.layer_embedding = nn.Embedding(len(self.layers), LAYER_EMBEDDING, device="meta")
        self.mix = nn.Linear(num_features, hidden_size, device="meta")
        self.score = nn.Linear(hidden_size, 1, device="meta")
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """torch's defaults (linear U(+-1/sqrt(fan_in)), embeddings N(0, 1)), drawn on the CPU: one seed, one head anywhere."""
        with torch.no_grad():
            for module in self.children():
                for parameter in module.parameters():
                    values = torch.empty(parameter.shape)
                    if isinstance(module, nn.Embedding):
                        values.normal_(generator=generator)
                    else:
                        assert isinstance(module, nn.Linear)
                        bound = 1 / math.sqrt(module.in_features)
                        values.uniform_(-bound, bound, generator=generator)
                    parameter.copy_(values)
            self.score.weight.zero_()
            self.score.bias.zero_()

    def forward(
        self,
        hidden: Float[Tensor, "T D"],
        outputs: Float[Tensor, "T K D"],
        weights: Float[Tensor, "T K"],
        expert_ids: Int[Tensor, "T K"],
        layer: int,
        *,
        masked: Collection[Mask] = (),
        context: Float[Tensor, "T C"] | None = None,
    ) -> Float[Tensor, "T K"]:
        """Scores s; `masked` zeroes projected features: outputs = b, a*b, b - mean b; hidden = a, a*b."""
        with exact_float32(hidden.device):
            a_TKP = self.project_hidden(hidden.float()).unsqueeze(1).expand(-1, outputs.shape[1], -1)
            b_TKP = self.project_outputs(outputs.float())
            if "hidden" in masked:
                a_TKP = torch.zeros_like(a_TKP)
            if "outputs" in masked:
                b_TKP = torch.zeros_like(b_TKP)
            projected = [a_TKP, b_TKP, a_TKP * b_TKP, b_TKP - b_TKP.mean(dim=1, keepdim=True)]
            if context is not None:
                c_TKP = self.project_context(context.float()).unsqueeze(1).expand_as(b_TKP)
                projected += [c_TKP, c_TKP * b_TKP]
            features_TKF = torch.cat([*projected, self._discrete(expert_ids, layer), _router_features(weights)], dim=-1)
            return self.score(gelu(self.mix(features_TKF))).squeeze(-1)

    def _discrete(self, expert_ids: Tensor, layer: int) -> Tensor:
        index = torch.tensor(self.layers.index(layer), device=expert_ids.device)
        layer_TKL = self.layer_embedding(index).expand(*expert_ids.shape, -1)
        return torch.cat([self.expert_embedding(expert_ids), layer_TKL], dim=-1)


def _router_features(weights_TK: Tensor) -> Tensor:
    log_p_TK, mass_T1 = shares(weights_TK)
    return torch.stack([log_p_TK.exp(), log_p_TK, mass_T1.expand_as(log_p_TK)], dim=-1)


def shares(weights: Float[Tensor, "T K"]) -> Shares:
    """M_t = sum_j w_j and log p_j = log(w_j / M_t), clamped."""
    weights = weights.float()
    mass_T1 = weights.sum(dim=-1, keepdim=True)
    p_TK = weights / mass_T1.clamp_min(SMALLEST_SHARE)
    return Shares(p_TK.clamp_min(SMALLEST_SHARE).log(), mass_T1)


def aggregate(weights: Float[Tensor, "T K"], scores: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
    """w' = M_t q with q_j proportional to p_j exp(s_j) (equation 6), float32; exactly w where all scores are equal."""
    weights = weights.float()
    raised_TK = weights * (scores - scores.amax(dim=-1, keepdim=True)).exp()
    mass_T1, total_T1 = weights.sum(dim=-1, keepdim=True), raised_TK.sum(dim=-1, keepdim=True)
    return raised_TK * (mass_T1 / total_T1.clamp_min(SMALLEST_SHARE))


def kl_to_native(weights: Float[Tensor, "T K"], scores: Float[Tensor, "T K"]) -> Float[Tensor, " T"]:
    """KL(q || p) = sum_j q_j s_j - logsumexp(log p + s), nats per token."""
    tilted_TK = shares(weights).log_p + scores
    return (tilted_TK.softmax(dim=-1) * scores).sum(dim=-1) - tilted_TK.logsumexp(dim=-1)

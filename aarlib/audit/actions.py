"""Counterfactual weights of the selected experts, their mass unchanged (DESIGN 2.3). Pure functions of the router's weights.

With mass M = sum_j w_j and p_j = w_j / M an action replaces w by M q, q on the simplex. K top_k, A actions (4 + 2 K).
"""

import torch
from jaxtyping import Float
from torch import Tensor

TEMPERATURES = (0.5, 2.0)
FIXED = ("native", "uniform", *(f"temperature_{tau}" for tau in TEMPERATURES))
"""The actions that do not single out a slot."""


def action_names(top_k: int) -> tuple[str, ...]:
    """native, uniform, temperature_0.5, temperature_2.0, mix_0 .. mix_K-1, vertex_0 .. vertex_K-1."""
    check_freedom(top_k)
    return (*FIXED, *(f"mix_{slot}" for slot in range(top_k)), *vertex_names(top_k))


def vertex_names(top_k: int) -> tuple[str, ...]:
    return tuple(f"vertex_{slot}" for slot in range(top_k))


def check_freedom(top_k: int) -> None:
    if top_k < 2:
        raise ValueError(
            f"num_experts_per_tok = {top_k}: with one selected expert and its mass fixed there is nothing to reweigh; "
            "use a model with top_k >= 2"
        )


def action_weights(weights: Float[Tensor, "*T K"]) -> Float[Tensor, "*T A K"]:
    """The weights of every action in the order of `action_names`, float32; `native` is `weights` itself."""
    check_freedom(weights.shape[-1])
    weights = weights.float()
    fixed = [weights, uniform(weights), *(temperature(weights, tau) for tau in TEMPERATURES)]
    return torch.cat([torch.stack(fixed, dim=-2), mixtures(weights), vertices(weights)], dim=-2)


def uniform(weights: Float[Tensor, "*T K"]) -> Float[Tensor, "*T K"]:
    """q_j = 1 / K."""
    return weights.mean(-1, keepdim=True).expand_as(weights)


def temperature(weights: Float[Tensor, "*T K"], tau: float) -> Float[Tensor, "*T K"]:
    """q_j proportional to p_j^(1 / tau): sharper below 1, flatter above."""
    mass = weights.sum(-1, keepdim=True)
    powers = (weights / weights.amax(-1, keepdim=True)) ** (1 / tau)
    return mass * powers / powers.sum(-1, keepdim=True)


def mixtures(weights: Float[Tensor, "*T K"], share: float = 0.5) -> Float[Tensor, "*T K K"]:
    """Row j: q = (1 - share) p + share e_j."""
    return (1 - share) * weights[..., None, :] + share * vertices(weights)


def vertices(weights: Float[Tensor, "*T K"]) -> Float[Tensor, "*T K K"]:
    """Row j: the whole mass on slot j."""
    identity = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    return weights.sum(-1)[..., None, None] * identity

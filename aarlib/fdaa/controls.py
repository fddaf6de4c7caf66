"""What the learned head is compared with (DESIGN 2.5): a static calibrator, permuted scores; fixed ones are audit.actions.

T tokens, K top_k, B windows, S positions.
"""

import hashlib
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from aarlib.audit.head import shares


class StaticCalibrator(nn.Module):
    """s_j = table[layer, expert j]: no token, no expert output; zero before training."""

    def __init__(self, num_experts: int, layers: Sequence[int], device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.table = nn.Parameter(torch.zeros(len(self.layers), num_experts, device=device))

    def forward(
        self,
        hidden: Float[Tensor, "T D"],
        outputs: Float[Tensor, "T K D"] | None,
        weights: Float[Tensor, "T K"],
        expert_ids: Int[Tensor, "T K"],
        layer: int,
        *,
        masked: Collection[str] = (),
    ) -> Float[Tensor, "T K"]:
        return self.table[self.layers.index(layer)][expert_ids]


class Tempered(nn.Module):
    """The fixed transforms as scores: s_j = (1/tau - 1) log p_j, so that q is proportional to p^(1/tau); no parameters.

    tau = 1 is native, exactly; tau = inf is uniform.
    """

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.power = 1 / tau - 1

    def forward(
        self,
        hidden: Float[Tensor, "T D"],
        outputs: Float[Tensor, "T K D"] | None,
        weights: Float[Tensor, "T K"],
        expert_ids: Int[Tensor, "T K"],
        layer: int,
        *,
        masked: Collection[str] = (),
    ) -> Float[Tensor, "T K"]:
        return self.power * shares(weights).log_p


def permuted_scores(
    weights: Float[Tensor, "B S K"], scores: Float[Tensor, "B S K"], permutation: Int[Tensor, "B S"]
) -> Float[Tensor, "B S K"]:
    """Position t of window b gets the score vector of position permutation[b, t], slots aligned by descending router weight."""
    order_BSK = weights.argsort(dim=-1, descending=True, stable=True)
    ranked_BSK = scores.gather(-1, order_BSK)
    moved_BSK = ranked_BSK.gather(1, permutation.unsqueeze(-1).expand_as(ranked_BSK))
    return torch.zeros_like(moved_BSK).scatter(-1, order_BSK, moved_BSK)


def window_permutations(window_ids: Sequence[str], lengths: Sequence[int], size: int) -> Int[Tensor, "B S"]:
    """One permutation of each window's positions, seeded by its id; padding (from `lengths` on) stays where it is."""
    permutation_BS = torch.arange(size).repeat(len(window_ids), 1)
    for row, (window_id, length) in enumerate(zip(window_ids, lengths, strict=True)):
        seed = int.from_bytes(hashlib.sha256(f"permutation\0{window_id}".encode()).digest()[:8], "big") >> 1
        permutation_BS[row, :length] = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    return permutation_BS

"""Does a component change which experts come first? AARV, the average absolute rank variation of the chosen experts.

T tokens, R receivers (Rs: from `start` on), E num_experts, K top_k.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aarlib.lens.decomposition import Decomposition
from aarlib.lens.influence import Measure, moments
from aarlib.lens.scores import Reading

MEASURES = ("variance", "aps", "ans", "aarv")


def aarv(decomposition: Decomposition, receiver: int, component: str) -> float:
    """Mean over tokens and their chosen experts of |rank change| in the raw logits of all experts, `component` zeroed."""
    kept = decomposition.reading.capture
    logits = decomposition.logits(receiver)[kept.mask]
    without = logits - decomposition.scores(receiver, component)[kept.mask]
    ids = kept.routed(receiver).expert_ids
    return float((ranks(without, ids) - ranks(logits, ids)).abs().float().mean())


def ranks(logits: Float[Tensor, "*rows E"], expert_ids: Int[Tensor, "*rows K"]) -> Int[Tensor, "*rows K"]:
    """How many experts come before each of `expert_ids`; equal logits in the order of the experts."""
    own = logits.gather(-1, expert_ids)[..., None]
    others = logits[..., None, :]
    before = torch.arange(logits.shape[-1], device=logits.device) < expert_ids[..., None]
    return ((others > own) | ((others == own) & before)).sum(-1)


def moments_and_aarv(reading: Reading) -> Measure:
    """A measure of MEASURES: the moments, and each token's mean |rank change|."""
    logits = reading.state.logits
    ids = torch.stack([reading.capture.routed(r).expert_ids for r in reading.projection.receivers], dim=1)
    original = ranks(logits, ids)

    def measure(scores: Float[Tensor, "n T Rs E"], start: int) -> Float[Tensor, "n T Rs M"]:
        moved = [
            (ranks(logits[:, start:] - item, ids[:, start:]) - original[:, start:]).abs().float().mean(-1)
            for item in scores
        ]
        unreached = scores[..., 0].isnan()
        column = torch.stack(moved).masked_fill(unreached, float("nan"))
        return torch.cat([moments(scores), column[..., None]], dim=-1)

    return measure

"""What pre-training minimises: next-token cross-entropy, load balance for each layer and domain, and a router z-loss."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import OlmoeForCausalLM

from aarlib.nano.corpus import DOMAINS


class Losses(NamedTuple):
    ce: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    z: Float[Tensor, ""]
    smallest_share: Float[Tensor, ""]
    """The least-picked expert's share of picks over the fair share: the worst layer and domain."""


def load_balance(router_logits: Float[Tensor, "T E"], top_k: int, valid: Bool[Tensor, " T"]) -> tuple[Tensor, Tensor]:
    """Switch Transformer's loss E * sum_e f_e P_e of one layer (1 when balanced), and f_e, its share of picks; no padding."""
    probabilities_TE = router_logits.float().softmax(-1)[valid]
    picks_TE = torch.zeros_like(probabilities_TE).scatter_(1, probabilities_TE.topk(top_k, dim=-1).indices, 1.0)
    share_E = picks_TE.mean(0) / top_k
    return share_E.numel() * (share_E * probabilities_TE.mean(0)).sum(), share_E


def losses(
    model: OlmoeForCausalLM, input_ids: Int[Tensor, "B S"], labels: Int[Tensor, "B S"], domains: Int[Tensor, "B S"]
) -> Losses:
    output = model.model(input_ids=input_ids, output_router_logits=True, use_cache=False)
    logits = model.lm_head(output.last_hidden_state[:, :-1])
    ce = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    valid_T, config = (domains >= 0).flatten(), model.config
    members = [mask_T for index in range(len(DOMAINS)) if (mask_T := (domains == index).flatten()).any()]
    parts = [
        load_balance(layer, config.num_experts_per_tok, mask_T) for layer in output.router_logits for mask_T in members
    ]
    z = torch.stack([layer[valid_T].float().logsumexp(-1).square().mean() for layer in output.router_logits]).mean()
    smallest = torch.stack([share_E.min() * config.num_experts for _, share_E in parts]).min()
    return Losses(ce, torch.stack([loss for loss, _ in parts]).mean(), z, smallest)

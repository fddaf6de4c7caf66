"""Objectives as sums over target tokens. Dividing by the global count is the trainer's business."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aarlib.moe.packing import packed_inputs

IGNORED = -100
NUM_CHUNKS = 8


class Term(NamedTuple):
    """One term of a loss: its sum over target tokens and their number, both scalars."""

    sum: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class RowCE(NamedTuple):
    ce_sum: Float[Tensor, " B"]
    """float32, nats."""
    num_targets: Int[Tensor, " B"]


def next_token_ce(model: nn.Module, batch: Mapping[str, Tensor], num_chunks: int = NUM_CHUNKS) -> RowCE:
    """Summed next-token cross-entropy of each row: -log p(labels[t+1] | input_ids[..t]) where labels[t+1] is not -100.

    Equals the cross-entropy of `model(...).logits` in float32. The output embedding sees only the positions with a
    target, in `num_chunks` parts of which one at a time is held (recomputed in the backward). The number of parts does
    not depend on the batch, nor on there being a target: under ZeRO-3 every rank gathers the embedding equally often.
    Without a target the sums are zeros that a backward can start from. A batch with position_ids is a packed one; one
    with inputs_embeds enters the decoder with them.
    """
    labels_BS = batch["labels"][:, 1:]
    is_target_BS = labels_BS != IGNORED
    hidden_BSD = _last_hidden(model, batch)[:, :-1]
    ce_N = _chunked_ce(model, hidden_BSD[is_target_BS.to(hidden_BSD.device)], labels_BS[is_target_BS], num_chunks)
    ce_BS = torch.zeros(is_target_BS.shape, device=ce_N.device).masked_scatter(is_target_BS.to(ce_N.device), ce_N)
    return RowCE(ce_BS.sum(dim=1), is_target_BS.sum(dim=1))


def _last_hidden(model: Any, batch: Mapping[str, Tensor]) -> Float[Tensor, "B S D"]:
    if "position_ids" in batch:
        inputs = packed_inputs(model, batch["input_ids"], batch["position_ids"])
    else:
        name = "inputs_embeds" if "inputs_embeds" in batch else "input_ids"
        inputs = {name: batch[name], "attention_mask": batch.get("attention_mask"), "use_cache": False}
    return model.get_decoder()(**inputs).last_hidden_state


def _chunked_ce(
    model: Any, hidden_ND: Float[Tensor, "N D"], labels_N: Int[Tensor, " N"], num_chunks: int
) -> Float[Tensor, " N"]:
    output_embedding = model.get_output_embeddings()

    def ce(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = output_embedding(hidden).float()
        return F.cross_entropy(logits, labels.to(logits.device), reduction="none")

    recompute = torch.is_grad_enabled() and hidden_ND.requires_grad
    parts = zip(hidden_ND.tensor_split(num_chunks), labels_N.tensor_split(num_chunks), strict=True)
    return torch.cat(
        [
            checkpoint(ce, *part, use_reentrant=False, preserve_rng_state=False) if recompute else ce(*part)
            for part in parts
        ]
    )

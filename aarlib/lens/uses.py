"""What the paper proposes to do with influence: predict a layer's picks early, and drop attention layers that matter least."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aarlib.lens.ablation import outcome, without_attention
from aarlib.lens.names import parse
from aarlib.lens.scores import Block, Reading, layer_scores
from aarlib.moe.families import Family


class Recall(NamedTuple):
    receiver: int
    lag: int
    """Components up to the whole of layer receiver - lag were used."""
    sums: Float[Tensor, " N"]
    """Per document: sum over tokens of the share of the chosen experts that were among the predicted top-K."""


def prefetch_recall(reading: Reading, lags: Sequence[int] = (1, 2, 3, 4)) -> list[Recall]:
    """Picks of each receiver predicted from the residual stream as it was `lag` layers earlier, read by the receiver's router.

    The receiver's own scale is one positive number a token and does not change the order (with a router bias, which is used,
    it is taken as known). Views of AAR routers are not used.
    """
    state, receivers = reading.state, reading.projection.receivers
    total = torch.zeros_like(state.logits)
    bias = state.constants.get("bias")
    found: list[Recall] = []
    written: dict[int | None, list[Block]] = {}
    for block in layer_scores(reading):
        component = parse(block.names[0])
        assert component is not None
        if component.layer is not None or component.kind == "embedding":
            written.setdefault(component.layer, []).append(block)
    for layer in reading.capture.layers:
        for block in [*written.pop(None, []), *written.get(layer, [])]:
            total[:, block.start :] += block.values[0]
        for lag in lags:
            if layer + lag in receivers:
                index = receivers.index(layer + lag)
                known = total[:, index] if bias is None else total[:, index] + bias[:, index]
                found.append(Recall(layer + lag, lag, _recall(reading, known, layer + lag)))
    return found


def _recall(reading: Reading, scores: Float[Tensor, "T E"], receiver: int) -> Float[Tensor, " N"]:
    chosen = reading.capture.routed(receiver).expert_ids
    predicted = scores.topk(chosen.shape[1], dim=-1).indices
    hits = (chosen[:, :, None] == predicted[:, None, :]).any(-1).float().mean(-1)
    return hits.new_zeros(reading.capture.num_documents).index_add_(0, reading.capture.documents, hits)


def pick_counts(reading: Reading) -> Int[Tensor, "R E"]:
    """How often each receiver chose each expert: what a prediction without any component can know."""
    size = reading.parts.num_experts
    counts = [
        torch.bincount(reading.capture.routed(receiver).expert_ids.flatten(), minlength=size)
        for receiver in reading.projection.receivers
    ]
    return torch.stack(counts)


def ce_without_attention(
    model: Any,
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | None,
    layers: Sequence[int],
    family: Family | None = None,
) -> Float[Tensor, " B"]:
    """Each document's mean CE with the attention outputs of `layers` zeroed."""
    with without_attention(model, layers, family):
        result = outcome(model, input_ids, attention_mask, family)
    return result.ce_sums / result.num_targets

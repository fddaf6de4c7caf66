"""Packed batches: several documents in one row, positions restarting at 0 (transformers' convention)."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.families import Family


def packed_inputs(
    model: nn.Module, input_ids: Int[Tensor, "B S"], position_ids: Int[Tensor, "B S"], family: Family | None = None
) -> dict[str, Any]:
    """Arguments of a forward that keeps packed documents apart; no cache.

    Most families derive the mask from position_ids; where the model's own code does not, the masks are built here. Raises
    ValueError for models with linear-attention layers, whose state would run from one document into the next.
    """
    parts = anatomy(model, family)
    check_packing(parts)
    arguments: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
    if parts.family.masks_from_positions:
        return arguments
    dtype = parts.layers[0].moe_norm.get_parameter("weight").dtype
    embeddings = torch.empty(*input_ids.shape, 1, dtype=dtype, device=input_ids.device)
    no_mask = no_cache = None
    shared = (parts.config, embeddings, no_mask, no_cache, position_ids)  # the cache's name differs between releases
    masks = {
        "full_attention": create_causal_mask(*shared),
        "sliding_attention": create_sliding_window_causal_mask(*shared),
    }
    return {**arguments, "attention_mask": masks}


def check_packing(parts: Anatomy) -> None:
    """A ValueError for models that cannot keep the documents of a row apart."""
    linear = [layer.index for layer in parts.layers if layer.linear_attention is not None]
    if linear:
        raise ValueError(
            f"packing: layers {linear} are linear attention, whose state crosses documents; train without packing"
        )

"""Attention output together with the window of recent attention weights (AAR), without keeping an S x S matrix.

w[b,i,m] = mean_h softmax_j(scale q_i k_j + mask_ij)[c(i) - M + 1 + m],   c(i) = Skv - Sq + i,   m = 0..M-1

B batch, Sq queries, Skv keys (cached ones first), H query heads, Hkv key heads, Dh and Dv head sizes, M window.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from aarlib.moe.backends import Backend, choose
from aarlib.moe.windows_blockwise import AttentionOutput, blockwise_attention, causal_mask, head_weights
from aarlib.moe.windows_fused import fused_attention

__all__ = ["AttentionOutput", "attention_with_windows", "mean_head_weights_reference"]


def attention_with_windows(
    query: Float[Tensor, "B H Sq Dh"],
    key: Float[Tensor, "B Hkv Skv Dh"],
    value: Float[Tensor, "B Hkv Skv Dv"],
    *,
    mask: Bool[Tensor, "#B #H Sq Skv"] | Float[Tensor, "#B #H Sq Skv"] | None,
    scale: float,
    window: int | None,
    sinks: Float[Tensor, " H"] | None = None,
    sink_index: Int[Tensor, "B Sq"] | None = None,
    window_grad: bool = True,
    backend: Backend = "auto",
) -> AttentionOutput:
    """Softmax attention, its head-mean weights on the last `window` columns, and on column `sink_index` of each row.

    mask: None is causal, aligned bottom-right; bool is True where a query may attend; float is added to the scores,
    values <= finfo.min / 2 meaning masked. sinks: one logit a head that takes mass and has no value. Masked columns and
    columns before the first have weight 0; a fully masked row has zero output and a zero window. windows and sink are
    float32. sink is a measurement and carries no gradient, nor do the windows where window_grad is False; sink_index -1
    gives 0.

    `backend`: a fused kernel of aarlib/moe/kernels.py and only M diagonals, or blockwise (any device): 128 rows of weights
    at a time. auto: the first kernel that takes the call and passes its self-check, else blockwise.
    """
    _check(query, key, value, mask, window, sinks, sink_index)
    sink_index = None if sink_index is None else sink_index.long()
    arguments = (query, key, value, mask, scale, window, sinks, sink_index, window_grad)
    output, windows, sink = _by_backend(backend, *arguments)
    return AttentionOutput(output, None if windows is None else windows.float(), None if sink is None else sink.float())


@torch.compiler.disable()  # inductor fails on the band's strided reads ("vr must not be None")
def _by_backend(backend: Backend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Any:
    kernel = choose(query, key, value, mask, backend)
    if kernel is None:
        return blockwise_attention(query, key, value, mask, *rest)
    return fused_attention(kernel, query, key, value, mask, *rest)


def mean_head_weights_reference(
    query: Float[Tensor, "B H Sq Dh"],
    key: Float[Tensor, "B Hkv Skv Dh"],
    mask: Bool[Tensor, "#B #H Sq Skv"] | Float[Tensor, "#B #H Sq Skv"] | None,
    scale: float,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B Sq Skv"]:
    """Head-mean attention weights, materialised in float32: the plain way, to compare with."""
    mask = causal_mask(query.shape[2], key.shape[2], query.device) if mask is None else mask
    return head_weights(query.float(), key.float(), mask, scale, None if sinks is None else sinks.float()).mean(1)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    sink_index: Tensor | None,
) -> None:
    batch, num_heads, num_queries, _ = query.shape
    num_key_heads, num_keys = key.shape[1:3]
    if num_queries > num_keys:
        raise ValueError(f"query has {num_queries} rows and key {num_keys}: pass the cached keys with the new ones")
    if num_heads % num_key_heads:
        raise ValueError(f"query has {num_heads} heads, not a multiple of the {num_key_heads} heads of key")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value has shape {tuple(value.shape)}, key {tuple(key.shape)}: all but the last must agree")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: use 1 or more, or None for no windows")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: one logit for each of the {num_heads} query heads")
    if sink_index is not None and sink_index.shape != (batch, num_queries):
        raise ValueError(f"sink_index has shape {tuple(sink_index.shape)}: use {(batch, num_queries)}")
    if mask is not None:
        expected = (batch, num_heads, num_queries, num_keys)
        if (
            mask.dim() != 4
            or mask.shape[2:] != expected[2:]
            or any(size not in (1, full) for size, full in zip(mask.shape[:2], expected[:2], strict=True))
        ):
            raise ValueError(f"mask has shape {tuple(mask.shape)}: use {expected}, batch and heads may be 1")
        if mask.requires_grad:
            raise ValueError("mask requires a gradient, which is not computed: pass mask.detach()")

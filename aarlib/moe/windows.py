"""Attention output together with the window of recent attention weights (AAR), without keeping an S x S matrix.

w[b,i,m] = mean_h softmax_j(scale q_i k_j + mask_ij)[c(i) - M + 1 + m],   c(i) = Skv - Sq + i,   m = 0..M-1

B batch, Sq queries, Skv keys (cached ones first), H query heads, Hkv key heads, Dh and Dv head sizes, M window.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

Backend = Literal["auto", "fused", "blockwise"]
QUERY_BLOCK = 128


class AttentionOutput(NamedTuple):
    output: Float[Tensor, "B H Sq Dv"]
    windows: Float[Tensor, "B Sq M"] | None
    sink: Float[Tensor, "B Sq"] | None


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

    fused (CPU): the flash kernel of aten and only M diagonals. blockwise (any device, CUDA included): 128 rows of
    weights at a time. auto: fused on CPU in float32 and bfloat16, else blockwise.
    """
    _check(query, key, value, mask, window, sinks, sink_index, backend)
    output, windows, sink = _blockwise(query, key, value, mask, scale, window, sinks, sink_index, window_grad)
    return AttentionOutput(output, None if windows is None else windows.float(), None if sink is None else sink.float())


def mean_head_weights_reference(
    query: Float[Tensor, "B H Sq Dh"],
    key: Float[Tensor, "B Hkv Skv Dh"],
    mask: Bool[Tensor, "#B #H Sq Skv"] | Float[Tensor, "#B #H Sq Skv"] | None,
    scale: float,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B Sq Skv"]:
    """Head-mean attention weights, materialised in float32: the plain way, to compare with."""
    bias = additive_mask(mask, query.shape[2], key.shape[2], torch.float32, query.device)
    return _head_weights(query.float(), key.float(), bias, scale, None if sinks is None else sinks.float()).mean(1)


def additive_mask(
    mask: Tensor | None, num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "_ _ Sq Skv"]:
    """The mask as a term of the scores: 0 or the given bias where a query may attend, -inf where not."""
    if mask is None:
        mask = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -math.inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf).to(dtype)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    sink_index: Tensor | None,
    backend: str,
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
    if backend not in ("auto", "fused", "blockwise"):
        raise ValueError(f"backend is {backend!r}: use 'auto', 'fused' or 'blockwise'")


def _head_weights(query: Tensor, key: Tensor, bias: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Attention weights [B,H,R,N] of R rows; masked entries, so also fully masked rows, are 0."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bkgrd,bknd->bkgrn", grouped * scale, key).flatten(1, 2)
    masked = bias.isneginf()
    scores = (scores + bias.masked_fill(masked, 0)).masked_fill(masked, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]].masked_fill(masked, 0)


def _blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    sink_index: Tensor | None,
    window_grad: bool,
) -> AttentionOutput:
    """Ordinary autograd over blocks of query rows, in float32 or, for float64 inputs, float64."""
    dtype, num_queries, offset = query.dtype, query.shape[2], key.shape[2] - query.shape[2]
    compute = torch.promote_types(dtype, torch.float32)
    query, key, value = query.to(compute), key.to(compute), value.to(compute)
    sinks = None if sinks is None else sinks.to(compute)
    outputs, windows, sink = [], [], []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        end = offset + stop if mask is None else key.shape[2]
        block_mask = None if mask is None else mask[:, :, start:stop]
        bias = additive_mask(block_mask, stop - start, end, compute, query.device)
        weights = _head_weights(query[:, :, start:stop], key[:, :, :end], bias, scale, sinks)
        grouped = weights.unflatten(1, (key.shape[1], -1))
        outputs.append(torch.einsum("bkgrn,bknd->bkgrd", grouped, value[:, :, :end]).flatten(1, 2))
        if window is not None:
            mean = (weights if window_grad else weights.detach()).mean(1)
            windows.append(_last_columns(mean, offset + start, window))
        if sink_index is not None:
            sink.append(_column(weights.detach().mean(1), sink_index[:, start:stop]))
    return AttentionOutput(
        torch.cat(outputs, dim=2).to(dtype),
        torch.cat(windows, dim=1) if windows else None,
        torch.cat(sink, dim=1) if sink else None,
    )


def _last_columns(weights: Tensor, first: int, window: int) -> Tensor:
    """[B,R,N] -> [B,R,M]: the M columns that end at column first + r of row r, 0 before the first."""
    batch, rows, _ = weights.shape
    columns = torch.arange(window, device=weights.device) + torch.arange(rows, device=weights.device)[:, None] + first
    return pad(weights, (window - 1, 0)).gather(2, columns.expand(batch, rows, window))


def _column(weights: Tensor, index: Tensor) -> Tensor:
    """[B,R,N] at column index [B,R]; 0 where the index is -1 or past the visible columns."""
    inside = (index >= 0) & (index < weights.shape[2])
    return weights.gather(2, index.masked_fill(~inside, 0)[..., None])[..., 0].masked_fill(~inside, 0)

"""Attention windows from a fused kernel: it gives the output and each row's log-sum-exp, so that only the M diagonals of the
score matrix are left to compute. Time and memory of the windows O(S M), forward and backward, on any device.

With p = exp(s - lse), dL/ds has a direct part on the M diagonals, p * dL/dw / H, and through lse the part p * dL/dlse on the
whole row, dL/dlse = -sum_m p_m dL/dw_m / H, which the kernel's own backward adds (aarlib/moe/kernels.py).

A sink logit z takes mass: lse' = logaddexp(lse, z), output' = output * exp(lse - lse').
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from aarlib.moe.kernels import Kernel
from aarlib.moe.windows_blockwise import AttentionOutput, additive_mask

BAND_BLOCK = 64


def fused_attention(
    kernel: Kernel,
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
    output, lse = kernel.attend(query, key, value, mask, scale)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        output = output * torch.exp(lse - total).to(output.dtype)[..., None]
        lse = total
    windows = sink = None
    if window is not None:
        with torch.set_grad_enabled(window_grad and torch.is_grad_enabled()):
            windows = _MeanWindows.apply(query, key, lse, mask, scale, window)
    if sink_index is not None:
        with torch.no_grad():
            sink = _column_weights(query, key, lse, mask, scale, sink_index).mean(1)
    return AttentionOutput(output, windows, sink)


class _MeanWindows(torch.autograd.Function):
    """Head-mean weights on the last M columns of each row, from queries, keys and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, lse: Tensor, mask: Tensor | None, scale: float, window: int
    ) -> Float[Tensor, "B Sq M"]:
        weights = _band_weights(query, key, lse, mask, scale, window)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(query, key, weights)
        ctx.scale = scale
        return weights.mean(1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_windows: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, weights = ctx.saved_tensors
        grad_scores = weights * (grad_windows[:, None] / query.shape[1])
        band = _diagonals_backward(grad_scores * ctx.scale, query, key)
        return band.query.to(query.dtype), band.key.to(key.dtype), -grad_scores.sum(-1), None, None, None


def _pad(tensor: Tensor, amounts: tuple[int, ...]) -> Tensor:
    """torch's pad, which copies even where there is nothing to add."""
    return pad(tensor, amounts) if any(amounts) else tensor


def _band_weights(
    query: Tensor, key: Tensor, lse: Tensor, mask: Tensor | None, scale: float, window: int
) -> Float[Tensor, "B H Sq M"]:
    num_queries, num_keys = query.shape[2], key.shape[2]
    columns = torch.arange(num_queries, device=query.device)[:, None] + torch.arange(window, device=query.device)
    columns = (columns + num_keys - num_queries - window + 1)[None, None]
    scores = _diagonals(query.to(lse.dtype) * scale, key.to(lse.dtype), window)
    scores = scores + (_bias_at(mask, columns, num_keys, lse.dtype) - lse[..., None])
    return scores.exp_()


def _column_weights(
    query: Tensor, key: Tensor, lse: Tensor, mask: Tensor | None, scale: float, index: Tensor
) -> Float[Tensor, "B H Sq"]:
    """The weight of each row on its own key column index [B,Sq]."""
    columns = index[:, None, :, None]
    keys = torch.take_along_dim(key, columns.clamp(0, key.shape[2] - 1), dim=2).to(lse.dtype)
    grouped = query.to(lse.dtype).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bkgsd,bksd->bkgs", grouped, keys).flatten(1, 2) * scale
    return torch.exp(scores + _bias_at(mask, columns, key.shape[2], lse.dtype)[..., 0] - lse)


def _bias_at(mask: Tensor | None, columns: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of row i at key columns [..,Sq,n]; -inf outside the row, and past c(i) where mask is None."""
    inside = (columns >= 0) & (columns < num_keys)
    if mask is None:
        rows = torch.arange(columns.shape[-2], device=columns.device)[:, None]
        return additive_mask(inside & (columns <= num_keys - columns.shape[-2] + rows), dtype)
    picked = torch.take_along_dim(mask, columns.clamp(0, num_keys - 1), dim=-1)
    return additive_mask(picked, dtype).masked_fill(~inside, -math.inf)


class _Blocks(NamedTuple):
    query: Float[Tensor, "B Hkv num_blocks rows Dh"]  # rows: the heads of a group times R queries
    key: Float[Tensor, "B Hkv num_blocks Dh R+M-1"]  # a view: the keys on the diagonals of R queries
    rows: int
    left: int  # key columns added before the first (negative: dropped)
    right: int


def _blocks(query: Tensor, key: Tensor, window: int) -> _Blocks:
    num_queries, num_keys = query.shape[2], key.shape[2]
    rows = min(BAND_BLOCK, num_queries)
    left, right = window - 1 - (num_keys - num_queries), -num_queries % rows
    grouped = _pad(query, (0, 0, 0, right)).unflatten(2, (-1, rows)).unflatten(1, (key.shape[1], -1))
    keys = _pad(key, (0, 0, left, right)).unfold(2, rows + window - 1, rows)
    return _Blocks(grouped.transpose(2, 3).flatten(3, 4), keys, rows, left, right)


def _diagonal_view(blocks: Tensor, window: int) -> Tensor:
    """[..,R,R+M-1] contiguous -> [..,R,M]: row r from its column r on."""
    *strides, row, column = blocks.stride()
    return blocks.as_strided((*blocks.shape[:-1], window), (*strides, row + column, column))


def _diagonals(query: Tensor, key: Tensor, window: int) -> Float[Tensor, "B H Sq M"]:
    """q_i k_j on the last M columns of each row, 0 before column 0."""
    blocks = _blocks(query, key, window)
    scores = (blocks.query @ blocks.key).unflatten(3, (-1, blocks.rows))
    diagonals = _diagonal_view(scores.contiguous(), window).transpose(2, 3)
    return diagonals.flatten(3, 4).flatten(1, 2)[:, :, : query.shape[2]]


class _QueryKey(NamedTuple):
    query: Tensor
    key: Tensor


def _diagonals_backward(grad: Float[Tensor, "B H Sq M"], query: Tensor, key: Tensor) -> _QueryKey:
    window, num_queries = grad.shape[-1], query.shape[2]
    query, key = query.to(grad.dtype), key.to(grad.dtype)
    blocks = _blocks(query, key, window)
    grouped = _pad(grad, (0, 0, 0, blocks.right)).unflatten(2, (-1, blocks.rows)).unflatten(1, (key.shape[1], -1))
    grouped = grouped.transpose(2, 3)
    scores = grad.new_zeros(*grouped.shape[:-1], blocks.rows + window - 1)
    _diagonal_view(scores, window).copy_(grouped)
    scores = scores.flatten(3, 4)
    grad_query = (scores @ blocks.key.mT).unflatten(3, (-1, blocks.rows)).transpose(2, 3)
    grad_query = grad_query.flatten(3, 4).flatten(1, 2)[:, :, :num_queries]
    padded = grad.new_zeros(*key.shape[:2], key.shape[2] + blocks.left + blocks.right, key.shape[3])
    for index, part in enumerate((scores.mT @ blocks.query).unbind(2)):
        padded[:, :, index * blocks.rows :][:, :, : part.shape[2]] += part
    return _QueryKey(grad_query, _pad(padded, (0, 0, -blocks.left, -blocks.right)))

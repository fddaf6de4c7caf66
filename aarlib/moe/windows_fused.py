"""Attention windows on CPU from aten's flash kernel: it gives the output and each row's log-sum-exp, so that only the
M diagonals of the score matrix are left to compute. Time and memory of the windows O(S M), forward and backward.

Backward. With p = exp(s - lse), dL/ds has a direct part on the M diagonals, p * dL/dw / H, and through lse the part
p * dL/dlse on the whole row, dL/dlse = -sum_m p_m dL/dw_m / H. The flash backward computes
p * (grad . v - sum(output * grad)) from the output it is given; one more column, 0 in q, k and v, -dL/dlse in the
output and 1 in grad, turns that into p * (grad . v - sum(output * grad) + dL/dlse).

A sink logit z takes mass: lse' = logaddexp(lse, z), output' = output * exp(lse - lse'); the backward is the same one,
given lse' and output', and dL/dz = exp(z - lse') * (dL/dlse' - sum(output' * grad)).
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from aarlib.moe.windows_blockwise import AttentionOutput, additive_mask, causal_mask

BAND_BLOCK = 64
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.compiler.disable()  # a graph break: inductor fails on the band's strided reads ("vr must not be None")
def fused_attention(
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
    return AttentionOutput(
        *_FusedAttention.apply(query, key, value, sinks, mask, scale, window, sink_index, window_grad)
    )


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        scale: float,
        window: int | None,
        sink_index: Tensor | None,
        window_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output, lse = _flash_forward(query, key, value, sinks, mask, scale)
        windows = sink = None
        if window is not None:
            windows = _band_weights(query, key, lse, mask, scale, window).mean(1)
        if sink_index is not None:
            sink = _column_weights(query, key, lse, mask, scale, sink_index).mean(1)
        ctx.save_for_backward(query, key, value, sinks, mask, output, lse)
        ctx.scale, ctx.window = scale, window
        ctx.set_materialize_grads(False)
        constants = (sink,) if window_grad else (sink, windows)
        ctx.mark_non_differentiable(*(tensor for tensor in constants if tensor is not None))
        return output, windows, sink

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, output, lse = ctx.saved_tensors
        grad_output, grad_windows, _ = grads
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        band = grad_lse = None
        if grad_windows is not None:
            weights = _band_weights(query, key, lse, mask, ctx.scale, ctx.window)
            grad_scores = weights * grad_windows[:, None] / query.shape[1]
            grad_lse = -grad_scores.sum(-1)
            band = _diagonals_backward(grad_scores * ctx.scale, query, key)
        grad_query, grad_key, grad_value = _flash_gradient(
            grad_output, query, key, value, output, lse, grad_lse, mask, ctx.scale
        )
        if band is not None:
            grad_query, grad_key = grad_query + band.query, grad_key + band.key
        grad_sinks = None
        if sinks is not None:
            row = -(output.to(lse.dtype) * grad_output).sum(-1)
            row = row if grad_lse is None else row + grad_lse
            grad_sinks = (torch.exp(sinks[:, None] - lse) * row).sum((0, 2)).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value, grad_sinks, *(None,) * 5


def _pad(tensor: Tensor, amounts: tuple[int, ...]) -> Tensor:
    """torch's pad, which copies even where there is nothing to add."""
    return pad(tensor, amounts) if any(amounts) else tensor


def _flash_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[bool, Tensor | None]:
    """is_causal and attn_mask for aten, whose is_causal is aligned top-left and whose mask has the query's dtype."""
    if mask is not None:
        return False, additive_mask(mask, query.dtype)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries in (1, num_keys):
        return num_queries > 1, None
    return False, additive_mask(causal_mask(num_queries, num_keys, query.device), query.dtype)


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """output [B,H,Sq,Dv] and log-sum-exp [B,H,Sq], both with the sinks; finite in fully masked rows, whose output is 0."""
    width = max(query.shape[-1], value.shape[-1])
    is_causal, bias = _flash_mask(mask, query, key)
    padded = [_pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value)]
    output, lse = _flash(*padded, 0.0, is_causal, attn_mask=bias, scale=scale)
    output = output[..., : value.shape[-1]]
    if bias is not None:
        empty = bias.amax(-1).isneginf().expand(lse.shape)
        output = output.masked_fill(empty[..., None], 0)
        lse = lse.masked_fill(empty, 0)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        output = output * torch.exp(lse - total).to(output.dtype)[..., None]
        lse = total
    return output, lse


def _flash_gradient(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if grad_lse is not None:
        output = torch.cat([output, -grad_lse[..., None].to(output.dtype)], dim=-1)
        grad_output = pad(grad_output, (0, 1), value=1.0)
    width = max(head_dim, output.shape[-1])
    is_causal, bias = _flash_mask(mask, query, key)
    padded = [_pad(tensor, (0, width - tensor.shape[-1])) for tensor in (grad_output, query, key, value, output)]
    grads = _flash_backward(*padded, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
    return grads[0][..., :head_dim], grads[1][..., :head_dim], grads[2][..., :value_dim]


def _band_weights(
    query: Tensor, key: Tensor, lse: Tensor, mask: Tensor | None, scale: float, window: int
) -> Float[Tensor, "B H Sq M"]:
    num_queries, num_keys = query.shape[2], key.shape[2]
    columns = torch.arange(num_queries, device=query.device)[:, None] + torch.arange(window, device=query.device)
    columns = (columns + num_keys - num_queries - window + 1)[None, None]
    scores = _diagonals(query.to(lse.dtype), key.to(lse.dtype), window) * scale
    return torch.exp(scores + _bias_at(mask, columns, num_keys, lse.dtype) - lse[..., None])


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

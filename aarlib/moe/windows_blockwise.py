"""Attention windows in plain torch on any device: blocks of query rows, ordinary autograd."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

QUERY_BLOCK = 128


class AttentionOutput(NamedTuple):
    output: Float[Tensor, "B H Sq Dv"]
    windows: Float[Tensor, "B Sq M"] | None
    sink: Float[Tensor, "B Sq"] | None


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Bool[Tensor, "1 1 Sq Skv"]:
    """Row i sees columns up to num_keys - num_queries + i."""
    full = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    return full.tril(num_keys - num_queries)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as a term of the scores, in their dtype: 0 or the given bias where a query may attend, -inf where not."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf).to(dtype)


def head_weights(
    query: Float[Tensor, "B H R Dh"],
    key: Float[Tensor, "B Hkv N Dh"],
    mask: Tensor,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "B H R N"]:
    """Attention weights in the inputs' dtype; masked entries, and so fully masked rows, are 0."""
    scores = torch.einsum("bkgrd,bknd->bkgrn", query.unflatten(1, (key.shape[1], -1)) * scale, key).flatten(1, 2)
    bias = additive_mask(mask, scores.dtype)
    masked = bias.isneginf()
    scores = (scores + bias.masked_fill(masked, 0)).masked_fill(masked, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]].masked_fill(masked, 0)


def blockwise_attention(
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
    """Computed in float32, or in float64 for float64 inputs."""
    dtype, num_queries, offset = query.dtype, query.shape[2], key.shape[2] - query.shape[2]
    compute = torch.promote_types(dtype, torch.float32)
    query, key, value = query.to(compute), key.to(compute), value.to(compute)
    sinks = None if sinks is None else sinks.to(compute)
    outputs, windows, sink = [], [], []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        if mask is None:
            end = offset + stop
            block_mask = causal_mask(stop - start, end, query.device)
        else:
            end = key.shape[2]
            block_mask = mask[:, :, start:stop]
        weights = head_weights(query[:, :, start:stop], key[:, :, :end], block_mask, scale, sinks)
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


def _last_columns(weights: Float[Tensor, "B R N"], first: int, window: int) -> Float[Tensor, "B R M"]:
    """The M columns that end at column first + r of row r; 0 before column 0."""
    batch, rows, _ = weights.shape
    columns = torch.arange(window, device=weights.device) + torch.arange(rows, device=weights.device)[:, None] + first
    return pad(weights, (window - 1, 0)).gather(2, columns.expand(batch, rows, window))


def _column(weights: Float[Tensor, "B R N"], index: Tensor) -> Float[Tensor, "B R"]:
    """The weight on column index [B,R]; 0 outside the given columns."""
    inside = (index >= 0) & (index < weights.shape[2])
    return weights.gather(2, index.masked_fill(~inside, 0)[..., None])[..., 0].masked_fill(~inside, 0)

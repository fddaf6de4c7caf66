"""Attention by loops over tokens, in float64, and the cases on which attention_with_windows is compared with it."""

from typing import NamedTuple

import torch
from torch import Tensor

SCALE = 0.4


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    mask: Tensor | None
    sink_index: Tensor


class Case(NamedTuple):
    mask: str = "causal"
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    queries: int = 9
    keys: int = 9
    head_dim: int = 8
    value_dim: int = 8
    window: int = 4
    sinks: bool = False


CASES = {
    "causal": Case(),
    "window_2": Case(window=2),
    "window_1": Case(window=1),
    "window_longer_than_sequence": Case(window=14),
    "batch_1": Case(batch=1),
    "grouped_query": Case(key_heads=2),
    "multi_query": Case(key_heads=1, mask="left_padding"),
    "value_narrower": Case(value_dim=5),
    "value_one_narrower": Case(value_dim=7),
    "value_wider": Case(value_dim=11, key_heads=2),
    "left_padding": Case(mask="left_padding"),
    "right_padding": Case(mask="right_padding"),
    "packed": Case(mask="packed"),
    "sliding_range": Case(mask="sliding", window=6),
    "per_head_mask": Case(mask="per_head"),
    "chunked": Case(queries=4),
    "chunked_left_padding": Case(queries=4, mask="left_padding"),
    "decode": Case(queries=1),
    "decode_left_padding": Case(queries=1, mask="left_padding"),
    "decode_short_cache": Case(queries=1, keys=2, window=5),
    "single_token": Case(queries=1, keys=1),
    "sinks": Case(sinks=True),
    "sinks_left_padding": Case(sinks=True, mask="left_padding", key_heads=2),
    "sinks_decode": Case(sinks=True, queries=1),
    "long": Case(batch=1, heads=2, key_heads=2, queries=150, keys=150, window=40),
    "long_window_over_block": Case(batch=1, heads=2, key_heads=1, queries=140, keys=140, window=80),
    "long_packed_sinks": Case(
        batch=1, heads=2, key_heads=2, queries=150, keys=150, window=40, mask="packed", sinks=True
    ),
    "long_chunk": Case(batch=1, heads=2, key_heads=2, queries=70, keys=150, window=40, value_dim=6),
    "long_chunk_left_padding": Case(heads=1, key_heads=1, queries=110, keys=620, mask="left_padding"),
}


def allowed_entries(case: Case) -> Tensor:
    """bool [B,H,Sq,Skv] from positions; the last batch row is the padded one."""
    row = torch.arange(case.queries)[:, None] + case.keys - case.queries
    column = torch.arange(case.keys)[None]
    causal = (column <= row).expand(case.batch, case.heads, -1, -1).clone()
    padding = max(1, case.keys * 5 // 6 - 1)
    match case.mask:
        case "left_padding":
            causal[-1, ..., :padding] = False
        case "right_padding":
            causal[-1, ..., case.keys - padding :] = False
        case "packed":
            document = (torch.arange(case.keys) * 3) // case.keys
            causal &= document[row] == document[column]
        case "sliding":
            causal &= column > row - 3
        case "per_head":
            causal &= torch.rand(causal.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    return causal


def make_inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    allowed = allowed_entries(case)
    sink_index = torch.where(allowed.any(1).any(-1), allowed.any(1).int().argmax(-1), -1)
    mask = allowed if case.mask == "per_head" else allowed[:, :1]
    return Inputs(
        draw(case.batch, case.heads, case.queries, case.head_dim),
        draw(case.batch, case.key_heads, case.keys, case.head_dim),
        draw(case.batch, case.key_heads, case.keys, case.value_dim),
        draw(case.heads) if case.sinks else None,
        None if case.mask == "causal" else mask,
        sink_index,
    )


class Naive(NamedTuple):
    output: Tensor
    windows: Tensor
    sink: Tensor
    weights: Tensor


def naive_attention(inputs: Inputs, allowed: Tensor, window: int) -> Naive:
    """One softmax a token and head, over the columns it sees; differentiable, in float64."""
    query, key, value = (tensor.double() for tensor in inputs[:3])
    batch, heads, queries, _ = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    weights, outputs = [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                columns = allowed[b, h, i].nonzero()[:, 0]
                scores = SCALE * key[b, h // group, columns] @ query[b, h, i]
                if inputs.sinks is not None:
                    scores = torch.cat([scores, inputs.sinks[h : h + 1].double()])
                weight = scores.softmax(0)[: len(columns)]
                weights.append(torch.zeros(keys, dtype=torch.float64).index_put((columns,), weight))
                outputs.append(weight @ value[b, h // group, columns])
    stacked = torch.stack(weights).view(batch, heads, queries, keys)
    mean = stacked.mean(1)
    windows = torch.zeros(batch, queries, window, dtype=torch.float64)
    sink = torch.zeros(batch, queries, dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            for m in range(window):
                column = keys - queries + i - window + 1 + m
                if column >= 0:
                    windows[b, i, m] = mean[b, i, column]
            if inputs.sink_index[b, i] >= 0:
                sink[b, i] = mean[b, i, inputs.sink_index[b, i]]
    return Naive(torch.stack(outputs).view(batch, heads, queries, -1), windows, sink, stacked)

"""How much a component moves a router: variance over the experts of its scores, and their positive and negative means.

Paper: Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs (ICLR 2026), propositions 1 and 2.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from aarlib.lens.neurons import NeuronConstants, expert_bias, neuron_sums
from aarlib.lens.scores import (
    Block,
    Reading,
    SlotBlock,
    edge_scores,
    expert_scores,
    head_scores,
    layer_scores,
    vector_scores,
)

MOMENTS = ("variance", "aps", "ans")

Measure = Callable[[Tensor, int], Tensor]
"""From scores [n,T,Rs,E] of receivers from an index on to [n,T,Rs,M] measures."""


def moments(scores: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows 3"]:
    """Population variance, APS (mean of the positive parts) and ANS (of the negative parts) over the experts."""
    mean = scores.mean(-1)
    variance = (scores - mean[..., None]).square().mean(-1)
    positive = scores.clamp_min(0).mean(-1)
    return torch.stack([variance, positive, mean - positive], dim=-1)


def moments_measure(scores: Float[Tensor, "n T Rs E"], _: int) -> Float[Tensor, "n T Rs 3"]:
    return moments(scores)


class Sums(NamedTuple):
    """Sums over a document's tokens of each of M measures; NaN where a sender does not reach a receiver.

    N documents (1 at the neuron level: all together), C senders, R receivers.
    """

    senders: tuple[str, ...]
    receivers: tuple[int, ...]
    all: Float[Tensor, "N C R M"]
    first: Float[Tensor, "N C R M"]
    """Of each document's first token alone."""
    tokens: Int[Tensor, " N"]
    first_tokens: Int[Tensor, " N"]
    selected: Int[Tensor, "N C"] | None = None
    """Tokens that chose the expert."""
    largest: Float[Tensor, " C"] | None = None
    """Largest absolute element of the expert's output."""

    def mean(self, positions: Literal["all", "without_first"] = "all") -> NDArray[np.float64]:
        """[C, R, M]: over all tokens of all documents, or over all but each document's first."""
        total, tokens = self.all.double().sum(0), self.tokens.sum()
        if positions == "without_first":
            total, tokens = total - self.first.double().sum(0), tokens - self.first_tokens.sum()
        return (total / tokens.double()).cpu().numpy()


def layer_sums(reading: Reading, measure: Measure = moments_measure) -> Sums:
    return _sums(reading, layer_scores(reading), measure)


def head_sums(reading: Reading, measure: Measure = moments_measure) -> Sums:
    return _sums(reading, head_scores(reading), measure)


def edge_sums(reading: Reading, measure: Measure = moments_measure) -> Sums:
    """Of the layers that have edges: a layer without weights is whole, and in `layer_sums`."""
    layers = tuple(index for index, kept in reading.capture.layers.items() if kept.edges is not None)
    return _sums(reading, edge_scores(reading, layers), measure)


def expert_sums(reading: Reading, measure: Measure = moments_measure) -> Sums:
    return _sums(reading, expert_scores(reading), measure)


def all_neuron_sums(reading: Reading, constants: NeuronConstants | None = None) -> Sums:
    """Of the whole batch together: N is 1."""
    constants = constants or NeuronConstants(reading.projection)
    names: list[str] = []
    rows: list[Tensor] = []
    selected: list[Tensor] = []
    for found in neuron_sums(reading, constants):
        experts, width = found.all.shape[:2]
        names += [f"moe.{found.layer}.expert.{e}.neuron.{n}" for e in range(experts) for n in range(width)]
        both = torch.stack([found.all, found.first]).flatten(1, 2)
        rows.append(_from_start(both, found.start, len(reading.projection.receivers)))
        selected.append(found.selected.repeat_interleave(width))
    empty = torch.zeros(2, 0, len(reading.projection.receivers), 3, device=reading.projection.device)
    both = torch.cat(rows, dim=1) if rows else empty
    tokens, first = len(reading.capture.first), int(reading.capture.first.sum())
    chosen = torch.cat(selected)[None] if selected else torch.zeros(1, 0, dtype=torch.int64)
    return Sums(
        tuple(names),
        reading.projection.receivers,
        both[:1],
        both[1:],
        torch.tensor([tokens]),
        torch.tensor([first]),
        chosen,
    )


def _sums(reading: Reading, blocks: Iterator[Block] | Iterator[SlotBlock], measure: Measure = moments_measure) -> Sums:
    kept, receivers = reading.capture, reading.projection.receivers
    tokens = torch.bincount(kept.documents, minlength=kept.num_documents)
    names: list[str] = []
    rows: list[Tensor] = []
    selected: list[Tensor] = []
    largest: list[Tensor] = []
    for block in blocks:
        if isinstance(block, Block):
            names += block.names
            both = _by_document(reading, measure(block.values, block.start))
        else:
            num_experts = reading.parts.num_experts
            names += [f"{block.parent}.expert.{expert}" for expert in range(num_experts)]
            both = _by_document_and_expert(reading, block, measure(block.values, block.start))
            selected.append(_selections(reading, block.expert_ids))
            largest.append(block.largest)
        rows.append(_from_start(both, block.start, len(receivers)))
    empty = tokens.new_zeros(2, kept.num_documents, 0, len(receivers), len(MOMENTS), dtype=torch.float32)
    stacked = torch.cat(rows, dim=2) if rows else empty
    return Sums(
        tuple(names),
        receivers,
        stacked[0],
        stacked[1],
        tokens,
        torch.ones_like(tokens),
        torch.cat(selected, dim=1) if selected else None,
        torch.cat(largest) if largest else None,
    )


def _by_document(reading: Reading, values: Float[Tensor, "n T Rs M"]) -> Float[Tensor, "two N n Rs M"]:
    kept = reading.capture
    rows = values.transpose(0, 1)
    result = rows.new_zeros(2, kept.num_documents, *rows.shape[1:])
    result[0].index_add_(0, kept.documents, rows)
    result[1].index_add_(0, kept.documents[kept.first], rows[kept.first])
    return result


def _by_document_and_expert(
    reading: Reading, block: SlotBlock, values: Float[Tensor, "K T Rs M"]
) -> Float[Tensor, "two N Es Rs M"]:
    kept, num_experts = reading.capture, reading.parts.num_experts
    cells = kept.documents[:, None] * num_experts + block.expert_ids
    values = values.transpose(0, 1)
    result = values.new_zeros(2, kept.num_documents * num_experts, *values.shape[2:])
    result[0].index_add_(0, cells.flatten(), values.flatten(0, 1))
    result[1].index_add_(0, cells[kept.first].flatten(), values[kept.first].flatten(0, 1))
    return result.unflatten(1, (-1, num_experts))


def _selections(reading: Reading, expert_ids: Int[Tensor, "T K"]) -> Int[Tensor, "N Es"]:
    kept, num_experts = reading.capture, reading.parts.num_experts
    cells = kept.documents[:, None] * num_experts + expert_ids
    return torch.bincount(cells.flatten(), minlength=kept.num_documents * num_experts).unflatten(0, (-1, num_experts))


def _from_start(values: Float[Tensor, "*lead Rs M"], start: int, receivers: int) -> Float[Tensor, "*lead R M"]:
    """NaN for the receivers before `start`."""
    missing = values.new_full((*values.shape[:-2], start, values.shape[-1]), float("nan"))
    assert start + values.shape[-2] == receivers
    return torch.cat([missing, values], dim=-2)


def expert_bias_sums(reading: Reading) -> Sums:
    """The down-projection biases, which no neuron has; no sender where the family has none."""
    vectors = (expert_bias(reading, layer) for layer, kept in reading.capture.layers.items() if kept.routed is not None)
    last = len(reading.projection.receivers)
    reaching = (v for v in vectors if v is not None and reading.projection.start(v.depth) < last)
    return _sums(reading, (vector_scores(reading, vector) for vector in reaching))


SUMS: dict[str, Callable[..., Sums]] = {
    "layer": layer_sums,
    "head": head_sums,
    "edge": edge_sums,
    "expert": expert_sums,
    "neuron": all_neuron_sums,
}


def matrices(sums: Sequence[Sums], positions: Literal["all", "without_first"] = "all") -> dict[str, pd.DataFrame]:
    """Sender x receiver frames of variance, aps and ans."""
    values = np.concatenate([item.mean(positions) for item in sums])
    index = pd.Index([name for item in sums for name in item.senders], name="sender")
    columns = pd.Index(list(sums[0].receivers), name="receiver")
    return {name: pd.DataFrame(values[..., i], index=index, columns=columns) for i, name in enumerate(MOMENTS)}

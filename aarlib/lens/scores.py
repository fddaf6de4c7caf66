"""Scores of components at each level, one block of components at a time, so that memory stays that of one block.

T tokens, R receivers (Rs: those a block reaches, from `start` on), E num_experts, K top_k, F d_ff of an expert.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from aarlib.lens.capture import Capture, capture, in_float32, inverse_rms, num_heads
from aarlib.lens.projection import Projection, ReceiverState, receiver_state, scores_from, sender_norm
from aarlib.moe.anatomy import Anatomy
from aarlib.moe.dispatch import expert_outputs
from aarlib.moe.windows_blockwise import causal_mask, head_weights


class Reading(NamedTuple):
    """One forward read by all receivers."""

    projection: Projection
    capture: Capture
    state: ReceiverState

    @property
    def parts(self) -> Anatomy:
        return self.projection.parts


class Block(NamedTuple):
    """Scores of `names`; receivers before `start` are not reached."""

    names: tuple[str, ...]
    start: int
    values: Float[Tensor, "n T Rs E"]


class SlotBlock(NamedTuple):
    """Scores of the experts chosen at each token; an expert that was not chosen scores 0."""

    parent: str
    start: int
    expert_ids: Int[Tensor, "T K"]
    values: Float[Tensor, "K T Rs E"]
    largest: Float[Tensor, " E"]
    """Largest absolute element of each expert's output before weighting; 0 where it was not chosen."""


class Vector(NamedTuple):
    """A component's part of the residual stream, before the norms that `layer` and `is_attention` name."""

    name: str
    depth: int
    values: Float[Tensor, "T D"]


def read(
    model: nn.Module,
    projection: Projection,
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | None = None,
    position_ids: Int[Tensor, "B S"] | None = None,
    edges: bool = False,
) -> Reading:
    kept = capture(model, projection.parts, input_ids, attention_mask, position_ids, edges)
    return Reading(projection, kept, receiver_state(projection, kept))


def layer_vectors(reading: Reading) -> Iterator[Vector]:
    """Components of the layer level that live in the residual stream."""
    kept = reading.capture
    yield Vector("embedding", -1, kept.embedding)
    for index, layer in kept.layers.items():
        yield Vector(f"attn.{index}", 2 * index, layer.attention)
        routed = layer.routed
        parts = {"mlp": layer.mlp, "moe": routed and routed.output, "shared": routed and routed.shared}
        for kind, values in parts.items():
            if values is not None:
                yield Vector(f"{kind}.{index}", 2 * index + 1, values)


def vector_scores(reading: Reading, vector: Vector, name: str | None = None) -> Block:
    """The block of one vector, whatever part of its sub-layer it is."""
    projection = reading.projection
    start = projection.start(vector.depth)
    matrix = projection.weight if vector.depth < 0 else projection.of_sublayer(vector.depth // 2, vector.depth % 2 == 0)
    products = (vector.values @ matrix[:, start:].flatten(1)).unflatten(1, (-1, matrix.shape[-1]))[None]
    scores = scores_from(products, reading.state, start, sender_scale(reading, vector.depth))
    return Block((name or vector.name,), start, scores)


def sender_scale(reading: Reading, depth: int) -> Float[Tensor, " T"] | None:
    """1 / rms of the whole sub-layer output where the family normalises senders."""
    if depth < 0 or reading.parts.family.norm_side == "receiver":
        return None
    kept = reading.capture.layers[depth // 2]
    whole = kept.attention
    if depth % 2:
        routed = kept.routed
        whole = (
            kept.mlp if routed is None else routed.output if routed.shared is None else routed.output + routed.shared
        )
    assert whole is not None
    norm = sender_norm(reading.parts.layers[depth // 2], depth % 2 == 0)
    return inverse_rms(whole, norm, reading.parts.family.norm_eps)


def layer_scores(reading: Reading, skip: tuple[str, ...] = ()) -> Iterator[Block]:
    """All components of the layer level but the kinds in `skip`: one block each, constants included."""
    for vector in layer_vectors(reading):
        if vector.name.split(".")[0] not in skip and reading.projection.start(vector.depth) < len(
            reading.projection.receivers
        ):
            yield vector_scores(reading, vector)
    for name, values in reading.state.constants.items():
        yield Block((name,), 0, values[None])


def closure_error(reading: Reading, blocks: Iterable[Block]) -> float:
    """max|sum of all blocks - logits| / max(1, max|logits|), the largest over receivers."""
    logits = reading.state.logits
    total = torch.zeros_like(logits)
    for block in blocks:
        total[:, block.start :] += block.values.nan_to_num(0.0).sum(0)
    errors = (total - logits).abs().amax((0, 2)) / logits.abs().amax((0, 2)).clamp_min(1.0)
    return float(errors.max())


def head_scores(reading: Reading, layers: tuple[int, ...] | None = None) -> Iterator[Block]:
    """Attention layers head by head, the output projection's bias apart."""
    projection = reading.projection
    for index, kept in reading.capture.layers.items():
        start = projection.start(2 * index)
        if start == len(projection.receivers) or (layers is not None and index not in layers):
            continue
        matrix = projection.of_heads(index)[:, :, start:]
        heads = kept.heads.unflatten(1, matrix.shape[:2]).transpose(0, 1)
        products = (heads @ matrix.flatten(2)).unflatten(2, matrix.shape[2:])
        names = tuple(f"attn.{index}.head.{head}" for head in range(matrix.shape[0]))
        yield Block(names, start, scores_from(products, reading.state, start, sender_scale(reading, 2 * index)))
        bias = attention_bias(reading, index)
        if bias is not None:
            yield vector_scores(reading, bias)


def attention_bias(reading: Reading, layer: int) -> Vector | None:
    bias = getattr(reading.parts.layers[layer].output_projection, "bias", None)
    if bias is None:
        return None
    values = (
        bias.detach().to(reading.projection.device, torch.float32).expand_as(reading.capture.layers[layer].attention)
    )
    return Vector(f"attn.{layer}.bias", 2 * layer, values)


def edge_scores(reading: Reading, layers: tuple[int, ...] | None = None) -> Iterator[Block]:
    """Attention layers key by key: the query is the token. Layers without attention weights stay whole."""
    projection = reading.projection
    for index, kept in reading.capture.layers.items():
        start = projection.start(2 * index)
        if start == len(projection.receivers) or (layers is not None and index not in layers):
            continue
        if kept.edges is None:
            yield vector_scores(reading, Vector(f"attn.{index}", 2 * index, kept.attention))
            continue
        scale = sender_scale(reading, 2 * index)
        for head in range(num_heads(reading.parts, reading.parts.layers[index])):
            products = edge_products(reading, index, head, start)
            names = tuple(f"attn.{index}.head.{head}.key.{key}" for key in range(products.shape[0]))
            yield Block(names, start, scores_from(products, reading.state, start, scale))
        bias = attention_bias(reading, index)
        if bias is not None:
            yield vector_scores(reading, bias)


def edge_products(reading: Reading, layer: int, head: int, start: int) -> Float[Tensor, "N T Rs E"]:
    """weight[query, key] * (gate[query] * value[key]) folded through the head's output projection."""
    edges = reading.capture.layers[layer].edges
    assert edges is not None
    matrix = reading.projection.of_heads(layer)[head, :, start:]
    weights = attention_weights(reading, layer)[:, head]
    value = head_values(reading, layer)[:, head]
    if edges.gate is None:
        products = torch.einsum("bsn,bnm->nbsm", weights, value @ matrix.flatten(1))
    else:
        gated = torch.einsum("bsn,bsd,bnd->nbsd", weights, edges.gate[:, :, head], value)
        products = gated @ matrix.flatten(1)
    return products[:, reading.capture.mask].unflatten(2, matrix.shape[1:])


def attention_weights(reading: Reading, layer: int) -> Float[Tensor, "B H S N"]:
    """The layer's attention weights, materialised in float32; the sink's share is left out."""
    edges = reading.capture.layers[layer].edges
    assert edges is not None
    query, key, _, mask, scale, sinks = edges.inputs
    mask = causal_mask(query.shape[2], key.shape[2], query.device) if mask is None else mask
    return head_weights(query.float(), key.float(), mask, scale, None if sinks is None else sinks.float())


def head_values(reading: Reading, layer: int) -> Float[Tensor, "B H N Dv"]:
    edges = reading.capture.layers[layer].edges
    assert edges is not None
    value = edges.inputs.value.float()
    return value.repeat_interleave(edges.inputs.query.shape[1] // value.shape[1], dim=1)


def slot_outputs(reading: Reading, layer: int) -> Float[Tensor, "T K D"]:
    """u[t, j] of a MoE layer, from the family's own experts module in float32."""
    experts = reading.parts.layers[layer].experts
    assert experts is not None
    routed = reading.capture.routed(layer)
    device = next(experts.parameters()).device
    with torch.no_grad(), in_float32(experts):
        outputs = expert_outputs(experts, routed.hidden.to(device), routed.expert_ids.to(device))
    return outputs.to(routed.hidden.device, torch.float32)


def expert_scores(reading: Reading, layers: tuple[int, ...] | None = None) -> Iterator[SlotBlock]:
    """MoE layers expert by expert: weight * u."""
    projection = reading.projection
    for index, kept in reading.capture.layers.items():
        depth = 2 * index + 1
        start = projection.start(depth)
        if kept.routed is None or start == len(projection.receivers) or (layers is not None and index not in layers):
            continue
        outputs = slot_outputs(reading, index)
        ids = kept.routed.expert_ids
        largest = outputs.new_zeros(reading.parts.num_experts)
        largest.scatter_reduce_(0, ids.flatten(), outputs.abs().amax(-1).flatten(), "amax")
        matrix = projection.of_sublayer(index, is_attention=False)[:, start:]
        weighted = outputs.mul_(kept.routed.weights[..., None])
        products = (weighted.transpose(0, 1) @ matrix.flatten(1)).unflatten(2, matrix.shape[1:])
        scores = scores_from(products, reading.state, start, sender_scale(reading, depth))
        yield SlotBlock(f"moe.{index}", start, ids, scores, largest)

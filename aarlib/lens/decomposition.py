"""`decompose`: the router logits of a forward as an exact sum over components.

logits = W_r (z * gamma / rms(z)) with z the sum of everything written to the residual stream before; with the rms of z kept,
the map is linear, so each component c has scores W_r (c * gamma / rms(z)).
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from aarlib.lens.capture import norm_scale
from aarlib.lens.influence import SUMS, Sums, expert_bias_sums, layer_sums, matrices
from aarlib.lens.names import LEVELS, Component, depth_of, parse, reaches, unknown
from aarlib.lens.neurons import down_projection, expert_bias, expert_tokens
from aarlib.lens.projection import Projection, sender_norm
from aarlib.lens.scores import (
    Block,
    Reading,
    Vector,
    attention_bias,
    attention_weights,
    closure_error,
    edge_scores,
    expert_scores,
    head_scores,
    head_values,
    layer_scores,
    layer_vectors,
    read,
    sender_scale,
    slot_outputs,
    vector_scores,
)
from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family

REFINED: dict[str, str] = {"layer": "", "head": "attn", "edge": "attn", "expert": "moe", "neuron": "moe"}
"""The kind of layer component that a level takes apart."""


def decompose(
    model: nn.Module,
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | None = None,
    receivers: Sequence[int] | None = None,
    by: str = "layer",
    *,
    position_ids: Int[Tensor, "B S"] | None = None,
    family: Family | None = None,
) -> "Decomposition":
    """Decompose the router logits of the MoE layers `receivers` (default: all), AAR attached or not, in float32.

    `by`: whole layers; attention heads; (head, query, key) triples; routed experts; neurons of routed experts. What a level does
    not take apart stays whole. A packed batch has position_ids and no attention_mask. Raises ValueError for a receiver without
    router, an unknown level, an empty document, more tokens than the context, and `edge` where no layer has attention weights.
    """
    parts = anatomy(model, family)
    if by not in LEVELS:
        raise ValueError(f"by = {by!r} is no level; levels: {', '.join(LEVELS)}")
    if by == "edge" and all(layer.attention is None for layer in parts.layers):
        raise ValueError("by = 'edge': every layer is linear attention, which has no weights; use by = 'head'")
    projection = Projection(parts, receivers)
    return Decomposition(read(model, projection, input_ids, attention_mask, position_ids, edges=by == "edge"), by)


class Decomposition:
    """Scores of components, and how well they add up. `closure_error` is the largest over receivers of
    max|sum - logits| / max(1, max|logits|)."""

    def __init__(self, reading: Reading, by: str) -> None:
        self.reading = reading
        self.by = by
        self.parts = reading.parts
        self.receivers = reading.projection.receivers
        self._outputs: dict[int, Tensor] = {}
        self._names = list(self._stream_names())
        self.closure_error = closure_error(reading, [*layer_scores(reading, (REFINED[by],)), *self._finer_sums()])

    def logits(self, receiver: int) -> Float[Tensor, "B S E"]:
        """The router's own logits; 0 on padding, as in `scores`."""
        return self.reading.capture.unflatten(self.reading.state.logits[:, self._index(receiver)])

    def components(self, receiver: int) -> list[str]:
        """Names at this level, in the order of the residual stream, bias and views last."""
        self._index(receiver)
        names = [name for name in self._names if reaches(depth_of(_parsed(name)), receiver)]
        return names + self._constants(receiver)

    def scores(self, receiver: int, component: str) -> Float[Tensor, "B S E"]:
        """What `component`, of this level or of the layer level, adds to each expert's logit; 0 on padding."""
        index = self._index(receiver)
        found = self._find(receiver, component)
        if found.layer is None and found.kind != "embedding":
            return self.reading.capture.unflatten(self.reading.state.constants[component][:, index])
        block = vector_scores(self.reading, self._vector(found))
        return self.reading.capture.unflatten(block.values[0, :, index - block.start])

    def bound(self, receiver: int, component: str) -> Float[Tensor, "B S"]:
        """sigma_max(C W_r)^2 ||scaled c||^2 / E, never below the variance of the component's scores. Stock receivers only."""
        index, state = self._index(receiver), self.reading.state
        found = self._find(receiver, component)
        if state.factor is not None and bool((state.factor[:, index] != 1).any()):
            raise ValueError(f"receiver = {receiver}: its AAR factor is per expert, and the bound is for stock routers")
        if found.layer is None and found.kind != "embedding":
            raise ValueError(f"component = {component!r} is a constant and has no vector to bound")
        vector, projection = self._vector(found), self.reading.projection
        centred = projection.router[:, index] - projection.router[:, index].mean(-1, keepdim=True)
        scaled = vector.values * projection.gamma[:, index] * state.scale[:, index, None]
        sender = sender_scale(self.reading, vector.depth)
        if sender is not None:
            norm = sender_norm(self.parts.layers[vector.depth // 2], vector.depth % 2 == 0)
            scaled = scaled * norm_scale(self.parts, norm).to(projection.device) * sender[:, None]
        sigma = torch.linalg.matrix_norm(centred, ord=2)
        return self.reading.capture.unflatten((sigma * scaled.norm(dim=-1)).square() / centred.shape[-1])

    @cached_property
    def sums(self) -> list[Sums]:
        """Per document: the finer components of this level and, beside them, all whole ones."""
        whole = layer_sums(self.reading)
        finer = [] if self.by == "layer" else [SUMS[self.by](self.reading)]
        return [whole, *finer, *([expert_bias_sums(self.reading)] if self.by == "neuron" else [])]

    @property
    def variance(self) -> pd.DataFrame:
        """Sender x receiver: mean over tokens of the variance over experts; NaN where a sender is not before a receiver."""
        return matrices(self.sums)["variance"]

    @property
    def aps(self) -> pd.DataFrame:
        """Average positive score: what a sender promotes."""
        return matrices(self.sums)["aps"]

    @property
    def ans(self) -> pd.DataFrame:
        """Average negative score: what a sender suppresses."""
        return matrices(self.sums)["ans"]

    def attention(self, layer: int) -> Float[Tensor, "B H S N"]:
        """Attention weights of a layer, where `by` is edge."""
        self._check_edges(layer)
        return attention_weights(self.reading, layer)

    def _index(self, receiver: int) -> int:
        if receiver not in self.receivers:
            have = ", ".join(str(layer) for layer in self.receivers)
            raise ValueError(f"receiver = {receiver} was not decomposed; receivers here: {have}")
        return self.receivers.index(receiver)

    def _constants(self, receiver: int) -> list[str]:
        index = self._index(receiver)
        constants = self.reading.state.constants
        return [name for name, values in constants.items() if not bool(values[:, index].isnan().any())]

    def _stream_names(self) -> Iterator[str]:
        for vector in layer_vectors(self.reading):
            found = _parsed(vector.name)
            finer = self._finer(found) if found.kind == REFINED[self.by] else None
            yield from (vector.name,) if finer is None else finer

    def _finer(self, whole: Component) -> list[str] | None:
        """The names that this level takes `whole` apart into; None: it stays whole."""
        assert whole.layer is not None
        if whole.kind == "attn":
            if self.by == "edge" and self.reading.capture.layers[whole.layer].edges is None:
                return None
            heads = self.reading.projection.of_heads(whole.layer).shape[0]
            keys = self.reading.capture.mask.shape[1]
            names = [f"{whole.name}.head.{head}" for head in range(heads)]
            if self.by == "edge":
                names = [f"{name}.key.{key}" for name in names for key in range(keys)]
            bias = attention_bias(self.reading, whole.layer)
        else:
            names = [f"{whole.name}.expert.{expert}" for expert in range(self.parts.num_experts)]
            if self.by == "expert":
                return names
            width = down_projection(self.reading.projection, whole.layer, 0).shape[0]
            names = [f"{name}.neuron.{neuron}" for name in names for neuron in range(width)]
            bias = expert_bias(self.reading, whole.layer)
        return names if bias is None else [*names, bias.name]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset([*self._names, *(vector.name for vector in layer_vectors(self.reading))])

    def _find(self, receiver: int, name: str) -> Component:
        found = parse(name)
        if found is not None and found.key is not None:
            assert found.layer is not None
            if 0 <= found.layer < len(self.parts.layers):
                self._check_edges(found.layer)
        known = found is not None and reaches(depth_of(found), receiver) and (name in self._known)
        if found is None or not (known or name in self._constants(receiver)):
            raise unknown(name, self.components(receiver), f"of the router of layer {receiver} by {self.by}")
        return found

    def _check_edges(self, layer: int) -> None:
        if self.parts.layers[layer].attention is None:
            have = ", ".join(str(item.index) for item in self.parts.layers if item.attention is not None)
            raise ValueError(
                f"layer {layer} is linear attention: it has no (head, query, key) weights; layers that have them: {have}"
            )
        if self.reading.capture.layers[layer].edges is None:
            raise ValueError(f"by = {self.by!r} keeps no attention weights; decompose by = 'edge'")

    def _vector(self, component: Component) -> Vector:
        layer = component.layer
        if component.parent == component.name:
            return next(vector for vector in layer_vectors(self.reading) if vector.name == component.name)
        assert layer is not None
        depth = depth_of(component)
        if component.is_bias:
            found = (
                attention_bias(self.reading, layer) if component.kind == "attn" else expert_bias(self.reading, layer)
            )
            assert found is not None
            return found
        if component.kind == "attn":
            return Vector(component.name, depth, self._head_vector(component))
        return Vector(component.name, depth, self._expert_vector(component))

    def _head_vector(self, component: Component) -> Float[Tensor, "T D"]:
        layer, head = component.layer, component.head
        assert layer is not None and head is not None
        projection = self.reading.projection
        size = projection.of_heads(layer).shape[1]
        columns = slice(head * size, (head + 1) * size)
        weight = self.parts.layers[layer].output_projection.get_parameter("weight").detach()[:, columns]
        weight = weight.to(projection.device, torch.float32)
        if component.key is None:
            return self.reading.capture.layers[layer].heads[:, columns] @ weight.T
        edges = self.reading.capture.layers[layer].edges
        assert edges is not None
        weights = attention_weights(self.reading, layer)[:, head, :, component.key, None]
        output = weights * head_values(self.reading, layer)[:, head, None, component.key]
        output = output if edges.gate is None else output * edges.gate[:, :, head]
        return output[self.reading.capture.mask] @ weight.T

    def _expert_vector(self, component: Component) -> Float[Tensor, "T D"]:
        layer, expert = component.layer, component.expert
        assert layer is not None and expert is not None
        routed = self.reading.capture.routed(layer)
        chosen = (routed.expert_ids == expert) * routed.weights
        if component.neuron is None:
            if layer not in self._outputs:
                self._outputs[layer] = slot_outputs(self.reading, layer)
            return torch.einsum("tk,tkd->td", chosen, self._outputs[layer])
        result = torch.zeros_like(routed.output)
        down = down_projection(self.reading.projection, layer, expert)[component.neuron]
        for item in expert_tokens(self.reading, layer, only=expert):
            signal = item.weights * item.activations[:, component.neuron]
            result[item.tokens] = signal[:, None] * down
        return result

    def _finer_sums(self) -> Iterator[Block]:
        """Blocks that add up to the components that this level takes apart."""
        if self.by == "head":
            yield from head_scores(self.reading)
        elif self.by == "edge":
            yield from edge_scores(self.reading)
        elif self.by == "expert":
            for slots in expert_scores(self.reading):
                yield Block((slots.parent,), slots.start, slots.values.sum(0)[None])
        elif self.by == "neuron":
            for layer, kept in self.reading.capture.layers.items():
                if kept.routed is not None and self.reading.projection.start(2 * layer + 1) < len(self.receivers):
                    yield vector_scores(self.reading, self._sum_of_neurons(layer))

    def _sum_of_neurons(self, layer: int) -> Vector:
        bias = expert_bias(self.reading, layer)
        total = torch.zeros_like(self.reading.capture.routed(layer).output) if bias is None else bias.values.clone()
        for item in expert_tokens(self.reading, layer):
            down = down_projection(self.reading.projection, layer, item.expert)
            total.index_add_(0, item.tokens, (item.activations * item.weights[:, None]) @ down)
        return Vector(f"moe.{layer}", 2 * layer + 1, total)


def _parsed(name: str) -> Component:
    found = parse(name)
    assert found is not None, name
    return found

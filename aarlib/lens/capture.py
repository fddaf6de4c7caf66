"""One forward, and everything that the decomposition of its router logits needs, in float32, padding left out.

T tokens that are not padding, D d_model, E num_experts, K top_k, H heads of an attention layer, Dv their size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from aarlib.aar.attach import attached_router
from aarlib.aar.router import AttentionAwareRouter, RouterTerms
from aarlib.moe.anatomy import Anatomy, LayerAnatomy
from aarlib.moe.attention import AttentionInputs, CaptureRequest, capture_attention
from aarlib.moe.dispatch import exact_float32
from aarlib.moe.packing import packed_inputs
from aarlib.moe.patching import Rank, Wrapper, wrap_forward


class Routed(NamedTuple):
    """What a MoE block did."""

    hidden: Float[Tensor, "T D"]
    """The router's input, which the experts got too."""
    logits: Float[Tensor, "T E"]
    weights: Float[Tensor, "T K"]
    expert_ids: Int[Tensor, "T K"]
    output: Float[Tensor, "T D"]
    """sum_j w_j u_j."""
    shared: Float[Tensor, "T D"] | None
    """The shared expert's part, gated where the family gates it."""
    terms: RouterTerms | None
    """Of an attached router."""


class Edges(NamedTuple):
    """What an attention layer's (head, query, key) triples are made of; not flattened, padding included."""

    inputs: AttentionInputs
    gate: Float[Tensor, "B S H Dv"] | None


class LayerCapture(NamedTuple):
    heads: Float[Tensor, "T HDv"]
    """The input of the output projection: heads side by side, gated where the family gates them."""
    attention: Float[Tensor, "T D"]
    residual: Float[Tensor, "T D"]
    """The residual stream that the MoE part reads, before any norm."""
    mlp: Float[Tensor, "T D"] | None
    """A dense layer's MLP output."""
    routed: Routed | None
    edges: Edges | None


class Capture(NamedTuple):
    mask: Bool[Tensor, "B S"]
    documents: Int[Tensor, " T"]
    """Which document a token belongs to: the row, or the packed document."""
    first: Bool[Tensor, " T"]
    """Whether the token is its document's first."""
    embedding: Float[Tensor, "T D"]
    final: Float[Tensor, "T D"]
    """The residual stream before the final norm."""
    layers: dict[int, LayerCapture]

    @property
    def num_documents(self) -> int:
        return int(self.documents[-1]) + 1

    def routed(self, layer: int) -> Routed:
        found = self.layers[layer].routed
        assert found is not None, layer
        return found

    def unflatten(self, values: Tensor) -> Tensor:
        """[T, ...] to [B, S, ...]; 0 on padding."""
        result = values.new_zeros(*self.mask.shape, *values.shape[1:])
        result[self.mask] = values
        return result


def check_inputs(parts: Anatomy, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """ValueError for an empty document, and for more tokens than the model's context."""
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; give [batch, sequence] with at least one token")
    if attention_mask is not None:
        empty = (attention_mask.sum(1) == 0).nonzero()
        if len(empty):
            raise ValueError(f"attention_mask: row {int(empty[0])} has no token; leave empty documents out")
    context = getattr(parts.config, "max_position_embeddings", None)
    if context is not None and input_ids.shape[1] > context:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} tokens a row and the model's context is {context}; cut the documents"
        )


def capture(
    model: nn.Module,
    parts: Anatomy,
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | None = None,
    position_ids: Int[Tensor, "B S"] | None = None,
    edges: bool = False,
) -> Capture:
    """Run the decoder once, in float32 whatever the model's dtype, and keep what `Capture` lists."""
    check_inputs(parts, input_ids, attention_mask)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    inputs: Mapping[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if position_ids is not None and attention_mask is None:
        inputs = packed_inputs(model, input_ids, position_ids, parts.family)
    elif position_ids is not None:
        inputs = {**inputs, "position_ids": position_ids}
    taps = {layer.index: _Taps(mask) for layer in parts.layers}
    ends = _Taps(mask)
    with torch.no_grad(), exact_float32(input_ids.device), in_float32(model), ExitStack() as stack:
        stack.callback(wrap_forward(parts.layers[0].layer, ends.around(input_name="embedding"), Rank.RECORD))
        final_norm = getattr(parts.decoder, parts.family.final_norm)
        stack.callback(wrap_forward(final_norm, ends.around(input_name="final"), Rank.RECORD))
        for layer in parts.layers:
            for remove in _tap(parts, layer, taps[layer.index], edges):
                stack.callback(remove)
        parts.decoder(**inputs)
    start = mask & ((mask.long().cumsum(1) == 1) if position_ids is None else (position_ids == 0))
    layers = {index: _layer_capture(tap) for index, tap in taps.items()}
    documents = start.flatten().cumsum(0)[mask.flatten()] - 1
    return Capture(mask, documents, start[mask], ends.kept["embedding"], ends.kept["final"], layers)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers as float32 while inside; the model's own tensors come back afterwards, untouched."""
    tensors = [*model.parameters(), *model.buffers()]
    kept = [(t, t.data) for t in tensors if t.is_floating_point() and t.dtype != torch.float32]
    try:
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


class _Taps:
    """What wrappers around the modules of one layer saw, by name: float32, padding left out."""

    def __init__(self, mask: Bool[Tensor, "B S"]) -> None:
        self.rows = mask.flatten()
        self.kept: dict[str, Any] = {}

    def flat(self, values: Tensor) -> Tensor:
        values = values.reshape(-1, values.shape[-1]).to(self.rows.device)[self.rows]
        return values.float() if values.is_floating_point() else values

    def around(self, input_name: str | None = None, output_name: str | None = None) -> Wrapper:
        def wrapper(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if input_name is not None:
                self.kept[input_name] = self.flat(args[0] if args else kwargs["hidden_states"])
            output = inner(*args, **kwargs)
            if output_name is not None:
                self.kept[output_name] = self.flat(output)
            return output

        return wrapper

    def around_router(self, inner: Callable[..., Any], hidden: Tensor) -> Any:
        output = inner(hidden)
        self.kept["hidden"], self.kept["logits"] = self.flat(hidden), self.flat(output[0])
        return output

    def around_experts(self, inner: Callable[..., Any], hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Any:
        output = inner(hidden, expert_ids, weights)
        self.kept["weights"], self.kept["expert_ids"] = self.flat(weights), self.flat(expert_ids)
        self.kept["output"] = self.flat(output)
        return output

    def around_trained(self, router: AttentionAwareRouter) -> Wrapper:
        def wrapper(inner: Callable[..., Any], hidden: Tensor, windows: Tensor | None = None) -> Any:
            terms = router.terms(hidden, windows)
            gates, views = dict(terms.gates), dict(terms.views)
            for side in (gates, views):
                side.update((view, self.flat(part)) for view, part in side.items())
            self.kept["terms"] = RouterTerms(self.flat(terms.standard), gates, views)
            return inner(hidden, windows)

        return wrapper


def _tap(parts: Anatomy, layer: LayerAnatomy, taps: _Taps, edges: bool) -> Iterator[Callable[[], None]]:
    yield wrap_forward(layer.output_projection, taps.around("heads", "attention"), Rank.RECORD)
    reader = layer.moe_norm if parts.family.norm_side == "receiver" else layer.block or layer.dense_mlp
    assert reader is not None
    yield wrap_forward(reader, taps.around("residual"), Rank.RECORD)
    outputs = {"mlp": layer.dense_mlp, "shared": layer.shared_expert, "shared_gate": layer.shared_expert_gate}
    for name, module in outputs.items():
        if module is not None:
            yield wrap_forward(module, taps.around(output_name=name), Rank.RECORD)
    if layer.router is not None and layer.experts is not None:
        yield wrap_forward(layer.router, taps.around_router, Rank.RECORD)
        yield wrap_forward(layer.experts, taps.around_experts, Rank.RECORD)
        trained = attached_router(layer.router)
        if trained is not None:
            yield wrap_forward(trained, taps.around_trained(trained), Rank.RECORD)
    if edges and layer.attention is not None:
        yield from _tap_edges(parts, layer.attention, taps)


def _tap_edges(parts: Anatomy, attention: nn.Module, taps: _Taps) -> Iterator[Callable[[], None]]:
    projected: list[Tensor] = []

    def around_gate(inner: Callable[..., Any], *args: Any) -> Any:
        projected.append(inner(*args))
        return projected[-1]

    def observe(inputs: AttentionInputs) -> None:
        gate = None
        if projected:
            heads = projected.pop().unflatten(-1, (inputs.query.shape[1], -1))
            gate = torch.sigmoid(heads.chunk(2, dim=-1)[1].float()).to(taps.rows.device)
        taps.kept["edges"] = Edges(_moved(inputs, taps.rows.device), gate)

    if parts.family.output_gate is not None:
        yield wrap_forward(getattr(attention, parts.family.output_gate), around_gate, Rank.RECORD)
    request = CaptureRequest(None, window_grad=False, sink_index=None, deliver=lambda *_: None, observe=observe)
    yield capture_attention(attention, request)


def _moved(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    moved = {name: value.to(device) for name, value in inputs._asdict().items() if isinstance(value, Tensor)}
    return inputs._replace(**moved)


def _layer_capture(taps: _Taps) -> LayerCapture:
    kept = taps.kept
    routed = None
    if "logits" in kept:
        shared = kept.get("shared")
        if shared is not None and "shared_gate" in kept:
            shared = shared * torch.sigmoid(kept["shared_gate"])
        given = {name: kept[name] for name in ("hidden", "logits", "weights", "expert_ids", "output")}
        routed = Routed(**given, shared=shared, terms=kept.get("terms"))
    return LayerCapture(kept["heads"], kept["attention"], kept["residual"], kept.get("mlp"), routed, kept.get("edges"))


def inverse_rms(values: Float[Tensor, "T D"], norm: nn.Module, eps_name: str) -> Float[Tensor, " T"]:
    """1 / rms(values), with the norm's eps."""
    return torch.rsqrt(values.pow(2).mean(-1) + float(getattr(norm, eps_name)))


def norm_scale(parts: Anatomy, norm: nn.Module) -> Float[Tensor, " D"]:
    """gamma: what a norm multiplies by, feature by feature."""
    weight = norm.get_parameter("weight").detach().float()
    return weight + 1 if parts.family.zero_centred_norm else weight


def num_heads(parts: Anatomy, layer: LayerAnatomy) -> int:
    """Query heads, or value heads of a linear-attention layer."""
    name = "num_attention_heads" if layer.attention is not None else "linear_num_value_heads"
    return int(getattr(parts.config, name))

"""Record what routers, experts and attention did in a forward, and intervene on it. Keyed by layer index.

Nothing stays on the model after the context, also after an exception. Dimensions: B batch, S sequence of the forward,
E num_experts, K top_k, D d_model, M window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from aarlib.moe.anatomy import Anatomy, LayerAnatomy, anatomy
from aarlib.moe.attention import CaptureRequest, attached_window, capture_attention
from aarlib.moe.dispatch import RouterOutput, expert_outputs
from aarlib.moe.families import Family
from aarlib.moe.patching import Rank, wrap_forward


class Dispatch(NamedTuple):
    weights: Float[Tensor, "B S K"]
    expert_ids: Int[Tensor, "B S K"]


class _PerLayer(dict[int, Any]):
    """A dict by layer index whose KeyError says what was recorded."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __missing__(self, layer: int) -> Any:
        recorded = ", ".join(str(index) for index in sorted(self)) or "none"
        raise KeyError(f"{self.what}[{layer}] was not recorded; layers recorded: {recorded}")


class Record:
    """The most recent forward: every field is a dict by layer index.

    windows [B,S,M] float32, sink [B,S] float32 (weight on the document's first token), router_logits [B,S,E],
    dispatch (weights [B,S,K], expert_ids [B,S,K]), expert_outputs [B,S,K,D]. `mask` [B,S] is False on padding.
    """

    def __init__(self) -> None:
        self.windows: dict[int, Tensor] = _PerLayer("windows")
        self.sink: dict[int, Tensor] = _PerLayer("sink")
        self.router_logits: dict[int, Tensor] = _PerLayer("router_logits")
        self.dispatch: dict[int, Dispatch] = _PerLayer("dispatch")
        self.expert_outputs: dict[int, Tensor] = _PerLayer("expert_outputs")
        self.mask: Bool[Tensor, "B S"] | None = None
        self.num_forwards = 0
        self._shape = (0, 0)
        self._start: Tensor = torch.empty(0)
        self._end = 0

    def _begin(self, inputs: "_Inputs") -> None:
        for field in (self.windows, self.sink, self.router_logits, self.dispatch, self.expert_outputs):
            field.clear()
        self.num_forwards += 1
        self._shape = inputs.shape
        self.mask, self._start, self._end = inputs.mask, inputs.document_start, inputs.end

    def _sink_index(self, num_queries: int, num_keys: int) -> Tensor:
        """Key columns of the documents' first tokens; a sliding cache may have dropped the earliest columns."""
        column = self._start[:, -num_queries:] - (self._end - num_keys)
        return column.clamp_min(-1)


class _Inputs(NamedTuple):
    shape: tuple[int, int]
    mask: Tensor
    document_start: Tensor
    end: int


def _read_inputs(arguments: Mapping[str, Any], positional: Sequence[Any]) -> _Inputs:
    """Shape, padding mask, absolute index of each position's document start, and keys so far, from the decoder's arguments."""
    input_ids = arguments.get("input_ids", positional[0] if positional else None)
    tokens = arguments["inputs_embeds"] if input_ids is None else input_ids
    batch, length = tokens.shape[:2]
    cache = arguments.get("cache", arguments.get("past_key_values"))
    past = 0 if cache is None else int(cache.get_seq_length())
    index = torch.arange(past, past + length, device=tokens.device).expand(batch, length)
    mask, position_ids = arguments.get("attention_mask"), arguments.get("position_ids")
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    if mask is not None:
        start = mask.to(torch.int64).argmax(dim=1, keepdim=True).expand(batch, length)
        return _Inputs((batch, length), mask[:, -length:].bool(), start, past + length)
    start = torch.zeros_like(index)
    if position_ids is not None and past == 0:
        positions = position_ids[0] if position_ids.dim() == 3 else position_ids
        start = index - positions.expand(batch, length)
    return _Inputs((batch, length), torch.ones_like(index, dtype=torch.bool), start, past + length)


@contextmanager
def record(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    *,
    windows: int | Literal[True] | None = None,
    sink: bool = False,
    router_logits: bool = False,
    dispatch: bool = False,
    expert_outputs: bool = False,
    family: Family | None = None,
) -> Iterator[Record]:
    """Record the named quantities of `layers` (default: all that have them) in each forward of `model`.

    `windows` is M, or True for the window that AAR attached. Raises ValueError for a layer that lacks what is asked, and
    RuntimeError at the end where a forward ran without reaching a layer that was to be recorded.
    """
    parts = anatomy(model, family)
    result = Record()
    of_router = router_logits or dispatch or expert_outputs
    of_attention = windows is not None or sink
    if not of_router and not of_attention:
        raise ValueError("nothing to record; ask for windows, sink, router_logits, dispatch or expert_outputs")
    with ExitStack() as stack:
        stack.callback(wrap_forward(parts.decoder, _beginning(result), Rank.RECORD))
        chosen = _chosen(parts, layers, of_router, windows, sink)
        for layer in chosen:
            if of_router and layer.router is not None:
                wrapper = _router_recorder(result, layer.index, router_logits, dispatch)
                stack.callback(wrap_forward(layer.router, wrapper, Rank.RECORD))
            if expert_outputs and layer.experts is not None:
                wrapper = _experts_recorder(result, layer.index)
                stack.callback(wrap_forward(layer.experts, wrapper, Rank.RECORD))
            if of_attention and layer.attention is not None:
                request = _attention_recorder(result, layer.index, windows, sink)
                stack.callback(capture_attention(layer.attention, request))
        asked = {
            "router_logits": router_logits, "dispatch": dispatch, "expert_outputs": expert_outputs,
            "windows": windows is not None, "sink": sink,
        }  # fmt: skip
        expected = _expected(chosen, [name for name, wanted in asked.items() if wanted], windows is True)
        yield result
        _check_reached(result, expected)


def _chosen(
    parts: Anatomy, layers: Sequence[int] | None, of_router: bool, windows: int | bool | None, sink: bool
) -> list[LayerAnatomy]:
    attached = {layer.index: attached_window(layer.attention) for layer in parts.layers if layer.attention is not None}
    if layers is None:
        if windows is True and not any(attached.values()):
            raise ValueError("windows = True needs a model with AAR attached; pass the window size as a number")
        return list(parts.layers)
    for index in layers:
        if of_router:
            parts.moe_layer(index)
        if (windows is not None or sink) and index not in attached:
            have = ", ".join(str(layer) for layer in attached)
            raise ValueError(f"layers: layer {index} has no attention weights; layers that have them: {have}")
        if windows is True and attached.get(index) is None:
            raise ValueError(f"layers: no AAR window is attached at layer {index}; pass the window size as a number")
    return [parts.layers[index] for index in layers]


def _beginning(result: Record) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result._begin(_read_inputs(kwargs, args))
        return inner(*args, **kwargs)

    return wrapper


def _router_recorder(result: Record, layer: int, router_logits: bool, dispatch: bool) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], hidden: Tensor) -> Any:
        output = RouterOutput(*inner(hidden))
        batch, length = result._shape
        if router_logits:
            result.router_logits[layer] = output.router_logits.unflatten(0, (batch, length))
        if dispatch:
            weights, ids = output.weights, output.expert_ids
            result.dispatch[layer] = Dispatch(weights.unflatten(0, (batch, length)), ids.unflatten(0, (batch, length)))
        return output

    return wrapper


def _experts_recorder(result: Record, layer: int) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Any:
        outputs = expert_outputs(inner, hidden, expert_ids)
        result.expert_outputs[layer] = outputs.unflatten(0, result._shape)
        return inner(hidden, expert_ids, weights)

    return wrapper


def _attention_recorder(result: Record, layer: int, windows: int | bool | None, sink: bool) -> CaptureRequest:
    def deliver(window_BSM: Tensor | None, sink_BS: Tensor | None) -> None:
        if windows is not None and window_BSM is not None:
            result.windows[layer] = window_BSM
        if sink and sink_BS is not None:
            result.sink[layer] = sink_BS

    size = None if windows is True or windows is None else int(windows)
    return CaptureRequest(
        size, window_grad=windows is not None, sink_index=result._sink_index if sink else None, deliver=deliver
    )


def _expected(chosen: Sequence[LayerAnatomy], asked: Sequence[str], attached_only: bool) -> dict[str, set[int]]:
    """The layers at which a forward leaves each field that was asked for."""
    with_router = {layer.index for layer in chosen if layer.router is not None}
    with_weights = {layer.index for layer in chosen if layer.attention is not None}
    with_window = {layer.index for layer in chosen if layer.attention and attached_window(layer.attention)}
    of_attention = {"windows": with_window if attached_only else with_weights, "sink": with_weights}
    return {name: of_attention.get(name, with_router) for name in asked}


def _check_reached(result: Record, expected: Mapping[str, set[int]]) -> None:
    if result.num_forwards == 0:
        raise RuntimeError("no forward of the model ran inside record(); run the model that was passed to it")
    for name, layers in expected.items():
        if missing := sorted(layers - set(getattr(result, name))):
            raise RuntimeError(f"{name} of layers {missing} were not reached by the last forward")


Intervention = Callable[[RouterOutput, Float[Tensor, "T D"]], RouterOutput]
"""From what the router returned and its input h to what the experts shall get."""


@contextmanager
def intervene(
    model: nn.Module, interventions: Mapping[int, Intervention], family: Family | None = None
) -> Iterator[None]:
    """Change what routers return, by layer index; raises ValueError for a layer without router."""
    parts = anatomy(model, family)

    def wrapper_of(change: Intervention) -> Callable[..., Any]:
        def wrapper(inner: Callable[..., Any], hidden: Tensor) -> Any:
            return change(RouterOutput(*inner(hidden)), hidden.reshape(-1, hidden.shape[-1]))

        return wrapper

    with ExitStack() as stack:
        for index, change in interventions.items():
            router = parts.moe_layer(index).router
            assert router is not None
            stack.callback(wrap_forward(router, wrapper_of(change), Rank.INTERVENTION))
        yield

"""The golden identities (DESIGN 7), each a function that returns its measured error. Tests and `doctor` both call them.

An error is max|a - b| / max(1, max|b|) over the positions that are not padding: absolute for values up to 1, relative above.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from aarlib.aar.attach import RoutingHandle
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.aar.measure import picks_kept, routing_change
from aarlib.identities.eager import eager_attention, eager_capture_into, materialised
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import Selector
from aarlib.moe.families import Family
from aarlib.moe.packing import packed_inputs
from aarlib.moe.patching import Rank, wrap_forward
from aarlib.moe.record import record

Inputs = Mapping[str, Tensor]
"""input_ids [B,S] and, optionally, attention_mask [B,S] and position_ids [B,S]."""

Measure = Callable[[Tensor, Tensor], float]
"""How far found is from expected: `error`, or `relative_norm` where single tokens may differ."""

CACHE_NAMES = ("cache", "past_key_values")


class Bite(NamedTuple):
    """How much an intervention changed: an identity proves nothing where it changed nothing."""

    picks_changed: float
    logits_moved: float


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def relative_norm(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|: for 16-bit models, in which rounding may send a token to another expert."""
    found, expected = found.double(), expected.double()
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def randomise(handle: RoutingHandle, seed: int = 0) -> None:
    """Give A, G and the routers values at O(1), so that an identity bites."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in handle.trainable():
            fan = parameter.shape[-1] if "gate_" in name else 1
            scale = 2.0 if ".attention_" in name else 1.0 / fan**0.5
            noise = torch.randn(parameter.shape, generator=generator).to(parameter) * scale
            parameter.copy_(
                noise if parameter.dim() == 2 and name.split(".")[-1] != "weight" else parameter + 0.1 * noise
            )


def bite(model: Any, handle: RoutingHandle, inputs: Inputs) -> Bite:
    """Share of picks that differ from the stock model's, averaged over AAR layers, and the largest move of a logit."""
    layers = [index for index, router in handle.routers.items() if router.views] or list(handle.routers)
    with record(model, layers, dispatch=True, family=handle.anatomy.family) as patched:
        moved = _logits(model, inputs)
    handle.enabled = False
    with record(model, layers, dispatch=True, family=handle.anatomy.family) as stock:
        expected = _logits(model, inputs)
    handle.enabled = True
    changed = routing_change(patched.dispatch, stock.dispatch, _valid(inputs))
    return Bite(sum(changed.values()) / len(changed), float((moved - expected)[_valid(inputs)].abs().max()))


def disabled_is_stock(model: Any, attach: Callable[[Any], RoutingHandle], inputs: Inputs) -> float:
    """Logits with a handle attached but disabled, and after detach, against those before attaching: 0 exactly."""
    valid = _valid(inputs)
    stock = _logits(model, inputs)[valid]
    handle = attach(model)
    handle.enabled = False
    disabled = _logits(model, inputs)[valid]
    handle.enabled = True
    handle.detach()
    return max(error(disabled, stock), error(_logits(model, inputs)[valid], stock))


def windows_against_eager(
    model: Any, window: int, inputs: Inputs, family: Family | None = None, measure: Measure = error
) -> float:
    """Windows recorded on a stock model against its own materialised attention."""
    parts = anatomy(model, family)
    layers = [layer.index for layer in parts.layers if layer.attention is not None]
    with torch.no_grad(), record(model, layers, windows=window, family=family) as ours:
        model(**inputs)
    expected: dict[int, Tensor] = {}
    with eager_attention(model), torch.no_grad():
        removers = [eager_capture_into(parts.layers[index].attention, window, index, expected) for index in layers]
        model(**inputs)
    for remove in removers:
        remove()
    return max(measure(ours.windows[index], expected[index]) for index in layers)


def stock_against_eager(model: Any, inputs: Inputs, measure: Measure = error) -> float:
    """Logits of the stock model under its own attention implementation against those under eager: its own noise."""
    ours = _logits(model, inputs)
    with eager_attention(model):
        expected = _logits(model, inputs)
    return measure(ours[_valid(inputs)], expected[_valid(inputs)])


def logits_against_eager(model: Any, handle: RoutingHandle, inputs: Inputs, measure: Measure = error) -> float:
    """Logits of the patched model against the same routers fed from materialised attention."""
    ours = _logits(model, inputs)
    with materialised(model, handle):
        expected = _logits(model, inputs)
    return measure(ours[_valid(inputs)], expected[_valid(inputs)])


def gradients_against_eager(model: Any, handle: RoutingHandle, inputs: Inputs, measure: Measure = error) -> float:
    """Gradients of the mean CE to all trained tensors and to the input embeddings, against autograd through materialised
    attention."""
    ours = _gradients(model, handle, inputs)
    with materialised(model, handle):
        expected = _gradients(model, handle, inputs)
    return max(measure(found, expected[name]) for name, found in ours.items())


def prefill_against_decode(model: Any, inputs: Inputs, chunk: int, measure: Measure = error) -> float:
    """Logits of one whole forward against the same tokens fed in chunks through the KV cache; the first chunk holds all of the
    left padding, as generation does."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    whole = _logits(model, {**inputs, "position_ids": positions})
    pieces, cache = [], {}
    with torch.no_grad():
        first = int(mask.argmax(1).max()) + chunk
        edges = [0, *range(first, mask.shape[1], chunk), mask.shape[1]]
        for start, stop in pairwise(edges):
            step = {"input_ids": inputs["input_ids"][:, start:stop], "position_ids": positions[:, start:stop]}
            output = model(**step, attention_mask=mask[:, :stop], use_cache=True, **cache)
            name = next(name for name in CACHE_NAMES if getattr(output, name, None) is not None)
            cache = {name: getattr(output, name)}
            pieces.append(output.logits)
    return measure(torch.cat(pieces, 1)[mask.bool()], whole[mask.bool()])


def batch_against_single(model: Any, inputs: Inputs, measure: Measure = error) -> float:
    """Logits of a padded batch against each row alone, without its padding."""
    mask = inputs["attention_mask"].bool()
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    together = _logits(model, {**inputs, "position_ids": positions})
    errors = []
    for row in range(mask.shape[0]):
        alone = _logits(model, {"input_ids": inputs["input_ids"][row : row + 1, mask[row]]})
        errors.append(measure(together[row, mask[row]], alone[0]))
    return max(errors)


def packed_against_single(
    model: Any, input_ids: Tensor, lengths: list[int], family: Family | None = None, measure: Measure = error
) -> float:
    """Logits of documents packed into one row (position_ids restart, no mask) against each document alone."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(input_ids.device)
    with torch.no_grad():
        packed = model(**packed_inputs(model, input_ids, positions, family)).logits[0]
    alone = [_logits(model, {"input_ids": document})[0] for document in input_ids.split(lengths, dim=1)]
    return measure(packed, torch.cat(alone))


def selection_against_gate(model: Any, inputs: Inputs, family: Family | None = None) -> float:
    """The selection copy on stock logits against what the stock router chose: 0 exactly, ids and weights."""
    parts = anatomy(model, family)
    with torch.no_grad(), record(model, router_logits=True, dispatch=True, family=family) as stock:
        model(**inputs)
    worst, hidden_dtype = 0.0, model.get_input_embeddings().weight.dtype
    for index in parts.moe_layers:
        router, (weights, expert_ids) = parts.layers[index].router, stock.dispatch[index]
        assert router is not None
        logits = stock.router_logits[index].flatten(0, 1).float()
        ours = Selector(parts, router)(logits, hidden_dtype)
        if not torch.equal(ours.expert_ids, expert_ids.flatten(0, 1)) or ours.weights.dtype != weights.dtype:
            return float("inf")
        worst = max(worst, error(ours.weights, weights.flatten(0, 1)))
    return worst


def picks_agree(model: Any, inputs: Inputs, family: Family | None = None) -> float:
    """Share of the stock routers' picks that float32 logits of the same hidden states give too; 1 where the gate is float32."""
    parts = anatomy(model, family)
    kept, picks = 0, 0

    def watch(router: nn.Module) -> Callable[..., Any]:
        select, bias = Selector(parts, router), parts.family.router_bias

        def wrapper(inner: Callable[..., Any], hidden: Tensor) -> Any:
            nonlocal kept, picks
            output = inner(hidden)
            offset = None if bias is None else router.get_parameter(bias).float()
            logits = linear(hidden.flatten(0, -2).float(), router.get_parameter("weight").float(), offset)
            ours = select(logits, hidden.dtype).expert_ids
            same = picks_kept(output[2], ours)[_valid(inputs).flatten()]
            kept, picks = kept + int(same.sum()), picks + same.numel()
            return output

        return wrapper

    with ExitStack() as stack:
        for index in parts.moe_layers:
            router = parts.moe_layer(index).router
            assert router is not None
            stack.callback(wrap_forward(router, watch(router), Rank.RECORD))
        _logits(model, inputs)
    return kept / picks


def expert_sum_against_block(
    model: Any, inputs: Inputs, family: Family | None = None, measure: Measure = error
) -> float:
    """sum_j w_j u_j against the experts module's own output."""
    parts = anatomy(model, family)
    outputs: dict[int, Tensor] = {}
    removers = []
    for index in parts.moe_layers:
        experts = parts.layers[index].experts
        assert experts is not None
        removers.append(wrap_forward(experts, _keep_output(outputs, index), Rank.ROUTER))
    with torch.no_grad(), record(model, dispatch=True, expert_outputs=True, family=family) as ours:
        model(**inputs)
    for remove in removers:
        remove()
    sums = {
        index: (ours.dispatch[index].weights[..., None] * ours.expert_outputs[index]).sum(-2).flatten(0, 1)
        for index in parts.moe_layers
    }
    return max(measure(sums[index], outputs[index].reshape(sums[index].shape)) for index in parts.moe_layers)


def _keep_output(outputs: dict[int, Tensor], index: int) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], *args: Any) -> Any:
        outputs[index] = inner(*args)
        return outputs[index]

    return wrapper


def _gradients(model: Any, handle: RoutingHandle, inputs: Inputs) -> dict[str, Tensor]:
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    logits = model(inputs_embeds=embeddings, use_cache=False, **others).logits[:, :-1]
    valid = _valid(inputs)
    targets = inputs["input_ids"][:, 1:].masked_fill(~(valid[:, 1:] & valid[:, :-1]), -100)
    loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
    named = {**dict(handle.trainable()), "embeddings": embeddings}
    gradients = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, gradients, strict=True))


def _logits(model: Any, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def _valid(inputs: Inputs) -> Tensor:
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def default_attach(model: Any, window: int = 10, family: Family | None = None) -> RoutingHandle:
    """AAR on the last half of the layers that allow it, randomised at O(1)."""
    from aarlib.aar.attach import attach_aar

    layers = anatomy(model, family).aar_layers
    config = AARConfig(layers=layers[-max(2, len(layers) // 2) :], window=window) if layers else RouterSFTConfig()
    handle = attach_aar(model, config, family=family)
    randomise(handle)
    return handle

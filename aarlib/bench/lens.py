"""Bench of the lens on `mid`: what decompositions add to a plain forward, and against hooks and loops. Equal numbers first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from aarlib.bench.measure import Measurement, measure, mid_model
from aarlib.lens.influence import all_neuron_sums, expert_sums, head_sums, layer_sums
from aarlib.lens.neurons import NeuronConstants
from aarlib.lens.projection import Projection
from aarlib.lens.scores import read
from aarlib.moe.anatomy import anatomy

LENGTH, BATCH = 32, 32
TARGETS = {"by layer, added": 0.6, "heads, experts and neurons, added": 2.5, "loops / folded": 5.0, "peak GiB": 3.0}
"""Peak, of the process: 0.5 GiB of weights, and the captures and products of one batch of 32 documents."""
Variances = dict[str, Tensor]


class LensBench(NamedTuple):
    measurements: dict[str, Measurement]
    ratios: dict[str, float]
    largest_difference: float
    """Of a variance, folded against loops, relative to the largest variance of its level."""
    targets: dict[str, float] = TARGETS
    """At most; `loops / folded` at least."""


def batches(documents: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(1, 8192, (documents, LENGTH), generator=generator).split(BATCH))


def bench(documents: int = 256, repeats: int = 5, threads: int = 1, looped_documents: int = 32) -> LensBench:
    """Ratios are added time over plain time; loops and folded both run on `looped_documents`, forward included in neither."""
    difference = largest_difference(mid_model(num_hidden_layers=3), batches(2)[0][:2])
    if difference > 1e-4:
        raise RuntimeError(f"variances of the loops and of the folded path differ by {difference:.1e} of the largest")
    variants = {
        "plain forward": ("plain", documents),
        "by layer": ("by_layer", documents),
        "heads, experts and neurons": ("finer", documents),
        "plain forward, few": ("plain", looped_documents),
        "folded, few": ("finer", looped_documents),
        "loops, few": ("loops", looped_documents),
    }
    found = {
        name: measure(f"aarlib.bench.lens:{variant}", {"documents": count}, threads, repeats)
        for name, (variant, count) in variants.items()
    }
    seconds = {name: measurement.median_s for name, measurement in found.items()}
    plain, few = seconds["plain forward"], seconds["plain forward, few"]
    ratios = {
        "by layer, added": seconds["by layer"] / plain - 1,
        "heads, experts and neurons, added": seconds["heads, experts and neurons"] / plain - 1,
        "loops / folded": (seconds["loops, few"] - few) / (seconds["folded, few"] - few),
        "peak GiB": max(found[name].peak_gib for name in ("by layer", "heads, experts and neurons")),
    }
    return LensBench(found, ratios, difference)


def plain(documents: int) -> Callable[[], None]:
    model, rows = mid_model(), batches(documents)

    def run() -> None:
        with torch.no_grad():
            for ids in rows:
                model(input_ids=ids, use_cache=False)

    return run


def by_layer(documents: int) -> Callable[[], None]:
    model, rows = mid_model(), batches(documents)
    projection = Projection(anatomy(model))

    def run() -> None:
        for ids in rows:
            layer_sums(read(model, projection, ids))

    return run


def finer(documents: int) -> Callable[[], None]:
    """Constants and folded matrices are made once for a model, in the warm-up."""
    model, rows = mid_model(), batches(documents)
    projection = Projection(anatomy(model))
    constants = NeuronConstants(projection)

    def run() -> None:
        for ids in rows:
            reading = read(model, projection, ids)
            head_sums(reading)
            expert_sums(reading)
            all_neuron_sums(reading, constants)

    return run


def loops(documents: int) -> Callable[[], None]:
    model, rows = mid_model(), batches(documents)

    def run() -> None:
        for ids in rows:
            looped(model, ids)

    return run


def folded(model: Any, ids: Tensor) -> Variances:
    projection = Projection(anatomy(model))
    reading = read(model, projection, ids)
    sums = (head_sums(reading), expert_sums(reading), all_neuron_sums(reading))
    return {name: item.all[:, index, :, 0].sum(0) for item in sums for index, name in enumerate(item.senders)}


def looped(model: Any, ids: Tensor) -> Variances:
    """The plain way on OLMoE: hooks, then every component projected on its own for every later router. [R], NaN before."""
    layers = list(model.model.layers)
    seen: dict[tuple[int, str], Any] = {}
    hooks = [
        module.register_forward_hook(lambda _, args, output, key=(index, name): seen.update({key: (args, output)}))
        for index, layer in enumerate(layers)
        for name, module in (
            ("o_proj", layer.self_attn.o_proj),
            ("experts", layer.mlp.experts),
            ("norm", layer.post_attention_layernorm),
        )
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    found: Variances = {}
    for index, layer in enumerate(layers):
        found |= _looped_heads(model, layers, seen, index, layer)
        if index < len(layers) - 1:
            found |= _looped_experts(layers, seen, index, layer)
    return found


def _variance(
    layers: list[Any], seen: dict[tuple[int, str], Any], receiver: int, part: Tensor, tokens: Any = None
) -> Tensor:
    norm = layers[receiver].post_attention_layernorm
    z = seen[receiver, "norm"][0][0].flatten(0, 1)
    scale = torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    scale = scale if tokens is None else scale[tokens]
    scores = (part * norm.weight * scale) @ layers[receiver].mlp.gate.weight.T
    return scores.var(-1, unbiased=False).sum()


def _looped_heads(model: Any, layers: list[Any], seen: dict[tuple[int, str], Any], index: int, layer: Any) -> Variances:
    found = {}
    heads = seen[index, "o_proj"][0][0].flatten(0, 1).chunk(model.config.num_attention_heads, dim=-1)
    weights = layer.self_attn.o_proj.weight.chunk(model.config.num_attention_heads, dim=1)
    for head, (values, weight) in enumerate(zip(heads, weights, strict=True)):
        part = values @ weight.T
        row = torch.full((len(layers),), float("nan"))
        for receiver in range(index, len(layers)):
            row[receiver] = _variance(layers, seen, receiver, part)
        found[f"attn.{index}.head.{head}"] = row
    return found


def _looped_experts(layers: list[Any], seen: dict[tuple[int, str], Any], index: int, layer: Any) -> Variances:
    found = {}
    experts = layer.mlp.experts
    hidden, ids, weights = seen[index, "experts"][0]
    for expert in range(experts.down_proj.shape[0]):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[tokens] @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        activations = silu(gate) * up * weights[tokens, slots, None]
        row = torch.full((len(layers),), float("nan"))
        neurons = torch.full((activations.shape[1], len(layers)), float("nan"))
        for receiver in range(index + 1, len(layers)):
            row[receiver] = _variance(layers, seen, receiver, activations @ experts.down_proj[expert].T, tokens)
            for neuron in range(activations.shape[1]):
                part = activations[:, neuron, None] * experts.down_proj[expert][:, neuron]
                neurons[neuron, receiver] = _variance(layers, seen, receiver, part, tokens)
        found[f"moe.{index}.expert.{expert}"] = row
        found |= {f"moe.{index}.expert.{expert}.neuron.{neuron}": values for neuron, values in enumerate(neurons)}
    return found


def largest_difference(model: Any, ids: Tensor) -> float:
    """Over the levels: largest difference of a variance sum, of the level's largest."""
    expected, found = looped(model, ids), folded(model, ids)
    if set(expected) != set(found):
        raise RuntimeError(f"components differ: {sorted(set(expected) ^ set(found))[:3]}")
    worst = 0.0
    for level in ("head", "expert", "neuron"):
        names = [name for name in expected if name.split(".")[-2] == level]
        both = [torch.stack([side[name] for name in names]).nan_to_num(0.0) for side in (found, expected)]
        worst = max(worst, float((both[0] - both[1]).abs().max() / both[1].max()))
    return worst

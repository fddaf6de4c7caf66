"""Variances the plain way on OLMoE: hooks, then every component projected on its own for every later router."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Variances = dict[str, Tensor]
Seen = dict[tuple[int, str], Any]
"""(arguments, output) by layer and module."""


def looped(model: Any, ids: Tensor) -> Variances:
    """By head, expert and neuron: [R], NaN before a sender."""
    layers, seen = list(model.model.layers), observed(model, ids)
    found: Variances = {}
    for index, layer in enumerate(layers):
        found |= _looped_heads(model, layers, seen, index, layer)
        if index < len(layers) - 1:
            found |= _looped_experts(layers, seen, index, layer)
    return found


def looped_layers(model: Any, ids: Tensor) -> Variances:
    """The same by layer: embedding, attention and MoE outputs."""
    layers, seen = list(model.model.layers), observed(model, ids)
    parts = {"embedding": (0, seen[0, "layer"][0][0])}
    for index in range(len(layers)):
        parts[f"attn.{index}"] = (index, seen[index, "o_proj"][1])
        if index < len(layers) - 1:
            parts[f"moe.{index}"] = (index + 1, seen[index, "experts"][1])
    found: Variances = {}
    for name, (first, part) in parts.items():
        row = torch.full((len(layers),), float("nan"))
        for receiver in range(first, len(layers)):
            row[receiver] = _variance(layers, seen, receiver, part.flatten(0, -2))
        found[name] = row
    return found


def observed(model: Any, ids: Tensor) -> Seen:
    seen: Seen = {}
    hooks = [
        module.register_forward_hook(lambda _, args, output, key=(index, name): seen.update({key: (args, output)}))
        for index, layer in enumerate(model.model.layers)
        for name, module in (
            ("layer", layer),
            ("o_proj", layer.self_attn.o_proj),
            ("experts", layer.mlp.experts),
            ("norm", layer.post_attention_layernorm),
        )
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def _variance(layers: list[Any], seen: Seen, receiver: int, part: Tensor, tokens: Any = None) -> Tensor:
    if not len(part):
        return part.new_zeros(())
    norm = layers[receiver].post_attention_layernorm
    z = seen[receiver, "norm"][0][0].flatten(0, 1)
    scale = torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    scale = scale if tokens is None else scale[tokens]
    scores = (part * norm.weight * scale) @ layers[receiver].mlp.gate.weight.T
    return scores.var(-1, unbiased=False).sum()


def _looped_heads(model: Any, layers: list[Any], seen: Seen, index: int, layer: Any) -> Variances:
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


def _looped_experts(layers: list[Any], seen: Seen, index: int, layer: Any) -> Variances:
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

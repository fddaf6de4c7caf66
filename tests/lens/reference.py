"""Router logits taken apart the plain way: forward hooks, explicit norms, loops. Shares no code with aarlib.lens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.aar.reference import Reference, spectrum

Scores = dict[int, dict[str, Tensor]]


class Seen:
    """Inputs and outputs of every module that matters, by (layer, name)."""

    def __init__(self, model: Any, inputs: dict[str, Tensor]) -> None:
        self.model, self.layers = model, list(model.model.layers)
        self.inputs: dict[tuple[int, str], Any] = {}
        self.outputs: dict[tuple[int, str], Any] = {}
        hooks = []
        for index, layer in enumerate(self.layers):
            for name, module in self._watched(layer).items():
                hooks.append(module.register_forward_hook(self._keep(index, name)))
        with torch.no_grad():
            model(**inputs)
        for hook in hooks:
            hook.remove()

    def _watched(self, layer: Any) -> dict[str, Any]:
        attention = self.attention(layer)
        watched = {"layer": layer, "mlp": layer.mlp, "attention": attention, "o_proj": self.o_proj(layer)}
        for name in ("experts", "gate", "router", "shared_expert", "shared_experts", "shared_expert_gate"):
            if hasattr(layer.mlp, name):
                watched["router" if name == "gate" else name] = getattr(layer.mlp, name)
        watched["post_norm"] = layer.post_attention_layernorm
        if hasattr(attention, "q_proj") and attention.q_proj is not None:
            watched["q_proj"] = attention.q_proj
        return watched

    def _keep(self, index: int, name: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, output: Any) -> None:
            self.inputs[index, name] = args[0] if args else None
            self.outputs[index, name] = output

        return hook

    @staticmethod
    def attention(layer: Any) -> Any:
        return layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn

    def o_proj(self, layer: Any) -> Any:
        attention = self.attention(layer)
        return attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj


def gamma(norm: Any) -> Tensor:
    return 1 + norm.weight if "Qwen3_5" in type(norm).__name__ else norm.weight


def rms(values: Tensor, norm: Any) -> Tensor:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return (values.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def is_flex(model: Any) -> bool:
    return model.config.model_type == "flex_olmo"


def naive_parts(model: Any, seen: Seen, level: str) -> list[tuple[float, str, Tensor]]:
    """(depth, name, contribution to the residual stream [B, S, D]), sender norms applied."""
    shape = seen.inputs[0, "layer"].shape
    parts = [(-1.0, "embedding", seen.inputs[0, "layer"])]
    for index, layer in enumerate(seen.layers):
        attention = seen.outputs[index, "o_proj"]
        pieces = {f"attn.{index}": attention}
        if level == "head":
            pieces = heads(model, seen, index)
        if level == "edge" and hasattr(layer, "self_attn"):
            pieces = edges(model, seen, index)
        parts += [(2 * index, n, sender(model, layer, v, attention, True)) for n, v in pieces.items()]
        if (index, "experts") not in seen.outputs:
            whole = seen.outputs[index, "mlp"]
            parts.append((2 * index + 1, f"mlp.{index}", sender(model, layer, whole, whole, False)))
            continue
        routed = seen.outputs[index, "experts"].reshape(shape)
        pieces = {f"moe.{index}": routed}
        if level in ("expert", "neuron"):
            pieces = experts(seen, index, by_neuron=level == "neuron")
        parts += [(2 * index + 1, n, sender(model, layer, v, routed, False)) for n, v in pieces.items()]
        for name in ("shared_expert", "shared_experts"):
            if (index, name) in seen.outputs:
                shared = seen.outputs[index, name].reshape(shape)
                if (index, "shared_expert_gate") in seen.outputs:
                    shared = shared * torch.sigmoid(seen.outputs[index, "shared_expert_gate"].reshape(*shape[:2], 1))
                parts.append((2 * index + 1, f"shared.{index}", shared))
    return parts


def sender(model: Any, layer: Any, part: Tensor, whole: Tensor, is_attention: bool) -> Tensor:
    if not is_flex(model):
        return part
    norm = layer.post_attention_layernorm if is_attention else layer.post_feedforward_layernorm
    return part * norm.weight / rms(whole, norm)


def heads(model: Any, seen: Seen, index: int) -> dict[str, Tensor]:
    layer = seen.layers[index]
    projection = seen.o_proj(layer)
    attends = hasattr(layer, "self_attn")
    count = model.config.num_attention_heads if attends else model.config.linear_num_value_heads
    pieces = {}
    for head, part in enumerate(seen.inputs[index, "o_proj"].chunk(count, dim=-1)):
        alone = torch.zeros_like(seen.inputs[index, "o_proj"])
        size = part.shape[-1]
        alone[..., head * size : (head + 1) * size] = part
        pieces[f"attn.{index}.head.{head}"] = alone @ projection.weight.T
    if projection.bias is not None:
        pieces[f"attn.{index}.bias"] = projection.bias.expand_as(seen.outputs[index, "o_proj"])
    return pieces


def edges(model: Any, seen: Seen, index: int) -> dict[str, Tensor]:
    """From the eager attention weights (run the model with attn_implementation eager) and the module's own value path."""
    layer, config = seen.layers[index], model.config
    attention = layer.self_attn
    weights = seen.outputs[index, "attention"][1]
    read = seen.inputs[index, "layer"]
    if not is_flex(model):
        read = layer.input_layernorm(read)
    if config.model_type == "deepseek_v2":
        latent = attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(read)[..., : config.kv_lora_rank])
        value = attention.kv_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1))[
            ..., config.qk_nope_head_dim :
        ]
    else:
        value = attention.v_proj(read).unflatten(-1, (config.num_key_value_heads, -1))
        value = value.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=2)
    size, pieces = value.shape[-1], {}
    gate = torch.ones_like(value)
    if config.model_type == "qwen3_5_moe_text":
        gate = torch.sigmoid(seen.outputs[index, "q_proj"].unflatten(-1, (config.num_attention_heads, -1))[..., size:])
    for head in range(config.num_attention_heads):
        columns = attention.o_proj.weight[:, head * size : (head + 1) * size]
        for key in range(value.shape[1]):
            part = weights[:, head, :, key, None] * value[:, None, key, head] * gate[:, :, head]
            pieces[f"attn.{index}.head.{head}.key.{key}"] = part @ columns.T
    if attention.o_proj.bias is not None:
        pieces[f"attn.{index}.bias"] = attention.o_proj.bias.expand_as(read)
    return pieces


def experts(seen: Seen, index: int, by_neuron: bool) -> dict[str, Tensor]:
    module = seen.layers[index].mlp.experts
    hidden = seen.inputs[index, "experts"]
    shape = seen.inputs[index, "layer"].shape
    _, weights, ids = seen.outputs[index, "router"]
    pieces: dict[str, Tensor] = {}
    biases = torch.zeros_like(hidden)
    for expert in range(module.gate_up_proj.shape[0]):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        if hasattr(module, "alpha"):
            gate_up = hidden @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]
            gate, up = gate_up[:, ::2].clamp(max=module.limit), gate_up[:, 1::2].clamp(-module.limit, module.limit)
            activation, down = (up + 1) * gate * torch.sigmoid(module.alpha * gate), module.down_proj[expert]
            bias = module.down_proj_bias[expert] * weight
        else:
            gate, up = (hidden @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
            activation, down = silu(gate) * up, module.down_proj[expert].T
            bias = torch.zeros_like(hidden)
        name = f"moe.{index}.expert.{expert}"
        if not by_neuron:
            pieces[name] = (weight * (activation @ down) + bias).reshape(shape)
            continue
        biases = biases + bias
        for neuron in range(activation.shape[1]):
            pieces[f"{name}.neuron.{neuron}"] = (weight * activation[:, neuron, None] * down[neuron]).reshape(shape)
    if by_neuron and hasattr(module, "alpha"):
        pieces[f"moe.{index}.bias"] = biases.reshape(shape)
    return pieces


@torch.no_grad()
def naive_scores(
    model: Any, inputs: dict[str, Tensor], level: str, receivers: tuple[int, ...], routers: Reference | None = None
) -> Scores:
    """Of the stock routers, or of the attention-aware ones of `routers`, which stand on `model` and take one document."""
    if routers is not None:
        routers.windows, routers.sink, routers.router_logits = {}, {}, {}
    seen = Seen(model, inputs)
    parts = naive_parts(model, seen, level)
    result: Scores = {}
    for receiver in receivers:
        layer = seen.layers[receiver]
        router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
        tensors = dict(router.named_parameters()) if routers is None else routers.parameters[receiver]
        factor, views = torch.ones(()), {}
        if routers is not None and "attention_time" in tensors:
            factor, views = aware_terms(tensors, seen.inputs[receiver, "router"], routers.windows[receiver])
        found = result[receiver] = {}
        for depth, name, part in parts:
            if depth < 2 * receiver + 1:
                if not is_flex(model):
                    norm = layer.post_attention_layernorm
                    part = part * gamma(norm) / rms(seen.inputs[receiver, "post_norm"], norm)
                found[name] = factor * (part @ tensors["weight"].T)
        found |= views
        if tensors.get("bias") is not None:
            found["bias"] = (factor * tensors["bias"]).expand_as(found["embedding"])
    return result


def aware_terms(tensors: Mapping[str, Tensor], hidden: Tensor, windows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """1 - mean alpha [1, S, E], the standard part's factor, and what each of the two views adds, token by token."""
    rows: dict[str, list[Tensor]] = {"factor": [], "view.time": [], "view.spectrum": []}
    for token, window in zip(hidden.reshape(-1, hidden.shape[-1]), windows, strict=True):
        rows["factor"].append(torch.ones(tensors["weight"].shape[0]))
        for view, features in (("time", window), ("spectrum", spectrum(window))):
            alpha = torch.sigmoid(tensors[f"gate_{view}"] @ torch.cat([token, features]))
            rows["factor"][-1] = rows["factor"][-1] - alpha / 2
            rows[f"view.{view}"].append(alpha * (tensors[f"attention_{view}"].T @ features) / 2)
    views = {name: torch.stack(values)[None] for name, values in rows.items()}
    return views.pop("factor"), views

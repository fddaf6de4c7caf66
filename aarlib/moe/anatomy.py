"""Finds the parts of a model that aarlib touches, by the family table, and checks that they are what the table says."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aarlib.moe.families import Family, family_of


@dataclass(frozen=True)
class LayerAnatomy:
    """One decoder layer. `attention` is None where there are no attention weights; the MoE parts are None on a dense layer."""

    index: int
    layer: nn.Module
    attention: nn.Module | None
    linear_attention: nn.Module | None
    attention_norm: nn.Module
    moe_norm: nn.Module
    block: nn.Module | None
    router: nn.Module | None
    experts: nn.Module | None
    shared_expert: nn.Module | None
    shared_expert_gate: nn.Module | None
    output_projection: nn.Module
    """From the heads of `attention` or `linear_attention` to the residual stream."""
    dense_mlp: nn.Module | None
    """Where there is no router."""


@dataclass(frozen=True)
class Anatomy:
    family: Family
    config: Any
    decoder: nn.Module
    output_embedding: nn.Module | None
    layers: tuple[LayerAnatomy, ...]
    hidden_size: int
    num_experts: int
    top_k: int
    renormalises: bool

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.router is not None)

    @property
    def aar_layers(self) -> tuple[int, ...]:
        """MoE layers whose attention has weights: where AAR can be attached."""
        return tuple(layer.index for layer in self.layers if layer.router is not None and layer.attention is not None)

    @property
    def sliding_range(self) -> int | None:
        """Tokens that a query sees on sliding-attention layers; None where there are none."""
        types = getattr(self.config, "layer_types", None)
        if types is not None and "sliding_attention" not in types:
            return None
        return getattr(self.config, "sliding_window", None) or None

    def moe_layer(self, index: int) -> LayerAnatomy:
        """The layer at `index`; a ValueError names the MoE layers where it has no router."""
        if index not in self.moe_layers:
            raise ValueError(
                f"layers: layer {index} has no router; MoE layers of this model: {_ranges(self.moe_layers)}"
            )
        return self.layers[index]


def anatomy(model: nn.Module, family: Family | None = None) -> Anatomy:
    """Locate layers, routers, experts, attention and norms of a Hugging Face causal MoE model.

    `family` is a row of your own for a family that is not in the table. Raises ValueError on an unknown family, on a quantised
    model, or where the model does not have what its row says.
    """
    model_config: Any = model.config
    check_not_quantised(model_config, model_config.name_or_path or model_config.model_type)
    config = model_config.get_text_config()
    family = family or family_of(config.model_type)
    decoder = model.get_decoder()  # pyright: ignore[reportCallIssue]
    layers = tuple(_layer_anatomy(index, layer, family) for index, layer in enumerate(decoder.layers))
    routers = [layer.router for layer in layers if layer.router is not None]
    if not routers:
        raise ValueError(
            f"no decoder layer of this {config.model_type} model has a router at {family.block}.{family.router}"
        )
    num_experts, hidden_size = (int(size) for size in _shape(routers[0].get_parameter("weight")))
    if hidden_size != config.hidden_size:
        raise ValueError(f"router weight is [{num_experts}, {hidden_size}], but hidden_size = {config.hidden_size}")
    top_k = int(config.num_experts_per_tok)
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"num_experts_per_tok = {top_k} with {num_experts} experts; the config and the weights disagree"
        )
    renormalises = family.renormalises == "always" or (
        family.renormalises == "config" and bool(getattr(config, "norm_topk_prob", False))
    )
    output = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    return Anatomy(family, config, decoder, output, layers, hidden_size, num_experts, top_k, renormalises)


def check_not_quantised(config: Any, name: str) -> None:
    """Also for a model that the user loaded."""
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return
    values = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    method = values.get("quant_method", "unknown method")
    raise ValueError(
        f"model {name!r} is quantised ({getattr(method, 'value', method)}): routing gradients through quantised "
        "experts are not supported; use a bfloat16 checkpoint"
    )


def active_parameters(model: nn.Module, family: Family | None = None) -> int:
    """Parameters that a token's forward multiplies with: K of E experts, no look-up of embeddings."""
    parts = anatomy(model, family)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(
        parameter.numel() for layer in parts.layers if layer.experts for parameter in layer.experts.parameters()
    )
    embeddings = model.get_input_embeddings().weight.numel()  # pyright: ignore[reportCallIssue]
    return total - embeddings - experts + experts * parts.top_k // parts.num_experts


def _layer_anatomy(index: int, layer: nn.Module, family: Family) -> LayerAnatomy:
    block = getattr(layer, family.block, None)
    router = getattr(block, family.router, None)
    # Dense layers of Qwen-like MLPs have a `gate_proj`, never a module at the router's name with a [E, D] weight.
    is_moe = isinstance(router, nn.Module) and isinstance(getattr(block, family.experts, None), nn.Module)
    if not is_moe:
        block = router = None
    elif family.router_bias is not None and getattr(router, family.router_bias, None) is None:
        raise ValueError(f"layer {index}: the router has no parameter {family.router_bias!r} that its family row names")

    def part(owner: nn.Module | None, name: str | None) -> Any:
        return getattr(owner, name, None) if owner is not None and name is not None else None

    attention, linear = part(layer, family.attention), part(layer, family.linear_attention)
    if attention is None and linear is None:
        raise ValueError(f"layer {index} has no attention module at {family.attention!r}")
    output = part(attention, family.attention_output) or part(linear, family.linear_attention_output)
    if output is None:
        raise ValueError(
            f"layer {index}: the attention module has no {family.attention_output!r}, its output projection"
        )
    attention_norm, moe_norm = part(layer, family.attention_norm), part(layer, family.moe_norm)
    if attention_norm is None or moe_norm is None:
        raise ValueError(f"layer {index} lacks norm {family.attention_norm!r} or {family.moe_norm!r}")
    return LayerAnatomy(
        index,
        layer,
        attention,
        linear,
        attention_norm,
        moe_norm,
        block,
        router,
        part(block, family.experts),
        part(block, family.shared_expert),
        part(block, family.shared_expert_gate),
        output,
        getattr(layer, family.block, None) if block is None else None,
    )


def _shape(weight: torch.Tensor) -> tuple[int, ...]:
    """The whole shape of a parameter, also where ZeRO-3 holds only a part of it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _ranges(layers: tuple[int, ...]) -> str:
    return ", ".join(str(layer) for layer in layers) or "none"

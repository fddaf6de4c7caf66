"""The plain way, written without aarlib: one document at a time, eager attention, a loop over its tokens.

Windows and sink mass are cut from the attention weights that the stock model's eager attention returns; the router's formula
(DESIGN 2.2) and each family's selection rule are written out here. Differentiable, so that autograd gives the gradients.
"""

import cmath
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Observed(NamedTuple):
    """One document of S tokens; dicts by layer."""

    windows: dict[int, Tensor]  # [S, M]
    sink: dict[int, Tensor]  # [S], weight on the document's first token
    router_logits: dict[int, Tensor]  # [S, E]
    logits: Tensor  # [S, V]


class Reference:
    """A stock model in eager attention whose routers are replaced by hooks; `parameters[layer]` holds their tensors.

    Names of the tensors: weight, bias, and per view attention_<view>, gate_<view>.
    """

    def __init__(self, model: Any, parameters: Mapping[int, Mapping[str, Tensor]], window: int) -> None:
        self.model, self.parameters, self.window = model, parameters, window
        self.config = model.config.get_text_config()
        model.set_attn_implementation("eager")
        for index, layer in enumerate(model.get_decoder().layers):
            attention, router = getattr(layer, "self_attn", None), getattr(layer.mlp, "router", None)
            router = getattr(layer.mlp, "gate", None) if router is None else router
            if attention is not None:
                attention.register_forward_hook(self._attention_hook(index))
            if router is not None and index in parameters:
                router.register_forward_hook(self._router_hook(index))

    def observe(self, document: Tensor, embeddings: Tensor | None = None) -> Observed:
        """Run one document [S] alone, without cache, mask or padding."""
        self.windows: dict[int, Tensor] = {}
        self.sink: dict[int, Tensor] = {}
        self.router_logits: dict[int, Tensor] = {}
        tokens = {"input_ids": document[None]} if embeddings is None else {"inputs_embeds": embeddings[None]}
        logits = self.model(**tokens, use_cache=False).logits[0]
        return Observed(self.windows, self.sink, self.router_logits, logits)

    def _attention_hook(self, layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            weights = output[1][0]  # [H, S, S]
            mean = sum(weights[head] for head in range(weights.shape[0])) / weights.shape[0]
            rows, zero = [], mean.new_zeros(())
            for token in range(mean.shape[0]):
                columns = range(token - self.window + 1, token + 1)
                rows.append(torch.stack([mean[token, column] if column >= 0 else zero for column in columns]))
            self.windows[layer] = torch.stack(rows)
            self.sink[layer] = mean[:, 0]

        return hook

    def _router_hook(self, layer: int) -> Any:
        def hook(_: Any, inputs: Any, __: Any) -> Any:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            parameters = self.parameters[layer]
            rows = []
            for token in range(hidden.shape[0]):
                window = self.windows[layer][token] if "attention_time" in parameters else None
                rows.append(router_logits(parameters, hidden[token], window))
            logits = torch.stack(rows)
            self.router_logits[layer] = logits
            return logits, *select(self.config, logits)

        return hook


def router_logits(parameters: Mapping[str, Tensor], hidden: Tensor, window: Tensor | None) -> Tensor:
    """[E] logits of one token: (1 - mean alpha) g_std + mean(alpha g_v) over the views."""
    standard = parameters["weight"] @ hidden
    if parameters.get("bias") is not None:
        standard = standard + parameters["bias"]
    if window is None:
        return standard
    alphas, gated = [], []
    for view in ("time", "spectrum"):
        features = window if view == "time" else spectrum(window)
        alpha = torch.sigmoid(parameters[f"gate_{view}"] @ torch.cat([hidden, features]))
        alphas.append(alpha)
        gated.append(alpha * (parameters[f"attention_{view}"].T @ features))
    return (1 - sum(alphas) / 2) * standard + sum(gated) / 2


def spectrum(window: Tensor) -> Tensor:
    """log(1 + |DFT|), the sum over the window written out."""
    size, bins = window.shape[0], []
    for k in range(size // 2 + 1):
        turns = [cmath.exp(-2j * math.pi * k * n / size) for n in range(size)]
        real = (window * torch.tensor([turn.real for turn in turns])).sum()
        imaginary = (window * torch.tensor([turn.imag for turn in turns])).sum()
        bins.append(torch.log(1 + torch.complex(real, imaginary).abs()))
    return torch.stack(bins)


def select(config: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, expert ids) [T, K] by the rule of the family's paper."""
    if config.model_type == "gpt_oss":
        top, ids = logits.topk(config.num_experts_per_tok, dim=-1)
        return top.softmax(-1), ids
    weights, ids = logits.softmax(-1).topk(config.num_experts_per_tok, dim=-1)
    if config.model_type == "deepseek_v2":
        return weights * config.routed_scaling_factor, ids
    always = config.model_type in ("mixtral", "qwen3_5_moe_text")
    if always or getattr(config, "norm_topk_prob", False):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids

"""The nano model: a small OLMoE, made from its configuration; and with AAR attached, where that is there from the start."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.nano.config import NanoModelConfig, PretrainConfig
from aarlib.nano.tokenizer import special_ids


def build_model(config: NanoModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> OlmoeForCausalLM:
    """Randomly initialised, float32."""
    special = special_ids(tokenizer)
    geometry = OlmoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_expert,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        num_experts=config.num_experts,
        num_experts_per_tok=config.top_k,
        norm_topk_prob=False,
        max_position_embeddings=config.context,
        initializer_range=config.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=special.bos,
        eos_token_id=special.eos,
        pad_token_id=special.pad,
    )
    torch.manual_seed(seed)
    return OlmoeForCausalLM(geometry)


class Network(NamedTuple):
    """What pre-training trains. With AAR the handle owns every router's weights; the model's own are no part of it."""

    model: OlmoeForCausalLM
    handle: RoutingHandle | None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.model.named_parameters())
        if self.handle is None:
            return named
        replaced = {f"model.layers.{layer}.mlp.gate.weight" for layer in self.handle.routers}
        kept = {name: parameter for name, parameter in named.items() if name not in replaced}
        return kept | {f"aar.{name}": parameter for name, parameter in self.handle.trainable()}

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach().contiguous() for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """ValueError unless `state` has exactly these tensors."""
        named = self.named_parameters()
        if differing := sorted(state.keys() ^ named.keys()):
            raise ValueError(f"the checkpoint is of another network: {differing[:3]}; start a run under another name")
        for name, parameter in named.items():
            parameter.copy_(state[name])

    @torch.no_grad()
    def write_routers(self) -> None:
        """Copy the handle's standard router weights into the model, for the folder that is saved."""
        if self.handle is not None:
            for layer, router in self.handle.routers.items():
                self.model.get_parameter(f"model.layers.{layer}.mlp.gate.weight").copy_(router.weight)


def build_network(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> Network:
    model = build_model(config.model, tokenizer, config.seed)
    torch.nn.Module.to(model, config.device)
    return Network(model, None if config.aar is None else attach_aar(model, config.aar, config.seed))

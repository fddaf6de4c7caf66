"""The nano model: a small OLMoE, made from its configuration and kept as one Hugging Face folder."""

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from aarlib.nano.config import NanoModelConfig
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

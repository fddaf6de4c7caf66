"""Tiny random models of all eight families: 2-4 layers, 8 experts, float32, CPU. Built once per family."""

import copy
from functools import cache
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}

SPECIFIC: dict[str, dict[str, Any]] = {
    "olmoe": {"model_type": "olmoe", "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3},
    "flex_olmo": {"model_type": "flex_olmo", "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [0],
        "num_hidden_layers": 4,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
    "mixtral": {
        "model_type": "mixtral",
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": None,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "routed_scaling_factor": 1.7,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}

FAMILIES = tuple(SPECIFIC)


def tiny_config(family: str, **overrides: Any) -> Any:
    values = {**COMMON, **SPECIFIC[family], **overrides}
    return AutoConfig.for_model(values.pop("model_type"), **values)


@cache
def _built(family: str, overrides: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(0)
    implementation = "eager" if family == "gpt_oss" else "sdpa"
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **dict(overrides)), attn_implementation=implementation, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centred = "norm" in name and parameter.dim() == 1
            noise = torch.randn(parameter.shape, generator=generator) * (0.1 if centred else 0.2)
            parameter.copy_(parameter + noise if centred else noise)
    model.eval()
    model.requires_grad_(False)
    model.set_experts_implementation("eager")
    return model


def tiny_model(family: str, **overrides: Any) -> Any:
    """A fresh copy of the family's tiny model; every weight is random at a scale that makes routing and attention uneven."""
    return copy.deepcopy(_built(family, tuple(sorted(overrides.items()))))


def tiny_inputs(
    model: Any, batch: int = 2, length: int = 24, padding: Literal["none", "left", "right"] = "none", seed: int = 0
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [batch, length]; with padding, row r has 5 r pads (row 0 none)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        for row in range(batch):
            pads = min(5 * row, length - 2)
            where = slice(0, pads) if padding == "left" else slice(length - pads, length)
            mask[row, where], ids[row, where] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}

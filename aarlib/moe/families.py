"""The table of supported model families: names and conventions, as data. The only place that knows family names.

`docs/adding_a_family.md` shows how to pass a row of your own as `family=`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """How one Hugging Face MoE family names and arranges what aarlib touches.

    Attribute names are relative to the module that holds them: `block` to the decoder layer, the rest of the MoE part to the
    block, norms and attention to the decoder layer.
    """

    model_types: tuple[str, ...]
    block: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    shared_expert: str | None = None
    shared_expert_gate: str | None = None
    attention: str = "self_attn"
    linear_attention: str | None = None
    attention_norm: str = "input_layernorm"
    moe_norm: str = "post_attention_layernorm"
    norm_side: Literal["receiver", "sender"] = "receiver"
    """`receiver`: the norm reads the residual stream before a sub-layer; `sender`: it scales the sub-layer's output."""
    zero_centred_norm: bool = False
    """The norm multiplies by 1 + weight."""
    router_bias: str | None = None
    """The router parameter that is a linear bias (a score-correction bias is not one: it belongs to the selection rule)."""
    renormalises: Literal["always", "never", "config"] = "config"
    """Whether the selected weights are renormalised to sum to 1; `config`: by norm_topk_prob."""
    weights_dtype: Literal["input", "float32"] = "input"
    """The dtype in which the stock router returns its weights."""
    sinks: str | None = None
    """Per-head attention sink logits on the attention module."""
    masks_from_positions: bool = True
    """Whether the model's own code keeps packed documents apart by position_ids."""
    attention_output: str = "o_proj"
    """The linear map from the heads' outputs, side by side, to the residual stream; on the attention module."""
    linear_attention_output: str = "out_proj"
    output_gate: str | None = None
    """The projection on the attention module whose second half, head by head and through a sigmoid, gates the heads' outputs."""
    norm_eps: str = "variance_epsilon"
    final_norm: str = "norm"
    """On the decoder."""
    experts_layout: Literal["out_in", "in_out"] = "out_in"
    """Of gate_up_proj and down_proj, behind the expert axis; biases are <name>_bias where the experts have them."""
    experts_glu: Literal["halves", "interleaved_clamped"] = "halves"
    """`halves`: act(gate) * up; `interleaved_clamped`: gate and up alternate, clamped, (up + 1) * gate * sigmoid(alpha gate)."""


FAMILIES: tuple[Family, ...] = (
    Family(model_types=("olmoe",)),
    Family(
        model_types=("flex_olmo",),
        attention_norm="post_attention_layernorm",
        moe_norm="post_feedforward_layernorm",
        norm_side="sender",
    ),
    Family(model_types=("qwen2_moe",), shared_expert="shared_expert", shared_expert_gate="shared_expert_gate"),
    Family(model_types=("qwen3_moe",)),
    Family(
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        shared_expert="shared_expert",
        shared_expert_gate="shared_expert_gate",
        linear_attention="linear_attn",
        zero_centred_norm=True,
        renormalises="always",
        output_gate="q_proj",
        norm_eps="eps",
    ),
    Family(model_types=("mixtral",), renormalises="always", weights_dtype="float32"),
    Family(model_types=("deepseek_v2",), shared_expert="shared_experts", renormalises="never", weights_dtype="float32"),
    Family(
        model_types=("gpt_oss",),
        router="router",
        router_bias="bias",
        renormalises="always",
        sinks="sinks",
        masks_from_positions=False,
        experts_layout="in_out",
        experts_glu="interleaved_clamped",
    ),
)


def family_of(model_type: str) -> Family:
    """The table's row for a transformers `model_type`; a ValueError lists the supported ones."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(
        f"model_type = {model_type!r} is not a supported MoE family; supported: {supported}; "
        "to add one, pass family=Family(...) as docs/adding_a_family.md shows"
    )

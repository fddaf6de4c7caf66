"""What a training costs, counted from the model's geometry: floating-point operations, and bytes held, moved and written."""

from typing import NamedTuple

from aarlib.training.config import RunConfig

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
ADAMW_TENSORS = 3
"""The parameter and two moments."""


class Cost(NamedTuple):
    num_parameters: int
    num_active: int
    """Parameters that a token meets: all but the embedding and the experts it does not go to."""
    num_trainable: int
    """Of the largest method."""
    flops_per_token: float
    """Forward, recomputation where activations are checkpointed, input gradients: the frozen base needs no weight gradients, one
    pass of full training. 2 per active parameter and pass; attention scores (1-2% at 512 tokens) are left out."""
    tokens_per_step: int
    """At most: every row full."""
    base_bytes: int
    """The frozen base in bfloat16."""
    gradient_bytes: int
    """Summed over the workers once a step."""
    checkpoint_bytes: int
    gathered_bytes: int
    """What ZeRO-3 sends to every worker for one micro-batch: the base once a pass. 0 on other stages."""


def cost(config: RunConfig) -> Cost:
    from aarlib.moe.anatomy import active_parameters
    from aarlib.moe.loading import load_config, meta_model
    from aarlib.runtime.plan import plan

    model = meta_model(load_config(config.model.name, config.model.revision, config.model.geometry))
    total = sum(parameter.numel() for parameter in model.parameters())
    active = active_parameters(model)
    trainable = max(method.num_trainable for method in plan(config).methods)
    passes = 3 if config.optim.activation_checkpointing else 2
    base_bytes = BFLOAT16_BYTES * total
    return Cost(
        num_parameters=total,
        num_active=active,
        num_trainable=trainable,
        flops_per_token=2.0 * passes * active,
        tokens_per_step=config.optim.global_batch * config.data.sequence_length,
        base_bytes=base_bytes,
        gradient_bytes=FLOAT32_BYTES * trainable,
        checkpoint_bytes=ADAMW_TENSORS * FLOAT32_BYTES * trainable,
        gathered_bytes=passes * base_bytes if config.ray.zero_stage == 3 else 0,
    )

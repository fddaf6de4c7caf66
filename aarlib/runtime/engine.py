"""A DeepSpeed engine over the trained routing parameters only, and one optimizer step of it."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aarlib.moe.anatomy import anatomy
from aarlib.moe.loading import load_model
from aarlib.runtime.batches import num_micro_batches
from aarlib.training.config import ModelConfig, OptimConfig
from aarlib.training.objectives import next_token_ce

BETAS_EPS = 1e-8


class Setup(NamedTuple):
    """What an engine needs to know beside the model."""

    optim: OptimConfig
    zero_stage: int
    rank: int
    world_size: int
    total_steps: int
    persistence_threshold: int | None = None
    """Under ZeRO-3, tensors of fewer elements stay whole on every worker; None: DeepSpeed's default."""

    @property
    def num_micro_batches(self) -> int:
        """Of a full global batch; a step may take fewer (packing, the short batch that ends an epoch)."""
        return num_micro_batches(self.optim.global_batch, self.world_size, self.optim.micro_batch)


class StepStats(NamedTuple):
    sums: dict[str, float]
    """Per loss term, the sum over this worker's targets."""
    grad_norm: float
    """Of the global mean gradient, before clipping."""
    learning_rate: float


class Trainee(nn.Module):
    """The frozen model and the trained routers as one module, so that ZeRO-3 and hooks see every parameter.

    `model` and `trained` share no parameter: the routers stand around the model's own, which keep their weights. Everything
    is in eval mode (no dropout, no router jitter), but for what `checkpoint_activations` sets.
    """

    def __init__(self, model: nn.Module, handle: Any, method: Any) -> None:
        super().__init__()
        self.model = model
        self.trained = handle.module
        self.method = method
        self.training = False
        self.trained.eval()

    def forward(self, batch: dict[str, Tensor], step: int | None = None) -> dict[str, Tensor]:
        """Sums of the method's loss terms; with step = None, `ce_sum_B` and `num_targets_B` of each row."""
        if step is None:
            ce_sum_B, num_targets_B = next_token_ce(self.model, batch)
            return {"ce_sum_B": ce_sum_B, "num_targets_B": num_targets_B}
        return {name: term.sum for name, term in self.method.loss(self.model, batch, step).items()}


def deepspeed_config(setup: Setup) -> dict[str, Any]:
    """No mixed-precision section: the base keeps its dtype, the trained parameters are float32."""
    zero: dict[str, Any] = {"stage": setup.zero_stage}
    if setup.persistence_threshold is not None:
        zero["stage3_param_persistence_threshold"] = setup.persistence_threshold
    return {
        "train_micro_batch_size_per_gpu": setup.optim.micro_batch,
        "gradient_accumulation_steps": setup.num_micro_batches,
        "gradient_clipping": setup.optim.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }


def load_base(config: ModelConfig, setup: Setup, device: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer) on `device`; ZeRO-3 partitions the base while it is read: no worker ever holds it whole."""
    arguments: dict[str, Any] = {"experts_implementation": config.experts_implementation}
    if setup.zero_stage != 3:
        return load_model(config.name, config.revision, config.dtype, device=device, **arguments)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    if device.type == "cpu":
        skip_shared_memory_build()
    partitioning = HfDeepSpeedConfig(deepspeed_config(setup))
    loaded = load_model(config.name, config.revision, config.dtype, **arguments)
    del partitioning
    return loaded


def skip_shared_memory_build() -> None:
    """Keep deepspeed.initialize from compiling its shared-memory all-reduce for CPUs (minutes); gloo does the same work.

    Internal to DeepSpeed, so tests/runtime/test_engine.py guards it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_engine(trainee: Trainee, setup: Setup) -> Any:
    """The engine; optimizer: torch's AdamW over the parameters that require gradients."""
    import deepspeed

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        skip_shared_memory_build()
    if setup.zero_stage == 3:
        fetch_experts_whole(trainee.model)
    parameters = [parameter for parameter in trainee.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=setup.optim.learning_rate,
        betas=setup.optim.betas,
        eps=BETAS_EPS,
        weight_decay=setup.optim.weight_decay,
    )
    engine, *_ = deepspeed.initialize(model=trainee, optimizer=optimizer, config=deepspeed_config(setup))
    return engine


def check_device(engine: Any, device: torch.device) -> None:
    """A ValueError where DeepSpeed works on another device than the one the model was put on."""
    if engine.device != device:
        raise ValueError(
            f"ray.use_gpu: DeepSpeed works on {engine.device}, the model is on {device}; unset DS_ACCELERATOR and LOCAL_RANK "
            "in the workers' environment"
        )


def fetch_experts_whole(model: nn.Module) -> None:
    """ZeRO-3 fetches an experts module at once: which experts run, and so which of its parts, differs between workers."""
    from deepspeed.utils import set_z3_leaf_module

    for layer in anatomy(model).layers:
        if layer.experts is not None:
            set_z3_leaf_module(layer.experts, True)


def learning_rate(setup: Setup, step: int) -> float:
    """Linear warm-up over the first `warmup_ratio` of the steps, then linear decay to 0; `step` counts from 0."""
    warmup = round(setup.optim.warmup_ratio * setup.total_steps)
    rising = (step + 1) / (warmup + 1)
    falling = (setup.total_steps - step) / max(1, setup.total_steps - warmup)
    return setup.optim.learning_rate * (rising if step < warmup else falling)


def train_step(
    engine: Any, batches: Sequence[dict[str, Tensor]], num_targets: int, step: int, setup: Setup
) -> StepStats:
    """One optimizer step on this worker's micro-batches; the loss is the sum over all workers divided by `num_targets`.

    DeepSpeed averages over workers and the micro-batches of a full step, so each sum is scaled by their number, however many
    `batches` there are. A ValueError, the same on every worker, where the global batch has no target.
    """
    if num_targets == 0:
        raise ValueError(
            f"step {step}: no row of the global batch has a target token; raise optim.global_batch or data.sequence_length"
        )
    scale = setup.world_size * setup.num_micro_batches / num_targets
    lr = learning_rate(setup, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    sums: dict[str, Tensor] = {}
    norm = 0.0
    for index, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
        terms = engine(batch, step)
        engine.backward(sum(terms.values()) * scale)
        for name, value in terms.items():
            sums[name] = sums.get(name, 0.0) + value.detach()
        if setup.zero_stage == 0 and index == len(batches) - 1:
            norm = gradient_norm(engine.module.trained.parameters())
            _check_finite(norm, step)
        engine.step()
    if setup.zero_stage > 0:
        norm = float(engine.get_global_grad_norm())
        _check_finite(norm, step)
    return StepStats({name: float(value) for name, value in sums.items()}, norm, lr)


def _check_finite(norm: float, step: int) -> None:
    if not math.isfinite(norm):
        raise ValueError(
            f"step {step}: the gradient norm is {norm}; lower optim.learning_rate or set optim.max_grad_norm"
        )


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    norms = [parameter.grad.float().norm() for parameter in parameters if parameter.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def checkpoint_activations(model: Any) -> None:
    """Recompute each decoder layer in the backward pass.

    transformers does so in training mode only; the frozen model stays in eval() (no dropout, no router jitter), so the
    mode is set on the layers themselves and not on what they contain.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"optim.activation_checkpointing: {type(model).__name__} has no layers that can be checkpointed"
        )
    for layer in layers:
        layer.training = True

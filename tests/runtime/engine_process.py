"""What test_engine runs in two gloo processes, one start-up for all of it."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aarlib.data.chat import Encoded, collate
from aarlib.moe.anatomy import anatomy
from aarlib.moe.loading import load_tokenizer
from aarlib.runtime.batches import micro_batches
from aarlib.runtime.checkpoints import (
    TrainingState,
    capture,
    latest_state,
    restore_optimizer,
    restore_parameters,
    save_state,
    whole_values,
)
from aarlib.runtime.engine import (
    Setup,
    StepStats,
    Trainee,
    check_device,
    checkpoint_activations,
    load_base,
    make_engine,
    train_step,
)
from aarlib.runtime.session import from_all_workers
from aarlib.runtime.sharding import frozen_hash, gathered
from aarlib.training.adapter import fingerprint, save_adapter
from aarlib.training.config import ModelConfig
from aarlib.training.methods import build_method
from tests.runtime.plain_pytorch import METHOD, OPTIM, RESUME_AT, STEPS, batches, own_experts, shares
from tests.tiny import tiny_model


class Training:
    """One engine on this process's share."""

    def __init__(
        self, model: Any, zero_stage: int, state: TrainingState | None = None, persistence_threshold: int | None = None
    ) -> None:
        self.setup = Setup(OPTIM, zero_stage, dist.get_rank(), dist.get_world_size(), STEPS, persistence_threshold)
        method = build_method(METHOD, 0)
        routers = [layer.router for layer in anatomy(model).layers if layer.router is not None]
        with gathered([parameter for router in routers for parameter in router.parameters()]):
            self.handle = method.attach(model)
        self.named = self.handle.trainable()
        if state is not None:
            restore_parameters(self.named, state.tensors)
        self.engine = make_engine(Trainee(model, self.handle, method), self.setup)
        if state is not None:
            restore_optimizer(self.engine, self.named, state, zero_stage, self.idle_step)

    def steps(self, first: int, last: int) -> list[StepStats]:
        stats = []
        for step in range(first, last):
            rows = batches()[step]
            count = sum(row.num_targets for row in rows)
            stats.append(train_step(self.engine, self.mine(rows), count, step, self.setup))
        return stats

    def mine(self, rows: list[Encoded]) -> list[dict[str, Tensor]]:
        parts = micro_batches(rows, self.setup.rank, self.setup.world_size, 2)
        return [collate(part, 0) for part in parts]

    def idle_step(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 0.0
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(sum(self.engine(self.mine(batches()[0])[0], 0).values()) * 0.0)
        self.engine.step()

    def close(self) -> dict[str, Tensor]:
        values = whole_values(self.named)
        self.engine.destroy()
        self.handle.detach()
        return values


def join(rank: int, world_size: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=5))


def process(rank: int, world_size: int, port: int, folder: str) -> None:
    join(rank, world_size, port)
    found: dict[str, Any] = {"targets": [[sum(r.num_targets for r in p) for p in shares(rows)] for rows in batches()]}
    model = tiny_model("olmoe")
    before = frozen_hash(model)
    for stage in (0, 1, 2, 3):
        found[f"zero{stage}"] = _stage(model, stage, Path(folder))
        found[f"hash{stage}"] = (before, frozen_hash(model))
        found[f"flipped{stage}"] = _flipped(model)
        found[f"fingerprint{stage}"] = fingerprint(model, gathered)
    for stage in (0, 3):
        found[f"checkpointed{stage}"] = _checkpointed(stage)
    for stage in (0, 1, 2, 3):
        found[f"bfloat16/{stage}"] = _bfloat16(stage)
    found["partitioned"] = _partitioned(Path(folder))
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def _stage(model: Any, stage: int, folder: Path) -> dict[str, Any]:
    whole = Training(model, stage)
    made = {
        "in_training_mode": [name for name, module in whole.engine.module.named_modules() if module.training],
        "only_trainable": _optimised(whole.engine, stage) == {id(parameter) for _, parameter in whole.named},
        "on_meta": _device_error(whole.engine, "meta"),
        "on_cpu": _device_error(whole.engine, "cpu"),
    }
    stats = whole.steps(0, RESUME_AT)
    tensors = capture(whole.engine, whole.named, stage)
    if dist.get_rank() == 0:
        save_state(folder / str(stage), TrainingState("aar-seed0", RESUME_AT, 100, 1.5, tensors))
    dist.barrier()
    stats += whole.steps(RESUME_AT, STEPS)
    values = whole.close()
    resumed = Training(model, stage, latest_state(folder / str(stage)))
    resumed.steps(RESUME_AT, STEPS)
    errors = {}
    try:
        train_step(resumed.engine, resumed.mine(batches()[0]), 0, 7, resumed.setup)
    except ValueError as error:
        errors[dist.get_rank()] = str(error)
    everyone = from_all_workers(errors)
    ce_sums = [sum(sums) for sums in zip(*from_all_workers([step.sums["ce"] for step in stats]), strict=True)]
    found = {"norms": [step.grad_norm for step in stats], "ce_sums": ce_sums, "errors": everyone, "made": made}
    return {**found, "values": values, "resumed": resumed.close()}


def _optimised(engine: Any, stage: int) -> set[int]:
    """Of the parameters whose values the optimizer's step changes."""
    optimizer = engine.optimizer
    groups = {
        0: lambda: [group["params"] for group in optimizer.param_groups],
        1: lambda: optimizer.bit16_groups,
        2: lambda: optimizer.bit16_groups,
        3: lambda: optimizer.fp16_groups,
    }[stage]()
    return {id(parameter) for group in groups for parameter in group}


def _device_error(engine: Any, device: str) -> str | None:
    try:
        check_device(engine, torch.device(device))
    except ValueError as error:
        return str(error)
    return None


def _checkpointed(stage: int) -> dict[str, Any]:
    """The whole training with recomputed activations, and how often a layer ran."""
    model = tiny_model("olmoe")
    checkpoint_activations(model)
    training = Training(model, stage)
    runs = [0]
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    training.steps(0, STEPS)
    hook.remove()
    modes = [name for name, module in model.named_modules() if module.training]
    return {"values": training.close(), "runs": runs[0], "in_training_mode": modes}


def _bfloat16(stage: int) -> dict[str, Any]:
    """Two steps on a bfloat16 base; in the first each rank's tokens go to experts that the other's do not use."""
    model = tiny_model("olmoe").to(torch.bfloat16)
    before = frozen_hash(model)
    training = Training(model, stage)
    start = whole_values(training.named)
    with own_experts(model, dist.get_rank()):
        stats = training.steps(0, 1)
    stats += training.steps(1, 2)
    everyone = from_all_workers(training.close())
    norms = [step.grad_norm for step in stats]
    return {"start": start, "values": everyone, "norms": norms, "hash": (before, frozen_hash(model))}


def _partitioned(folder: Path) -> dict[str, Any]:
    """ZeRO-3 from a saved model, nothing kept whole: what each worker holds, what was read, and the training."""
    path = folder / "saved"
    if dist.get_rank() == 0:
        model = tiny_model("olmoe")
        model.save_pretrained(path, max_shard_size="20KB")
        load_tokenizer("nano").save_pretrained(path)
    dist.barrier()
    setup = Setup(OPTIM, 3, dist.get_rank(), dist.get_world_size(), STEPS, persistence_threshold=0)
    config = ModelConfig(name=str(path), dtype="float32", experts_implementation="eager")
    model, _ = load_base(config, setup, torch.device("cpu"))
    held = {name: parameter.numel() for name, parameter in model.named_parameters()}
    loaded = frozen_hash(model)
    training = Training(model, 3, persistence_threshold=0)
    held_trained = {name: parameter.numel() for name, parameter in training.named}
    training.steps(0, RESUME_AT)
    tensors = capture(training.engine, training.named, 3)
    if dist.get_rank() == 0:
        save_state(folder / "partitioned", TrainingState("aar-seed0", RESUME_AT, 100, 1.5, tensors))
    dist.barrier()
    training.steps(RESUME_AT, STEPS)
    base = fingerprint(model, gathered)
    with gathered([parameter for _, parameter in training.named]):
        if dist.get_rank() == 0:
            save_adapter(training.handle, folder / "adapter", metadata={}, base_fingerprint=base)
    found = {"held": held, "held_trained": held_trained, "hash": (loaded, frozen_hash(model)), "fingerprint": base}
    values = training.close()
    resumed = Training(model, 3, latest_state(folder / "partitioned"), persistence_threshold=0)
    resumed.steps(RESUME_AT, STEPS)
    return {**found, "values": values, "resumed": resumed.close()}


def other_number(rank: int, world_size: int, port: int, folder: str) -> None:
    """Goes on from what two workers saved half way, at every stage, with as many workers as `world_size`."""
    join(rank, world_size, port)
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        resumed = Training(tiny_model("olmoe"), stage, latest_state(Path(folder) / str(stage)))
        resumed.steps(RESUME_AT, STEPS)
        found[f"zero{stage}"] = resumed.close()
    if rank == 0:
        torch.save(found, Path(folder) / f"resumed_by_{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _flipped(model: Any) -> str:
    """The hash with the sign of one element of the last expert tensor flipped, which is then put back."""
    import deepspeed

    parameter = dict(model.named_parameters())["model.layers.1.mlp.experts.down_proj"]

    def flip() -> None:
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.view(-1)[-1].neg_()
        else:
            parameter.data.view(-1)[-1].neg_()

    flip()
    changed = frozen_hash(model)
    flip()
    return changed

"""What the driver hands to the workers, and what a worker keeps from run to run."""

import logging
import resource
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
import torch
import torch.distributed as dist
from torch import Tensor

from aarlib.data.chat import Encoded, collate
from aarlib.data.packing import collate_packed, pack
from aarlib.runtime.batches import GlobalBatch, global_batches, micro_batches, steps_per_epoch
from aarlib.runtime.checkpoints import TrainingState, save_state
from aarlib.runtime.engine import Setup
from aarlib.runtime.tracking import Tracking
from aarlib.training.config import RunConfig

logger = logging.getLogger("aarlib")


class Job(NamedTuple):
    """What the driver hands to the workers; picklable, without models or tokenizers."""

    config: dict[str, Any]
    token: str
    """By which the driver's run directory is recognised, and what the group writes."""
    tracking: Tracking
    num_train: int


class Session(NamedTuple):
    """What a worker keeps from run to run."""

    config: RunConfig
    folder: Path
    """The run directory on this node. Rank 0 alone reads and writes it; the others may keep scratch files in it."""
    push: Callable[[], object]
    """See aarlib.runtime.writer; of rank 0."""
    tracking: Tracking
    num_train: int
    rank: int
    world_size: int
    device: torch.device
    model: Any
    tokenizer: Any
    held_out_parts: list[list[Encoded]]
    frozen: str
    """Hash of the base as loaded."""

    def setup(self) -> Setup:
        optim = self.config.optim
        return Setup(
            optim, self.config.ray.zero_stage, self.rank, self.world_size, total_steps(self.config, self.num_train)
        )

    def batch(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        pad = self.tokenizer.pad_token_id
        packed = any(row.documents for row in rows)
        make = collate_packed if packed else collate
        tensors = make(rows, 0 if pad is None else pad, sequence_length=self.config.data.sequence_length)
        if all(row.unit >= 0 for row in rows):
            tensors["unit"] = torch.tensor([row.unit for row in rows])
            tensors["num_domains"] = torch.tensor(len(self.config.data.domains))
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}

    def share(self, rows: Sequence[Encoded]) -> list[list[Encoded]]:
        """This worker's micro-batches of a global batch; no micro-batch crosses from one unit of rows to the next."""
        data = self.config.data
        rows = pack(rows, data.sequence_length) if data.packing else rows
        units = [list(unit) for _, unit in groupby(rows, key=lambda row: row.unit)]
        micro_batch = self.config.optim.micro_batch
        return [part for unit in units for part in micro_batches(unit, self.rank, self.world_size, micro_batch)]

    def batches(self, seed: int, start: int) -> Iterator[GlobalBatch]:
        """The global batches of a seed, from step `start` on."""
        per_epoch = steps_per_epoch(self.num_train, self.config.optim.global_batch)
        for epoch in range(start // per_epoch, self.config.optim.epochs):
            shard = ray.train.get_dataset_shard(dataset_name(seed, epoch))
            assert shard is not None
            yield from global_batches(shard, self.config.optim.global_batch, skip=max(0, start - epoch * per_epoch))


def dataset_name(seed: int, epoch: int) -> str:
    return f"train-seed{seed}-epoch{epoch}"


def total_steps(config: RunConfig, num_train: int) -> int:
    steps = config.optim.epochs * steps_per_epoch(num_train, config.optim.global_batch)
    return steps if config.optim.max_steps is None else min(steps, config.optim.max_steps)


def epochs_needed(config: RunConfig, num_train: int) -> int:
    """Epochs that a run reaches before max_steps."""
    per_epoch = steps_per_epoch(num_train, config.optim.global_batch)
    return -(-total_steps(config, num_train) // per_epoch)


def save_checkpoint(session: Session, state: TrainingState, metrics: dict[str, Any]) -> None:
    """Called by every worker: rank 0 writes, then all report, so that Ray Tune sees the metrics."""
    if session.rank == 0:
        save_state(session.folder / state.run, state)
        session.push()
    ray.train.report(metrics)


def peak_gib(device: torch.device) -> float:
    """Largest resident set of this process so far; on a GPU, of its allocated memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def sum_over_workers(value: Tensor, device: torch.device) -> Tensor:
    """The sum, on the CPU, the same on every worker."""
    value = value.to(device, copy=True)
    dist.all_reduce(value)
    return value.cpu()


def from_rank_0(session: Session, make: Callable[[], Any]) -> Any:
    """What `make` gives on rank 0, on every worker: the others may not see the run directory."""
    value: list[Any] = [make() if session.rank == 0 else None]
    dist.broadcast_object_list(value, src=0)
    return value[0]


def from_all_workers(value: Any) -> list[Any]:
    """Every worker's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""The loop of every Ray Train worker: load the model once, then train the pending (method, seed) runs one after the other."""

import json
import logging
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import transformers

from aarlib.runtime import held_out
from aarlib.runtime.checkpoints import TrainingState, latest_state
from aarlib.runtime.corpus import quiet_ray_data
from aarlib.runtime.engine import Setup, checkpoint_activations, load_base
from aarlib.runtime.population import Pending, groups
from aarlib.runtime.run_directory import append_line, pending_runs, run_directory
from aarlib.runtime.session import Job, Session, from_rank_0
from aarlib.runtime.sharding import frozen_hash
from aarlib.runtime.training_run import train_runs
from aarlib.runtime.writer import Writer, writer
from aarlib.training.adapter import load_adapter
from aarlib.training.config import Run, RunConfig

logger = logging.getLogger("aarlib")

STARTS = "starts.jsonl"
"""In the run directory: a line whenever a worker group begins, for the first time or after a failure."""


def train_worker(job: dict[str, Any]) -> None:
    """The loop Ray Train runs in every worker; `job` holds the fields of `Job`."""
    fields = Job(**job)
    config = RunConfig.from_mapping(fields.config)
    is_writer = ray.train.get_context().get_world_rank() == 0
    elsewhere = nullcontext(Writer(run_directory(config), lambda: None))
    with writer(config.ray.storage, config.name, fields.token) if is_writer else elsewhere as place:
        _train_pending(_open(config, fields, place))


def _train_pending(session: Session) -> None:
    runs = from_rank_0(session, lambda: pending_runs(session.folder, session.config))
    pending = [Pending(run, _resume_state(session, run)) for run in runs]
    for group in groups(pending, session.config.optim.population):
        train_runs(session, group)
        for run, _ in group:
            scores = from_rank_0(session, partial(_scores, session.folder, run))
            ray.train.report({"finished": run.name, **scores})


def _open(config: RunConfig, job: Job, place: Writer) -> Session:
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(config.ray.threads_per_worker)
    log_to_stderr(rank)
    device = ray.train.torch.get_device()
    started = time.monotonic()
    setup = Setup(config.optim, config.ray.zero_stage, rank, world_size, 1)
    model, tokenizer = load_base(config.model, setup, device)
    if config.model.adapter is not None:
        load_adapter(model, config.model.adapter)
    if config.optim.activation_checkpointing:
        checkpoint_activations(model)
    shard = ray.train.get_dataset_shard("held_out")
    assert shard is not None
    parts = held_out.my_rows(shard, rank, world_size, config.optim.micro_batch)
    session = Session(
        config, *place, job.tracking, job.num_train, rank, world_size, device, model, tokenizer, parts,
        frozen=frozen_hash(model),
    )  # fmt: skip
    if rank == 0:
        append_line(session.folder / STARTS, {"time": time.time(), "num_workers": world_size, "device": str(device)})
    logger.info(
        "%s loaded on %d workers (%s) in %.1f s", config.model.name, world_size, device, time.monotonic() - started
    )
    return session


def log_to_stderr(rank: int) -> None:
    """One line per message; Ray forwards it to the driver. Other ranks report problems only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    quiet_ray_data()
    logging.getLogger().setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def _resume_state(session: Session, run: Run) -> TrainingState | None:
    """Rank 0's newest whole checkpoint, on every worker."""
    return from_rank_0(session, lambda: latest_state(session.folder / run.name))


def _scores(folder: Path, run: Run) -> dict[str, float]:
    result = json.loads((folder / run.name / "result.json").read_text(encoding="utf-8"))
    return {"held_out/ce": result["held_out_ce"], "held_out/ce_untouched": result["untouched_ce"]}

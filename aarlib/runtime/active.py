"""A (method, seed) run inside a worker: attached, with its engine, at its first step or at that of a checkpoint."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from aarlib.runtime import held_out
from aarlib.runtime.checkpoints import TrainingState, restore_optimizer, restore_parameters
from aarlib.runtime.engine import Setup, Trainee, check_device, make_engine
from aarlib.runtime.population import with_own_rate
from aarlib.runtime.run_directory import cut_history
from aarlib.runtime.session import Session
from aarlib.runtime.tracking import RunLogger
from aarlib.training.config import Run

logger = logging.getLogger("aarlib")


class Active(NamedTuple):
    """A run with its engine."""

    session: Session
    run: Run
    folder: Path
    setup: Setup
    handle: Any
    trainee: Trainee
    engine: Any
    logger: RunLogger


def activate(session: Session, run: Run, method: Any, handle: Any, state: TrainingState | None) -> Active:
    folder = session.folder / run.name
    _announce(run, handle)
    if state is not None:
        restore_parameters(handle.trainable(), state.tensors)
    setup = with_own_rate(session.setup(), run.method)
    trainee = Trainee(session.model, handle, method)
    engine = make_engine(trainee, setup)
    check_device(engine, session.device)
    active = Active(session, run, folder, setup, handle, trainee, engine, RunLogger(session.tracking, run.name))
    if state is not None:
        restore_optimizer(engine, handle.trainable(), state, setup.zero_stage, lambda: _idle_step(active))
        logger.info("%s: resumed at step %d of %d", run.name, state.step, setup.total_steps)
    if session.rank == 0:
        for name in ("metrics.jsonl", "rows.jsonl"):
            cut_history(folder / name, 0 if state is None else state.step)
    return active


def _announce(run: Run, handle: Any) -> None:
    """The trainable parameters by name: shape, and the layers that have one."""
    by_name: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, parameter in handle.trainable():
        layer, _, short = name.partition(".")
        by_name.setdefault((short, tuple(getattr(parameter, "ds_shape", parameter.shape))), []).append(layer)
    logger.info("%s: %s trainable parameters", run.name, f"{handle.num_trainable:,}")
    for (name, shape), layers in by_name.items():
        logger.info("  %-18s %-12s layers %s", name, list(shape), ", ".join(layers))


def _idle_step(active: Active) -> None:
    """An optimizer step with zero loss and zero learning rate: creates the optimizer's state, changes nothing."""
    row = active.session.held_out_parts[0][:1]
    for group in active.engine.optimizer.param_groups:
        group["lr"] = 0.0
    active.engine.set_gradient_accumulation_boundary(True)
    terms = active.engine(active.session.batch(row), 0)
    active.engine.backward(sum(terms.values()) * 0.0)
    active.engine.step()


def evaluate(active: Active) -> pd.DataFrame:
    return held_out.evaluate(active.trainee, active.session.held_out_parts, active.session.batch)

"""Checkpoints that any number of workers can resume: trained tensors whole, AdamW's state, and the steps consumed.

They lie in the run directory and not with Ray Train, whose own record of its checkpoints is lost when a crash hits while it is
written: a new driver, another Ray cluster and another number of workers find them by name. The last two are kept.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aarlib.runtime.sharding import gathered

logger = logging.getLogger("aarlib")

STATES = ("exp_avg", "exp_avg_sq")
FOLDER, TENSORS, PROGRESS = "checkpoints", "state.safetensors", "progress.json"
NUM_KEPT = 2
NamedParameters = Sequence[tuple[str, nn.Parameter]]


class TrainingState(NamedTuple):
    """`tensors` by `<parameter>/param`, `/exp_avg`, `/exp_avg_sq`, float32 on the CPU."""

    run: str
    """Name of the (method, seed) run it belongs to."""
    step: int
    """Optimizer steps taken, which is also global batches consumed."""
    tokens: int
    wall_s: float
    tensors: dict[str, Tensor]


def capture(engine: Any, named: NamedParameters, zero_stage: int) -> dict[str, Tensor]:
    """Whole tensors; a collective under ZeRO 1-3, so every worker must call it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors: dict[str, Tensor] = {}
    for name, parameter in named:
        values: dict[str, Any]
        if zero_stage == 0:
            values = {"param": parameter.data, **{key: engine.optimizer.state[parameter][key] for key in STATES}}
        else:
            values = {"param": safe_get_full_fp32_param(parameter)}
            values |= {key: safe_get_full_optimizer_state(parameter, key) for key in STATES}
        for key, value in values.items():
            tensors[f"{name}/{key}"] = value.detach().to("cpu", torch.float32, copy=True).reshape(_shape(parameter))
    return tensors


def restore_parameters(named: NamedParameters, tensors: Mapping[str, Tensor]) -> None:
    """Copy the trained values in; must happen before the engine is made, which takes its own copy."""
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(tensors[f"{name}/param"])


def restore_optimizer(
    engine: Any, named: NamedParameters, state: TrainingState, zero_stage: int, idle_step: Callable[[], None]
) -> None:
    """Put AdamW's state back. `idle_step` takes an optimizer step with zero loss and zero learning rate, after which
    ZeRO 1-3 has state to write into."""
    from deepspeed.utils import safe_set_full_optimizer_state

    if zero_stage == 0:
        for name, parameter in named:
            moments = {key: state.tensors[f"{name}/{key}"].to(parameter.device, copy=True) for key in STATES}
            engine.optimizer.state[parameter] = {"step": torch.tensor(float(state.step)), **moments}
        return
    idle_step()
    for name, parameter in named:
        for key in STATES:
            safe_set_full_optimizer_state(parameter, state.tensors[f"{name}/{key}"].to(parameter.device), key)
    for values in engine.optimizer.optimizer.state.values():
        values["step"] = torch.full_like(values["step"], float(state.step))


def save_state(run_folder: Path, state: TrainingState) -> Path:
    """Write `checkpoints/step-<step>` under a temporary name, sync it to disk, rename it; then drop the oldest."""
    folder = run_folder / FOLDER
    final = folder / f"step-{state.step:09d}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(state.tensors, temporary / TENSORS)
        progress = {**state._asdict(), "sha256": _sha256(temporary / TENSORS)}
        del progress["tensors"]
        (temporary / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        for path in temporary.iterdir():
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in checkpoints(run_folder)[:-NUM_KEPT]:
        shutil.rmtree(old)
    return final


def read_state(checkpoint: Path) -> TrainingState:
    """A ValueError where the checkpoint is not whole."""
    try:
        progress = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
        expected = progress.pop("sha256")
        if _sha256(checkpoint / TENSORS) != expected:
            raise ValueError(f"the hash of {TENSORS} is not the recorded one")
        return TrainingState(**progress, tensors=load_file(checkpoint / TENSORS))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"checkpoint {checkpoint} is torn ({error}); remove it to resume from an earlier one"
        ) from error


def latest_state(run_folder: Path) -> TrainingState | None:
    """The newest whole checkpoint of a run; None where there is none. Torn ones are reported and passed over."""
    for checkpoint in reversed(checkpoints(run_folder)):
        try:
            return read_state(checkpoint)
        except ValueError as error:
            logger.warning("%s", error)
    return None


def checkpoints(run_folder: Path) -> list[Path]:
    """Oldest first; unfinished ones have another name."""
    return sorted((run_folder / FOLDER).glob("step-*"))


def whole_values(named: NamedParameters) -> dict[str, Tensor]:
    """The trained values on the CPU; a collective under ZeRO-3."""
    values: dict[str, Tensor] = {}
    for name, parameter in named:
        with gathered([parameter]):
            values[name] = parameter.detach().to("cpu", copy=True)
    return values


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """To disk, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

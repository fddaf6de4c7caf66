"""Checkpoints that any number of workers can resume: trained tensors whole, AdamW's state, and the steps consumed."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aarlib.config import write_text_atomically
from aarlib.runtime.sharding import gathered

STATES = ("exp_avg", "exp_avg_sq")
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


def save_state(folder: Path, state: TrainingState) -> None:
    save_file(state.tensors, folder / "state.safetensors")
    progress = {"run": state.run, "step": state.step, "tokens": state.tokens, "wall_s": state.wall_s}
    write_text_atomically(folder / "progress.json", json.dumps(progress))


def read_state(folder: Path) -> TrainingState:
    progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    return TrainingState(**progress, tensors=load_file(folder / "state.safetensors"))


def whole_values(named: NamedParameters) -> dict[str, Tensor]:
    """The trained values on the CPU; a collective under ZeRO-3."""
    values: dict[str, Tensor] = {}
    for name, parameter in named:
        with gathered([parameter]):
            values[name] = parameter.detach().to("cpu", copy=True)
    return values


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))

"""Every TOML and every tune space: its schema, its methods at the real geometry on the meta device, and two real optimizer steps
on a tiny model of the same family, only sizes and layers overridden. One config and one space go through Ray in test_demo.py."""

import random
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from aarlib.config import Config
from aarlib.data.chat import Encoded, collate
from aarlib.data.packing import collate_packed, pack
from aarlib.moe.anatomy import anatomy
from aarlib.moe.loading import load_config
from aarlib.runtime.engine import Setup, learning_rate
from aarlib.runtime.plan import plan
from aarlib.training.config import Run, RunConfig
from aarlib.training.methods import build_method
from pipelines.command_line import resolve_paths
from tests.tiny import FAMILIES, tiny_model

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "pipelines" / "configs"
CLASSES = {
    "method": ("aarlib.training.config", "RunConfig"),
    "audit": ("aarlib.runtime.audit_config", "AuditRunConfig"),
    "lens": ("aarlib.runtime.lens_config", "LensRunConfig"),
    "fdaa": ("aarlib.runtime.fdaa_config", "FDAAStudyConfig"),
    "token_budget": ("aarlib.nano.config", "PretrainConfig"),
}
"""By a key that only this kind of file has."""
EVERY = sorted(path.name for path in CONFIGS.glob("*.toml"))
RUNS = [name for name in EVERY if "method" in tomllib.loads((CONFIGS / name).read_text())]
SPACES = sorted(path.stem for path in (ROOT / "tune_spaces").glob("[a-z]*.py"))
SMOKE = "nano_smoke.toml"
LENGTH = 24


def config_class(name: str) -> type[Config]:
    keys = tomllib.loads((CONFIGS / name).read_text())
    kinds = [place for key, place in CLASSES.items() if key in keys]
    assert len(kinds) == 1, f"{name}: of no known kind, or of several"
    module, kind = kinds[0]
    return getattr(import_module(module), kind)


@cache
def load(name: str) -> Any:
    return resolve_paths(config_class(name).from_toml(CONFIGS / name), CONFIGS)


@pytest.mark.parametrize("name", EVERY)
def test_schema(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AARLIB_DATA", str(tmp_path))
    config = config_class(name).from_toml(CONFIGS / name)
    assert type(config).model_validate_json(config.to_json()) == config
    with pytest.raises(ValueError, match="unknown key"):
        config_class(name).from_toml(CONFIGS / name, ["--nmae=x"])


@pytest.mark.parametrize("name", RUNS)
def test_geometry_on_the_meta_device(name: str) -> None:
    planned = plan(load(name))
    assert all(method.num_trainable > 0 and method.layers for method in planned.methods)


@pytest.mark.parametrize("name", RUNS)
def test_two_steps(name: str) -> None:
    config = load(name)
    for label, method in config.method.items():
        two_steps(config, Run(label, method, config.seeds[0]))


@pytest.mark.parametrize("space", SPACES)
def test_two_steps_of_every_corner_of_a_space(space: str) -> None:
    pytest.importorskip("ray")
    from aarlib.runtime.tune_study import resolved, trial_config

    study = getattr(import_module(f"tune_spaces.{space}"), "STUDY")  # noqa: B009
    labels = {path.split(".")[1] for path in study.space if path.startswith("method.")}
    base = next(config for config in map(load, [SMOKE, *RUNS]) if labels <= set(config.method))
    study = resolved(study, base)
    assert study.record()["space"] and study.space_from_layers is None
    for params in corners(study.space):
        config = trial_config(base, study, params, "corner")
        plan(config)
        for run in config.runs():
            two_steps(config, run)


def corners(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per path its first and last value, all other paths at their first."""
    ends = {path: _ends(domain) for path, domain in space.items()}
    first = {path: values[0] for path, values in ends.items()}
    return [first, *({**first, path: values[1]} for path, values in ends.items())]


def _ends(domain: Any) -> tuple[Any, Any]:
    if isinstance(domain, dict):
        return domain["grid_search"][0], domain["grid_search"][-1]
    if hasattr(domain, "categories"):
        return domain.categories[0], domain.categories[-1]
    return domain.lower, domain.upper - 1 if isinstance(domain.lower, int) else domain.upper


def two_steps(config: RunConfig, run: Run) -> None:
    """Loss, gradient and AdamW as in the worker, in this process."""
    model = tiny_model(family_of(config))
    method = build_method(shrunk(model, run.method), run.seed)
    handle = method.attach(model)
    parameters = [parameter for _, parameter in handle.trainable()]
    optim = config.optim
    optimizer = torch.optim.AdamW(parameters, optim.learning_rate, betas=optim.betas, weight_decay=optim.weight_decay)
    setup = Setup(optim, config.ray.zero_stage, 0, 1, 10)
    start = torch.cat([parameter.detach().reshape(-1).clone() for parameter in parameters])
    losses = []
    for step in range(2):
        terms = method.loss(model, batch(config, step), step)
        loss = sum(term.sum for term in terms.values()) / next(iter(terms.values())).count
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = learning_rate(setup, step)
        optimizer.step()
        losses.append(float(loss.detach()))
    end = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    assert all(abs(loss) < 1e4 for loss in losses) and torch.isfinite(end).all()
    assert not torch.equal(start, end)
    handle.detach()


def family_of(config: RunConfig) -> str:
    model_type = load_config(config.model.name, geometry=config.model.geometry).get_text_config().model_type
    return next(family for family in FAMILIES if model_type.startswith(family))


def shrunk(model: Any, method: Any) -> Any:
    """The method with as many of its layers as the tiny model has, from the top, and a window that fits its rows."""
    changes: dict[str, Any] = {}
    if hasattr(method, "layers"):
        parts = anatomy(model)
        have = parts.aar_layers if hasattr(method, "window") else parts.moe_layers
        changes["layers"] = have[-len(method.layers) :]
    if hasattr(method, "window"):
        changes["window"] = min(method.window, LENGTH // 2)
    return method.model_copy(update=changes)


def batch(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    generator = random.Random(step)
    rows = []
    for index in range(4):
        ids = [generator.randrange(3, 97) for _ in range(generator.randint(8, LENGTH))]
        rows.append(Encoded(f"{step}/{index}", ids, [token % 3 > 0 for token in ids], False))
    if config.data.packing:
        return collate_packed(pack(rows, LENGTH), 0)
    tensors = collate(rows, 0)
    if config.data.domains:
        tensors |= {"unit": torch.full((len(rows),), step), "num_domains": torch.tensor(len(config.data.domains))}
    return tensors

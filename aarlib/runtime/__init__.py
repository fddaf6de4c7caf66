"""Ray, DeepSpeed, MLflow and lm-eval: the only part of aarlib that imports them. Names load on first use."""

from importlib import import_module
from typing import Any

_HOME = {
    "train": "trainer",
    "TrainingResult": "trainer",
    "plan": "plan",
    "sweep": "sweep",
    "Study": "tune_study",
    "SweepResult": "sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

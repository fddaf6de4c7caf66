"""A run directory read into data frames: the only reading the report does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from aarlib.config import read_json_object
from aarlib.training.config import Run, RunConfig


class RunRecord(NamedTuple):
    """One finished training."""

    run: Run
    metrics: pd.DataFrame
    """One row per logged step: `step` and namespaced keys such as train/ce."""
    held_out: pd.DataFrame
    """row_id, ce_sum, num_targets of the trained model."""
    step0: pd.DataFrame
    """The same with the untrained method attached."""
    result: dict[str, Any]

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def label(self) -> str:
        return self.run.label


class Sweep(NamedTuple):
    study: str
    trials: pd.DataFrame
    """One row a trial, best first: trial, status, held_out_ce, against_untouched, low, high, ..., the paths varied."""

    @property
    def varied(self) -> list[str]:
        """The dotted config paths that the study varied."""
        return [column for column in self.trials.columns if "." in column]


class RunRecords(NamedTuple):
    folder: Path
    config: RunConfig
    untouched: pd.DataFrame
    runs: tuple[RunRecord, ...]
    unfinished: tuple[str, ...]
    scores: pd.DataFrame | None
    """evaluation/scores.parquet; None where nothing was evaluated."""
    sweeps: tuple[Sweep, ...]
    """Finished sweeps of this run, from the folders `<run>-<study>` beside it."""
    stages: dict[str, Any] | None
    """stages.json: what a command that runs several stages took, and the peak memory of its process tree."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Routing-only SFT first, then by size."""
        sizes = {record.label: record.result["num_trainable"] for record in self.runs}
        return tuple(sorted(sizes, key=lambda label: (label != self.baseline, sizes[label], label)))

    @property
    def baseline(self) -> str | None:
        """The label of routing-only SFT, if it was trained."""
        return next((label for label, method in self.config.method.items() if method.name == "router_sft"), None)


def read_run(folder: str | Path) -> RunRecords:
    """Everything finished in a run directory; ValueError where there is none, or nothing in it is finished."""
    folder = Path(folder).resolve()
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{str(folder)!r} is no run directory: it has no config.json; pass a folder that train wrote")
    config = RunConfig.from_mapping(read_json_object(config_path), origin=str(config_path))
    finished = [run for run in config.runs() if (folder / run.name / "result.json").is_file()]
    if not finished:
        raise ValueError(f"{str(folder)!r} has no finished training yet; run `python -m pipelines.train` on its config")
    return RunRecords(
        folder=folder,
        config=config,
        untouched=read_held_out(folder / "untouched" / "held_out.parquet"),
        runs=tuple(_read_record(folder / run.name, run) for run in finished),
        unfinished=tuple(run.name for run in config.runs() if run not in finished),
        scores=_optional(folder / "evaluation" / "scores.parquet", pd.read_parquet),
        sweeps=tuple(
            _read_sweep(path, folder.name) for path in sorted(folder.parent.glob(f"{folder.name}-*/results.json"))
        ),
        stages=_optional(folder / "stages.json", read_json_object),
    )


def read_held_out(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path} is missing; train again under another name, or restore it")
    return pd.read_parquet(path, columns=["row_id", "ce_sum", "num_targets"]).set_index("row_id").sort_index()


def _read_sweep(path: Path, run_name: str) -> Sweep:
    trials = pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
    return Sweep(path.parent.name.removeprefix(f"{run_name}-"), trials)


def _optional(path: Path, read: Callable[[Path], Any]) -> Any:
    return read(path) if path.is_file() else None


def _read_record(folder: Path, run: Run) -> RunRecord:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return RunRecord(
        run=run,
        metrics=pd.DataFrame([json.loads(line) for line in lines if line.endswith("\n")]),
        held_out=read_held_out(folder / "held_out.parquet"),
        step0=read_held_out(folder / "step0_held_out.parquet"),
        result=read_json_object(folder / "result.json"),
    )

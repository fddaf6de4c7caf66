"""lm-eval over adapters in parallel: one unit per (adapter, task), each scored on the base that its actor holds."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pandas as pd

from aarlib.moe.loading import load_model, load_tokenizer
from aarlib.runtime.harness import HarnessSettings, score
from aarlib.runtime.harness_tasks import TaskSource, resolve_tasks, task_manager
from aarlib.runtime.run_directory import run_directory
from aarlib.runtime.storage import located, storage_folder
from aarlib.runtime.tracking import record_scores
from aarlib.runtime.unit_parts import Unit
from aarlib.runtime.units import Resources, run_units
from aarlib.runtime.writer import adapter_folder
from aarlib.training.adapter import fingerprint, load_adapter, read_metadata
from aarlib.training.config import EvaluateConfig, ModelConfig, RunConfig

logger = logging.getLogger("aarlib")

UNTOUCHED = "untouched"
FOLDER = "evaluation"
NANO_DOCUMENTS = 200
"""Documents of each task of the bundled world, where evaluate.limit names no number."""
QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
"""Actors' progress bars would run over one another; run_units reports progress itself."""
SCORE_COLUMNS = [
    *("adapter", "asked", "task", "metric", "filter", "value", "stderr"),
    *("higher_is_better", "num_documents", "num_truncated", "settings"),
]
SAMPLE_COLUMNS = [
    *("adapter", "task", "filter", "doc_id", "prompt", "target"),
    *("responses", "metrics", "stop_reasons"),
]


class Evaluation(NamedTuple):
    scores: pd.DataFrame
    """One row per (adapter, task, metric, filter); columns SCORE_COLUMNS. `asked` is the task, group or tag of the config."""
    samples: pd.DataFrame
    """One row per (adapter, task, filter, document); columns SAMPLE_COLUMNS."""


def evaluate(config: RunConfig) -> Evaluation:
    """Score the untouched model and every adapter of the run directory on `config.evaluate.tasks`; writes its `evaluation`.

    Unknown or unsafe tasks and missing data raise ValueError before any model is loaded. Units that are stored are not
    repeated. Ray must be initialised.
    """
    folder = run_directory(config) / FOLDER
    adapters = find_adapters(config)
    source = find_tasks(config.evaluate, folder)
    include_path = config.evaluate.include_path
    defined = None if include_path is None else digest_of(include_path)
    units = [
        {"id": f"{name}.{task}", "adapter": name, "sha256": digest, "task": task, "defined": defined}
        for task in source.names
        for name, digest, _ in adapters
    ]
    settings = {
        "model": config.model.model_dump(mode="json"),
        "tasks": source.names,
        "harness": harness_settings(config.evaluate)._asdict(),
        "gpus": config.evaluate.gpus_per_actor,
        "base_fingerprint": base_fingerprint(adapters),
    }
    resources = Resources(cpus=1, gpus=config.evaluate.gpus_per_actor, environment=QUIET)
    frame = run_units(
        units,
        Evaluator,
        folder,
        settings=settings,
        place={
            "storage": located(config.ray.storage),
            "name": config.name,
            "folders": source.folders,
            "evaluate": config.evaluate.model_dump(mode="json"),
        },
        num_actors=config.evaluate.num_actors,
        resources=resources,
        label="evaluate",
    )
    evaluation = split_records(frame)
    _write_parquet(evaluation.scores, folder / "scores.parquet")
    _write_parquet(evaluation.samples, folder / "samples.parquet")
    return evaluation


class Evaluator:
    """The worker of `run_units`: loads the base once, attaches one adapter after the other."""

    def __init__(
        self,
        model: Mapping[str, Any],
        tasks: Sequence[str],
        harness: Mapping[str, Any],
        gpus: float,
        base_fingerprint: str,
        storage: str,
        name: str,
        folders: Sequence[str],
        evaluate: Mapping[str, Any],
    ):
        self._storage, self._name = storage, name
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        source = TaskSource(tuple(tasks), tuple(folders))
        here = storage_folder(storage) / name / FOLDER
        self._manager = task_manager(tasks_here(source, EvaluateConfig.from_mapping(evaluate), here))
        self._settings = HarnessSettings(**harness)
        self._model, self._tokenizer = load_base(ModelConfig.from_mapping(model), gpus)
        if fingerprint(self._model) != base_fingerprint:
            raise ValueError(
                f"model.name = {model['name']!r} is no longer the base that the adapters were trained on (its fingerprint "
                "differs); pin model.revision, or train again under another name"
            )

    def __call__(self, unit: Unit) -> pd.DataFrame:
        handle = None
        if unit["sha256"] is not None:
            name = f"{self._name}/{unit['adapter']}/adapter"
            handle = load_adapter(self._model, adapter_folder(self._storage, name, unit["sha256"]))
        try:
            frame = score(self._model, self._tokenizer, unit["task"], self._manager, self._settings)
        finally:
            if handle is not None:
                handle.detach()
        return frame.assign(adapter=unit["adapter"], asked=unit["task"])


def load_base(config: ModelConfig, gpus: float) -> tuple[Any, Any]:
    """Model and tokenizer of the run: on the CPU, on the actor's GPU, or spread over its several GPUs."""
    model, _ = load_model(
        config.name,
        config.revision,
        dtype=config.dtype,
        device="cuda" if 0 < gpus <= 1 else None,
        device_map="auto" if gpus > 1 else None,
        experts_implementation=config.experts_implementation,
    )
    return model, load_tokenizer(config.name, config.revision, config.chat_template)


class Adapter(NamedTuple):
    name: str
    sha256: str | None = None
    base_fingerprint: str | None = None


def find_adapters(config: RunConfig) -> list[Adapter]:
    """The untouched model, then the adapter of every finished training of the config; a missing one is logged."""
    adapters, run_dir = [Adapter(UNTOUCHED)], run_directory(config)
    for run in config.runs():
        folder = run_dir / run.name / "adapter"
        if not folder.is_dir():
            logger.warning("%s has no adapter yet; it is not evaluated", run.name)
            continue
        metadata = read_metadata(folder)
        adapters.append(Adapter(run.name, metadata["sha256"], metadata["base_fingerprint"]))
    if len(adapters) == 1:
        raise ValueError(f"{run_dir} holds no adapter; run `python -m pipelines.train` with this config first")
    return adapters


def base_fingerprint(adapters: Sequence[Adapter]) -> str:
    """Of the base that all adapters were trained on."""
    trained_on = {
        adapter.base_fingerprint: adapter.name for adapter in adapters if adapter.base_fingerprint is not None
    }
    if len(trained_on) > 1:
        raise ValueError(
            f"adapters of different bases cannot be compared: {sorted(trained_on.values())}; train them together"
        )
    return next(iter(trained_on))


def harness_settings(config: EvaluateConfig) -> HarnessSettings:
    return HarnessSettings(
        num_fewshot=config.num_fewshot,
        batch_size=config.batch_size,
        apply_chat_template=config.apply_chat_template,
        limit=config.limit,
        max_gen_toks=config.max_gen_toks,
    )


def find_tasks(config: EvaluateConfig, folder: str | Path) -> TaskSource:
    """Where the tasks are defined; those of the bundled world (`nano_...`) are written below `folder` first."""
    include = [config.include_path] if config.include_path else []
    if any(task.startswith("nano_") for task in config.tasks):
        from aarlib.nano.tasks import write_tasks

        include.append(write_tasks(Path(folder).resolve() / "tasks", documents=config.limit or NANO_DOCUMENTS, seed=0))
    return resolve_tasks(config.tasks, include)


def digest_of(folder: Path) -> str:
    """sha256 of the names and contents of the files in `folder` and below: the tasks that a user defined there."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def tasks_here(source: TaskSource, config: EvaluateConfig, folder: Path) -> TaskSource:
    """The driver's `source` on this node: where it lacks a folder, the tasks are found again, or written below `folder`."""
    if all(Path(path).is_dir() for path in source.folders):
        return source
    return find_tasks(config, folder)


def track(config: RunConfig, scores: pd.DataFrame) -> list[str]:
    """Log the scores to MLflow, each beside the training it belongs to; returns what MLflow refused."""
    metrics: dict[str, dict[str, float]] = {}
    for row in scores.to_dict("records"):
        suffix = "" if row["filter"] == "none" else f".{row['filter']}"
        metrics.setdefault(row["adapter"], {})[f"eval/{row['task']}/{row['metric']}{suffix}"] = row["value"]
    return record_scores(config, run_directory(config), metrics)


def split_records(frame: pd.DataFrame) -> Evaluation:
    def of(record: str, columns: list[str]) -> pd.DataFrame:
        rows = pd.DataFrame(frame[frame["record"] == record], columns=columns)
        return rows.convert_dtypes().reset_index(drop=True)

    return Evaluation(of("score", SCORE_COLUMNS), of("sample", SAMPLE_COLUMNS))


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    frame.to_parquet(temporary, index=False)
    temporary.replace(path)

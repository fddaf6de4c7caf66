"""`train`: from a config to trained adapters, through Ray Data, Ray Train and DeepSpeed."""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
from ray.data.dataset import MaterializedDataset
from ray.train import FailureConfig, LoggingConfig, ScalingConfig
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer

from aarlib.config import read_json_object, write_text_atomically
from aarlib.data.chat import check_template
from aarlib.data.corpora import separator_id
from aarlib.data.sources import find_sources
from aarlib.moe.loading import load_tokenizer
from aarlib.runtime import tracking
from aarlib.runtime.cluster import check_resources, connect, worker_environment
from aarlib.runtime.corpus import Corpus, build_corpus, ordered
from aarlib.runtime.failures import FailAtOnce, interrupts_given_back, reason
from aarlib.runtime.handover import collected, hand_over
from aarlib.runtime.mlflow_store import FAILED, FINISHED
from aarlib.runtime.plan import Plan, plan
from aarlib.runtime.run_directory import claim, held, is_finished, pending_runs, run_directory, update
from aarlib.runtime.session import Job, dataset_name, epochs_needed, total_steps
from aarlib.runtime.storage import is_uri, located
from aarlib.runtime.text_corpus import build_text_corpus, find_texts, ordered_units
from aarlib.runtime.tracking import Tracking
from aarlib.runtime.worker import train_worker
from aarlib.training.config import RunConfig

logger = logging.getLogger("aarlib")


class TrainingResult(NamedTuple):
    folder: Path
    """The run directory; see DESIGN 4 for what is in it."""
    plan: Plan
    tracking: Tracking | None
    """None where everything was finished before."""
    problems: tuple[str, ...]
    """What MLflow refused."""


class Prepared(NamedTuple):
    """Rows in the object store; several trainings can share them."""

    corpus: Corpus
    epochs: dict[str, MaterializedDataset]
    """By `dataset_name`: the training rows in the order of a (seed, epoch)."""


def train(config: RunConfig) -> TrainingResult:
    """Train every (method, seed) of `config` that has no result.json yet; a ValueError on bad input before anything expensive."""
    planned = check(config)
    folder = update(config)
    if not pending_runs(folder, config):
        logger.info("%s: every run is finished", config.name)
        if is_uri(config.ray.storage):
            with held(config):  # pushes what an earlier end could not
                pass
        return TrainingResult(folder, planned, None, ())
    connect(config.ray)
    check_resources(config.ray)
    with held(config) as folder:
        prepared = prepare(config)
        claim(config)
        record_data(folder, prepared.corpus)
        return train_on(config, prepared, folder, planned, tracking.start(config, folder))


def record_data(folder: Path, corpus: Corpus) -> None:
    """data.json; a ValueError where the run was begun on other rows."""
    path = folder / "data.json"
    before = read_json_object(path).get("digest") if path.is_file() else None
    if before not in (None, corpus.digest):
        raise ValueError(
            f"data: the rows are not those this run was begun on ({before} in {path}, {corpus.digest} now); "
            "restore the files, or choose another name"
        )
    write_text_atomically(path, json.dumps(corpus.record(), indent=2))


def check(config: RunConfig) -> Plan:
    """Everything that can be checked without weights or workers."""
    planned = plan(config)
    tokenizer = load_tokenizer(config.model.name, config.model.revision, config.model.chat_template)
    if config.data.domains:
        find_texts(config.data)
        separator_id(tokenizer)
        return planned
    find_sources(config.data.train)
    check_template(tokenizer)
    return planned


def prepare(config: RunConfig) -> Prepared:
    """The corpus and the order of its rows for every seed and epoch that `config` needs."""
    corpus = (
        build_text_corpus(config.model, config.data) if config.data.domains else build_corpus(config.model, config.data)
    )
    epochs = range(epochs_needed(config, corpus.num_train))
    seeds = sorted({config.order_seed(run.seed) for run in pending_runs(run_directory(config), config)})

    def placed(seed: int, epoch: int) -> MaterializedDataset:
        return ordered_units(corpus, config.data, seed, epoch) if config.data.domains else ordered(corpus, seed, epoch)

    return Prepared(corpus, {dataset_name(seed, epoch): placed(seed, epoch) for seed in seeds for epoch in epochs})


def train_on(
    config: RunConfig,
    prepared: Prepared,
    folder: Path,
    planned: Plan,
    tracked: Tracking,
    callbacks: Sequence[Any] = (),
) -> TrainingResult:
    """Train on rows that are prepared already, in a run directory that is claimed."""
    _announce(config, prepared.corpus, planned)
    status = FAILED
    problems: list[str] = []
    try:
        token = hand_over(config.ray.storage, config.name)
        with collected(config.ray.storage, config.name, token):
            _fit(config, prepared, folder, token, tracked, callbacks)
        status = FINISHED
    finally:
        children = {run.name: FINISHED for run in config.runs() if is_finished(folder, run)}
        problems = tracking.finish(tracked, status, children)
    return TrainingResult(folder, planned, tracked, (*tracked.problems, *problems))


def _announce(config: RunConfig, corpus: Corpus, planned: Plan) -> None:
    for method in planned.methods:
        logger.info("%s: %s trainable parameters (%s)", method.label, f"{method.num_trainable:,}", method.method)
    logger.info(
        "%d runs of %d steps, %d conversations a step, %d workers, ZeRO %d",
        len(config.runs()), total_steps(config, corpus.num_train), config.optim.global_batch, config.ray.num_workers,
        config.ray.zero_stage,
    )  # fmt: skip


def _fit(
    config: RunConfig, prepared: Prepared, folder: Path, token: str, tracked: Tracking, callbacks: Sequence[Any]
) -> None:
    there = config.updated({"ray.storage": located(config.ray.storage)})
    job = Job(there.model_dump(mode="json"), token, tracked, prepared.corpus.num_train)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=job._asdict(),
        scaling_config=ScalingConfig(
            num_workers=_num_workers(config),
            use_gpu=config.ray.use_gpu,
            resources_per_worker={"CPU": config.ray.cpus_per_worker} | ({"GPU": 1} if config.ray.use_gpu else {}),
        ),
        run_config=TrainRunConfig(
            name=f"start-{time.time_ns()}",
            storage_path=str(folder / "ray_train"),
            failure_config=FailureConfig(max_failures=config.ray.max_failures, controller_failure_limit=3),
            logging_config=LoggingConfig(log_level="WARNING"),
            worker_runtime_env=worker_environment(config.ray),
            callbacks=[FailAtOnce(), *callbacks],
        ),
        datasets={"held_out": prepared.corpus.held_out, **prepared.epochs},
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),
    )
    try:
        with interrupts_given_back():
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise reason(error) from error


def _num_workers(config: RunConfig) -> int | tuple[int, int]:
    minimum = config.ray.min_workers
    return config.ray.num_workers if minimum is None else (minimum, config.ray.num_workers)

"""Ray Tune over whole trainings: a study varies dotted config paths, each trial launches a Ray Train worker group."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import ray
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aarlib.config import write_text_atomically
from aarlib.report.records import Sweep, read_run
from aarlib.report.tables import paired_difference
from aarlib.runtime import tracking
from aarlib.runtime.cluster import check_resources, concurrent_groups, connect
from aarlib.runtime.failures import interrupts_given_back
from aarlib.runtime.mlflow_store import FAILED, FINISHED
from aarlib.runtime.run_directory import claim, held, run_directory, update
from aarlib.runtime.storage import located
from aarlib.runtime.tracking import Tracking
from aarlib.runtime.trainer import Prepared, check, prepare, record_data, train_on
from aarlib.runtime.tune_study import Study, leaves_rows_alone, resolved, trial_config
from aarlib.training.config import RunConfig

logger = logging.getLogger("aarlib")

METRIC = "held_out/ce"
STUDY, FIGURE = "study.json", "sweep.svg"
TUNE_FOLDER = "ray_tune"
NO_GROUP = PlacementGroupSchedulingStrategy(placement_group=None)  # pyright: ignore[reportArgumentType]
HEAD = "node:__internal_head__"


class SweepResult(NamedTuple):
    folder: Path
    sweep: Sweep
    """Its `trials`: one row a trial, best first, also in results.csv and results.json."""
    best: dict[str, Any]
    """The varied paths of the best trial."""
    tracking: Tracking
    problems: tuple[str, ...]


def sweep(config: RunConfig, study: Study, name: str) -> SweepResult:
    """Run `study` on `config`; run directory `<config.name>-<name>`, trials in its folder `trials`.

    Taken up again, it keeps finished trials and runs the others. A ValueError on bad input comes before any trial starts.
    """
    study = resolved(study, config)
    base = check_sweep(config, study, name)
    connect(base.ray)
    check_resources(base.ray)
    with held(base) as folder:
        claim(base)
        write_text_atomically(folder / STUDY, json.dumps(study.record(), indent=2))
        shared = prepare(base) if all(map(leaves_rows_alone, study.space)) else None
        if shared is not None:
            record_data(folder, shared.corpus)
        tracked = tracking.start(base, folder, with_children=False)
        status, problems = FAILED, list(tracked.problems)
        stopped: list[Path] = []
        try:
            with interrupts_given_back():
                grid = _tuner(base, study, folder, tracked, shared).fit()
            trials = _collect(base, study, folder, grid)
            stopped = [folder / "trials" / trial for trial in trials.loc[trials["status"] == "stopped", "trial"]]
            _draw(Sweep(name, trials), folder)
            status = FINISHED
        finally:
            files = (folder / file for file in ("results.csv", "results.json", STUDY, FIGURE))
            artifacts = tuple(path for path in files if path.is_file())
            problems += tracking.finish(tracked, status, {}, artifacts, stopped)
    first = trials.to_dict("records")[0]
    best = {path: first[path] for path in study.space}
    return SweepResult(folder, Sweep(name, trials), best, tracked, tuple(problems))


def _draw(found: Sweep, folder: Path) -> None:
    if util.find_spec("matplotlib") is None:
        logger.warning("no figure of the sweep: matplotlib is not installed")
        return
    from aarlib.report.figures import LIGHT, as_svg
    from aarlib.report.sweep_figures import sweep_overview

    write_text_atomically(folder / FIGURE, as_svg(sweep_overview(found, LIGHT)).decode())


def check_sweep(config: RunConfig, study: Study, name: str) -> RunConfig:
    """The sweep's own config, checked without Ray: its data, methods and run directory, and that it is the study begun there."""
    study = resolved(study, config)
    here = {"ray.storage": located(config.ray.storage)}
    base = trial_config(config, study, {}, f"{config.name}-{name}").updated(here)
    check(base)
    stored = update(base) / STUDY
    if stored.is_file() and (found := json.loads(stored.read_text(encoding="utf-8"))) != (wanted := study.record()):
        changed = ", ".join(sorted(key for key in wanted if found.get(key) != wanted[key]))
        raise ValueError(
            f"study {name!r}: {stored.parent} holds a sweep of the study as it was before ({changed} differ); give the edited "
            "study another file name, or remove the directory"
        )
    return base


def run_trial(
    params: dict[str, Any], base: dict[str, Any], study: Study, folder: str, tracked: Tracking, shared: Prepared | None
) -> None:
    """Tune's trainable: a driver that launches one training."""
    number = tune.get_context().get_trial_id().rpartition("_")[2]
    parent = RunConfig.from_mapping(base)
    check_place(parent, folder)
    config = trial_config(parent, study, params, f"{parent.name}/trials/{number}")
    connect(config.ray)
    check_resources(config.ray)
    planned = check(config)
    trial_folder = claim(config)
    actor: Any = ray.remote(num_cpus=0)(Preparer)
    preparer: Any = actor.options(scheduling_strategy=NO_GROUP).remote() if shared is None else None
    prepared: Any = shared or ray.get(preparer.prepare.remote(config.model_dump(mode="json")))
    record_data(trial_folder, prepared.corpus)
    nested = tracking.start_trial(config, trial_folder, tracked)
    train_on(config, prepared, trial_folder, planned, nested, callbacks=[TuneReportCallback()])
    tune.report(_score(trial_folder))


def check_place(parent: RunConfig, folder: str) -> None:
    """A ValueError where this process has the sweep's run directory elsewhere than the sweep has."""
    if str(run_directory(parent)) != folder:
        raise ValueError(
            f"AARLIB_SCRATCH: the sweep works in {folder}, this trial would in {run_directory(parent)}; set it where Ray is "
            "started as for the sweep"
        )


class Preparer:
    """An actor that prepares rows outside the trial's placement group, which holds no CPU for Ray Data, and owns them."""

    def prepare(self, config: dict[str, Any]) -> Prepared:
        return prepare(RunConfig.from_mapping(config))


def _score(folder: Path) -> dict[str, Any]:
    """Means over the trial's runs; the 95% interval where there is one run."""
    records = read_run(folder)
    differences = [paired_difference(record.held_out, records.untouched).interval for record in records.runs]
    results = [record.result for record in records.runs]
    alone = differences[0] if len(differences) == 1 else None
    return {
        METRIC: _mean([result["held_out_ce"] for result in results]),
        "against_untouched": _mean([interval.mean for interval in differences]),
        "low": None if alone is None else alone.low,
        "high": None if alone is None else alone.high,
        "step0_ce": _mean([result["step0_ce"] for result in results]),
        "num_trainable": results[0]["num_trainable"],
        "wall_s": sum(result["wall_s"] for result in results),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _tuner(base: RunConfig, study: Study, folder: Path, tracked: Tracking, shared: Prepared | None) -> tune.Tuner:
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    trainable = tune.with_resources(
        tune.with_parameters(
            run_trial,
            base=base.model_dump(mode="json"),
            study=study,
            folder=str(folder),
            tracked=tracked,
            shared=shared,
        ),
        tune.PlacementGroupFactory([{this_node(ray.nodes(), ray.get_runtime_context().get_node_id()): 0.001}]),
    )
    stored = str(folder / TUNE_FOLDER)
    if tune.Tuner.can_restore(stored):
        logger.info("%s: taking up the sweep again", base.name)
        return tune.Tuner.restore(stored, trainable, resume_unfinished=True, resume_errored=True)
    return tune.Tuner(
        trainable,
        param_space=dict(study.space),
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="min",
            num_samples=study.num_samples,
            scheduler=study.scheduler() if study.scheduler else None,
            search_alg=study.search() if study.search else None,
            max_concurrent_trials=concurrent_groups(base.ray),
            time_budget_s=study.time_budget_s,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(name=TUNE_FOLDER, storage_path=str(folder), verbose=0, callbacks=[Announce()]),
    )


def this_node(nodes: Sequence[Mapping[str, Any]], node_id: str) -> str:
    """The resource by which a trial's driver is placed beside the sweep's, whose folder it shares; it takes no CPU from the
    worker groups (Tune refuses a request for nothing)."""
    resources = next(node["Resources"] for node in nodes if node["NodeID"] == node_id)
    return HEAD if HEAD in resources else next(name for name in resources if name.startswith("node:"))


def trial_name(trial: Any) -> str:
    """Of a trial and its folder, without its parameters: Tune's own names would hold 48 layers."""
    return f"trial_{trial.trial_id}"


class Announce(tune.Callback):
    """One line when a trial starts and one when it ends."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        logger.info("trial %s of %d starts: %s", trial.trial_id.rpartition("_")[2], len(trials), _short(trial.config))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        ce = trial.last_result.get(METRIC, float("nan"))
        logger.info("trial %s: held-out CE %.4f  %s", trial.trial_id.rpartition("_")[2], ce, _short(trial.config))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        logger.warning("trial %s failed: %s", trial.trial_id.rpartition("_")[2], _short(trial.config))


def _collect(base: RunConfig, study: Study, folder: Path, grid: tune.ResultGrid) -> pd.DataFrame:
    """The table, also as results.csv and results.json; a RuntimeError where no trial finished."""
    rows: list[dict[str, Any]] = []
    for result in grid:
        metrics, params = result.metrics or {}, result.config or {}
        problem = _problem(result)
        status = "failed" if problem is not None else "finished" if "against_untouched" in metrics else "stopped"
        row = {"trial": Path(result.path).name.rpartition("_")[2], "status": status}
        keys = (METRIC, "against_untouched", "low", "high", "step0_ce", "num_trainable", "wall_s")
        scores = {key.replace("/", "_"): metrics.get(key) for key in keys}
        rows.append({**row, **scores, "problem": problem, **{path: _plain(params.get(path)) for path in study.space}})
        if problem is not None:
            logger.warning("trial %s: %s", row["trial"], problem)
    rows = ranked(rows)
    table = pd.DataFrame(rows)
    table.to_csv(folder / "results.csv", index=False)
    write_text_atomically(folder / "results.json", json.dumps(rows, indent=2))
    if rows[0]["status"] != "finished":
        within = "" if study.time_budget_s is None else f" within study.time_budget_s = {study.time_budget_s:g}"
        raise RuntimeError(
            f"{base.name}: none of {len(rows)} trials finished{within}; see the warnings above and {folder}"
        )
    return table


def ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Finished trials first, each status by held-out CE: the first row is the best trial."""
    return sorted(rows, key=lambda row: (row["status"] != "finished", row["status"], row["held_out_ce"] or 0.0))


def _plain(value: Any) -> Any:
    """As JSON has it: a space's tuple is a list in what Tune restores."""
    return list(value) if isinstance(value, tuple) else value


def _problem(result: tune.Result) -> str | None:
    if result.error is not None:
        return str(result.error).strip().splitlines()[-1]
    ce = (result.metrics or {}).get(METRIC, 0.0)
    return None if math.isfinite(ce) else f"{METRIC} is {ce}"


def _short(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in params.items())

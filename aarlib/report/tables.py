"""Records to tables. CE is in nats per target token; a difference is trained minus reference, so below 0 is better."""

import json
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from aarlib.report.records import RunRecord, RunRecords, Sweep
from aarlib.stats import Interval, mean_and_std, ratio_bootstrap

MAIN_METRICS = ("acc", "exact_match", "prompt_level_strict_acc", "f1", "bits_per_byte", "word_perplexity")
UNTOUCHED = "untouched"


class Difference(NamedTuple):
    """Paired over conversations, weighted by target tokens."""

    interval: Interval
    num_rows: int


def mean_ce(held_out: pd.DataFrame) -> float:
    return float(np.sum(held_out["ce_sum"]) / np.sum(held_out["num_targets"]))


def paired_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> Difference:
    """CE of `ours` minus CE of `theirs` on the conversations both hold, with its 95% bootstrap interval over them."""
    both = ours.merge(theirs, left_index=True, right_index=True, suffixes=("_ours", "_theirs"))
    if both.empty:
        raise ValueError("the two hold no conversation in common; compare runs with the same data table")
    if not np.array_equal(both["num_targets_ours"], both["num_targets_theirs"]):
        raise ValueError("the same conversations have other numbers of targets; compare runs with the same tokenizer")
    sums = both["ce_sum_ours"] - both["ce_sum_theirs"]
    return Difference(ratio_bootstrap(sums, both["num_targets_ours"]), len(both))


def mean_over_seeds(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Per conversation, the mean of ce_sum over seeds."""
    mean = sum(frame["ce_sum"] for frame in frames) / len(frames)
    return frames[0].assign(ce_sum=mean)


def held_out_table(records: RunRecords) -> pd.DataFrame:
    """One row for the untouched model, one per (method, seed), and one per method over its seeds (`seed` "mean").

    Columns: label, seed, ce, ce_std, step0_ce, and for the differences against the untouched model (vs_untouched) and
    against SFT of the same seed (vs_sft): mean, _low, _high. Then num_trainable, wall_s of the training alone, and
    peak_gib, the resident memory of its workers added up.
    """
    rows: list[dict[str, Any]] = [{"label": UNTOUCHED, "seed": "", "ce": mean_ce(records.untouched)}]
    for label in records.labels:
        runs = [record for record in records.runs if record.label == label]
        if len(runs) > 1:
            rows.append(_mean_row(label, runs, records))
        rows += [_seed_row(record, records) for record in runs]
    columns = ["label", "seed", "ce", "ce_std", "step0_ce"]
    columns += [f"{name}{end}" for name in ("vs_untouched", "vs_sft") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=[*columns, "num_trainable", "wall_s", "peak_gib"])


def _seed_row(record: RunRecord, records: RunRecords) -> dict[str, Any]:
    baseline = [
        other for other in records.runs if other.label == records.baseline and other.run.seed == record.run.seed
    ]
    row: dict[str, Any] = {"label": record.label, "seed": str(record.run.seed), "ce": mean_ce(record.held_out)}
    row |= {"step0_ce": mean_ce(record.step0), **_named("vs_untouched", record.held_out, records.untouched)}
    if baseline and record.label != records.baseline:
        row |= _named("vs_sft", record.held_out, baseline[0].held_out)
    return row | _costs([record])


def _mean_row(label: str, runs: list[RunRecord], records: RunRecords) -> dict[str, Any]:
    ces = mean_and_std([mean_ce(record.held_out) for record in runs])
    row: dict[str, Any] = {"label": label, "seed": "mean", "ce": ces.mean, "ce_std": ces.std}
    row["step0_ce"] = mean_and_std([mean_ce(record.step0) for record in runs]).mean
    averaged = mean_over_seeds([record.held_out for record in runs])
    row |= _named("vs_untouched", averaged, records.untouched)
    seeds = {record.run.seed for record in runs}
    baseline = [other for other in records.runs if other.label == records.baseline and other.run.seed in seeds]
    if label != records.baseline and len(baseline) == len(runs):
        row |= _named("vs_sft", averaged, mean_over_seeds([other.held_out for other in baseline]))
    return row | _costs(runs)


def _named(name: str, ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, float]:
    interval = paired_difference(ours, theirs).interval
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _costs(runs: Sequence[RunRecord]) -> dict[str, float]:
    return {
        "num_trainable": runs[0].result["num_trainable"],
        "wall_s": sum(record.result["wall_s"] for record in runs) / len(runs),
        "peak_gib": max(sum(record.result["peak_gib"]) for record in runs),
    }


def score_table(records: RunRecords) -> pd.DataFrame:
    """One row per (adapter, task) under the task's main metric: label, seed, task, metric, value, stderr, num_documents.

    A group that aggregates its members is shown without them.
    """
    if records.scores is None:
        return pd.DataFrame(columns=["label", "seed", "task", "metric", "value", "stderr", "num_documents"])
    stored = records.scores.to_dict("records")
    aggregated = {row["asked"] for row in stored if row["task"] == row["asked"]}
    by_unit: dict[tuple[str, str], list[dict[Hashable, Any]]] = {}
    for row in stored:
        if row["task"] == row["asked"] or row["asked"] not in aggregated:
            by_unit.setdefault((row["adapter"], row["task"]), []).append(row)
    rows = []
    for (adapter, task), found in by_unit.items():
        label, seed = split_name(adapter)
        chosen = min(found, key=lambda row: _rank(row["metric"]))
        shown = {key: chosen[key] for key in ("metric", "value", "stderr", "num_documents")}
        rows.append({"label": label, "seed": seed, "task": task, **shown})
    return pd.DataFrame(rows)


def _rank(metric: str) -> int:
    """Which metric of a task is shown: the one named earliest in MAIN_METRICS, else the first stored."""
    return MAIN_METRICS.index(metric) if metric in MAIN_METRICS else len(MAIN_METRICS)


def split_name(adapter: str) -> tuple[str, str]:
    """`aar-seed1` -> ("aar", "1"); the untouched model has no seed."""
    label, separator, seed = adapter.rpartition("-seed")
    return (label, seed) if separator else (adapter, "")


def routing_by_layer(records: RunRecords) -> pd.DataFrame:
    """Last logged step: label, seed, layer, and what metrics.jsonl holds under routing/<quantity>/layer_<index>."""
    rows = []
    for record in records.runs:
        last = record.metrics.iloc[-1]
        found: dict[int, dict[str, float]] = {}
        for key in record.metrics.columns:
            head, separator, layer = key.rpartition("/layer_")
            if separator and head.startswith("routing/"):
                found.setdefault(int(layer), {})[head.removeprefix("routing/")] = float(last[key])
        rows += [
            {"label": record.label, "seed": str(record.run.seed), "layer": layer, **values}
            for layer, values in sorted(found.items())
        ]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["label", "seed", "layer"])


def sweep_table(sweep: Sweep) -> pd.DataFrame:
    """Finished trials, best first: trial, setting, ce, and mean, low, high of the difference to the untouched model."""
    rows = [
        {
            "trial": row["trial"],
            "setting": ", ".join(f"{path.rpartition('.')[2]} {_value(row[path])}" for path in sweep.varied),
            "ce": row["held_out_ce"],
            "mean": row["against_untouched"],
            "low": row["low"],
            "high": row["high"],
            "step0_ce": row["step0_ce"],
            "num_trainable": int(row["num_trainable"]),
            "wall_s": row["wall_s"],
        }
        for row in sweep.trials.to_dict("records")
        if row["status"] == "finished"
    ]
    return pd.DataFrame(rows)


def _value(value: object) -> str:
    """Consecutive layers as a range: [4, 5, 6, 7] is 4-7."""
    if not isinstance(value, list):
        return str(value)
    whole = all(isinstance(item, int) for item in value)
    if whole and len(value) > 2 and value == list(range(value[0], value[-1] + 1)):
        return f"{value[0]}-{value[-1]}"
    return " ".join(map(str, value))


def settings_table(scores: pd.DataFrame) -> pd.DataFrame:
    """One row per task: how it was scored, from the settings stored with its scores."""
    rows = []
    for task, group in scores.groupby("task", sort=False):
        settings = json.loads(group.iloc[0]["settings"])
        rows.append(
            {
                "task": task,
                "version": settings["task_version"],
                "documents": group.iloc[0]["num_documents"],
                "few-shot": settings["num_fewshot"],
                "batch size": settings["batch_size"],
                "chat template": settings["apply_chat_template"],
                "cut to context": group["num_truncated"].max(),
                "lm-eval": settings["versions"]["lm_eval"],
            }
        )
    return pd.DataFrame(rows)

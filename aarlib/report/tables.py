"""Records to tables. CE is in nats per target token; a difference is trained minus reference, so below 0 is better."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from aarlib.report.records import RunRecord, RunRecords
from aarlib.stats import Interval, mean_and_std, ratio_bootstrap

MAIN_METRICS = ("acc", "exact_match", "prompt_level_strict_acc", "f1", "bits_per_byte", "word_perplexity")
UNTOUCHED = "untouched"


class Difference(NamedTuple):
    """Paired over conversations, weighted by target tokens."""

    interval: Interval
    num_rows: int


def mean_ce(held_out: pd.DataFrame) -> float:
    return float(held_out["ce_sum"].sum() / held_out["num_targets"].sum())


def paired_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> Difference:
    """CE of `ours` minus CE of `theirs` on the conversations both hold, with its 95% bootstrap interval over them."""
    both = ours.join(theirs, how="inner", lsuffix="_ours", rsuffix="_theirs")
    if both.empty:
        raise ValueError("the two hold no conversation in common; compare runs with the same data table")
    if (both["num_targets_ours"] != both["num_targets_theirs"]).any():
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
    rows = [{"label": UNTOUCHED, "seed": "", "ce": mean_ce(records.untouched)}]
    for label in records.labels:
        runs = [record for record in records.runs if record.label == label]
        if len(runs) > 1:
            rows.append(_mean_row(label, runs, records))
        rows += [_seed_row(record, records) for record in runs]
    columns = ["label", "seed", "ce", "ce_std", "step0_ce"]
    columns += [f"{name}{end}" for name in ("vs_untouched", "vs_sft") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=[*columns, "num_trainable", "wall_s", "peak_gib"])


def _seed_row(record: RunRecord, records: RunRecords) -> dict[str, object]:
    baseline = [
        other for other in records.runs if other.label == records.baseline and other.run.seed == record.run.seed
    ]
    row = {"label": record.label, "seed": str(record.run.seed), "ce": mean_ce(record.held_out)}
    row |= {"step0_ce": mean_ce(record.step0), **_named("vs_untouched", record.held_out, records.untouched)}
    if baseline and record.label != records.baseline:
        row |= _named("vs_sft", record.held_out, baseline[0].held_out)
    return row | _costs([record])


def _mean_row(label: str, runs: list[RunRecord], records: RunRecords) -> dict[str, object]:
    ces = mean_and_std([mean_ce(record.held_out) for record in runs])
    row = {"label": label, "seed": "mean", "ce": ces.mean, "ce_std": ces.std}
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
    """One row per (adapter, task) under the task's main metric: label, seed, task, metric, value, stderr, num_documents."""
    if records.scores is None:
        return pd.DataFrame(columns=["label", "seed", "task", "metric", "value", "stderr", "num_documents"])
    rows = []
    for (adapter, task), group in records.scores.groupby(["adapter", "task"], sort=False):
        chosen = group.loc[[main_metric(group)]].iloc[0]
        label, seed = split_name(str(adapter))
        rows.append(
            {"label": label, "seed": seed, "task": task, **chosen[["metric", "value", "stderr", "num_documents"]]}
        )
    return pd.DataFrame(rows)


def main_metric(group: pd.DataFrame) -> object:
    """Index of the row to show first: the metric named earliest in MAIN_METRICS, else the first."""
    ranked = {metric: rank for rank, metric in enumerate(MAIN_METRICS)}
    ranks = group["metric"].map(lambda metric: ranked.get(metric, len(ranked)))
    return ranks.idxmin()


def split_name(adapter: str) -> tuple[str, str]:
    """`aar-seed1` -> ("aar", "1"); the untouched model has no seed."""
    label, separator, seed = adapter.rpartition("-seed")
    return (label, seed) if separator else (adapter, "")


def mean_scores(scores: pd.DataFrame) -> pd.DataFrame:
    """Per (label, task) over seeds: value, std (n-1), num_documents."""
    grouped = scores.groupby(["label", "task", "metric"], sort=False)
    frame = grouped.agg(value=("value", "mean"), std=("value", "std"), num_documents=("num_documents", "first"))
    return frame.reset_index()


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
    return pd.DataFrame(rows, columns=None if rows else ["label", "seed", "layer"])


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

"""What a run directory says: held-out CE of every model, paired by conversation with the untouched one and with SFT."""

import json
from pathlib import Path

import pandas as pd

from aarlib.runtime.held_out import FILE, mean_ce
from aarlib.runtime.run_directory import is_finished
from aarlib.stats import Interval, ratio_bootstrap
from aarlib.training.config import RunConfig


def results_table(folder: Path, config: RunConfig) -> pd.DataFrame:
    """One row for the untouched model and one for every finished run.

    CE in nats per target token; `against_untouched` and `against_sft` (the router_sft of the same seed) are Intervals of the
    paired difference, conversations resampled whole, or None.
    """
    untouched = pd.read_parquet(folder / "untouched" / FILE)
    rows: list[dict[str, object]] = [
        {"label": "untouched", "held_out_ce": mean_ce(untouched), "num_held_out": len(untouched)}
    ]
    sft = {run.seed: run for run in config.runs() if run.method.name == "router_sft" and is_finished(folder, run)}
    for run in config.runs():
        if not is_finished(folder, run):
            continue
        result = json.loads((folder / run.name / "result.json").read_text(encoding="utf-8"))
        trained = pd.read_parquet(folder / run.name / FILE)
        base = sft.get(run.seed)
        against_sft = None
        if base is not None and base != run:
            against_sft = paired_difference(trained, pd.read_parquet(folder / base.name / FILE))
        rows.append(
            {
                "label": run.label,
                "seed": run.seed,
                "num_trainable": result["num_trainable"],
                "held_out_ce": mean_ce(trained),
                "against_untouched": paired_difference(trained, untouched),
                "against_sft": against_sft,
                "step0_ce": result["step0_ce"],
                "wall_s": result["wall_s"],
                "peak_gib": sum(result["peak_gib"]),
                "num_held_out": len(trained),
            }
        )
    return pd.DataFrame(rows)


def paired_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> Interval:
    """CE(ours) - CE(theirs) in nats per target token with its 95% interval; a ValueError where the conversations differ."""
    pairs = ours.merge(theirs, on="row_id", suffixes=("", "_theirs"), validate="one_to_one")
    if not len(pairs) == len(ours) == len(theirs):
        raise ValueError(
            f"not the same conversations: {len(ours)} of ours, {len(theirs)} of theirs, {len(pairs)} in both"
        )
    return ratio_bootstrap(pairs["ce_sum"] - pairs["ce_sum_theirs"], pairs["num_targets"])


def format_table(table: pd.DataFrame) -> str:
    """The table as aligned text."""
    header = (
        f"{'method':<14}{'seed':>5}{'trainable':>12}{'held-out CE':>13}  {'against untouched':<28}{'against SFT':<28}"
        f"{'step-0 CE':>10}{'time s':>9}{'GiB':>7}"
    )
    lines = [header, "-" * len(header)]
    for row in table.to_dict("records"):
        if row["label"] == "untouched":
            lines.append(f"{'untouched':<14}{'':>17}{row['held_out_ce']:>13.4f}  ({row['num_held_out']} conversations)")
            continue
        lines.append(
            f"{row['label']:<14}{row['seed']:>5.0f}{row['num_trainable']:>12,.0f}{row['held_out_ce']:>13.4f}  "
            f"{_interval(row['against_untouched']):<28}{_interval(row['against_sft']):<28}"
            f"{row['step0_ce']:>10.4f}{row['wall_s']:>9.1f}{row['peak_gib']:>7.2f}"
        )
    return "\n".join(lines)


def _interval(value: object) -> str:
    return f"{value.mean:+.4f} [{value.low:+.4f}, {value.high:+.4f}]" if isinstance(value, Interval) else ""

"""How the numbers are written: the one place where the terminal table and the page get their strings."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from aarlib.report.tables import UNTOUCHED
from aarlib.stats import mean_and_std


class Display(NamedTuple):
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasised: tuple[bool, ...]
    """Rows that sum up others: the untouched model and the means over seeds."""


def held_out_display(table: pd.DataFrame) -> Display:
    """Held-out CE, paired differences with 95% intervals, step-0 CE."""
    headers = ("method", "seed", "held-out CE", "vs untouched [95%]", "vs SFT, same seed [95%]", "step-0 CE")
    rows = [
        (
            *(row["label"], row["seed"], plus_minus(row["ce"], row["ce_std"], 4)),
            *(interval(row, name) for name in ("vs_untouched", "vs_sft")),
            number(row["step0_ce"], 4),
        )
        for row in table.to_dict("records")
    ]
    return Display(headers, tuple(rows), _emphasised(table))


def score_display(table: pd.DataFrame, scores: pd.DataFrame) -> Display:
    """The same models: task scores with their numbers of documents, and what the training cost."""
    scored = scores.to_dict("records")
    tasks = list(dict.fromkeys(row["task"] for row in scored))
    headers = (
        "method",
        "seed",
        *(_task_header(scored, task) for task in tasks),
        *("trainable", "time (s)", "peak (GiB)"),
    )
    rows = [
        (
            *(row["label"], row["seed"]),
            *(_task_cell(scored, task, row["label"], row["seed"]) for task in tasks),
            *(number(row["num_trainable"], 0), number(row["wall_s"], 1), number(row["peak_gib"], 2)),
        )
        for row in table.to_dict("records")
    ]
    return Display(headers, tuple(rows), _emphasised(table))


def _emphasised(table: pd.DataFrame) -> tuple[bool, ...]:
    return tuple(row["seed"] == "mean" or row["label"] == UNTOUCHED for row in table.to_dict("records"))


def sweep_display(trials: pd.DataFrame) -> Display:
    headers = ("trial", "setting", "held-out CE", "vs untouched [95%]", "step-0 CE", "trainable", "time (s)")
    rows = tuple(
        (
            *(str(row["trial"]), row["setting"], number(row["ce"], 4)),
            signed_interval(row["mean"], row["low"], row["high"]),
            *(number(row["step0_ce"], 4), number(row["num_trainable"], 0), number(row["wall_s"], 1)),
        )
        for row in trials.to_dict("records")
    )
    return Display(headers, rows, (False,) * len(rows))


def frame_display(frame: pd.DataFrame) -> Display:
    """Any small frame."""
    rows = tuple(tuple(_plain(value) for value in row) for row in frame.itertuples(index=False))
    return Display(tuple(str(column).replace("_", " ") for column in frame.columns), rows, (False,) * len(rows))


def as_text(display: Display) -> str:
    """Aligned columns; the first is left-aligned, the others are right-aligned."""
    cells = [display.headers, *display.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(display.headers))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def number(value: float | None, decimals: int) -> str:
    return "" if value is None or pd.isna(value) else f"{value:,.{decimals}f}"


def plus_minus(value: float, std: float, decimals: int) -> str:
    return number(value, decimals) + ("" if pd.isna(std) else f" +- {std:.{decimals}f}")


def interval(row: dict[Hashable, Any], name: str) -> str:
    return "" if pd.isna(row[name]) else signed_interval(row[name], row[f"{name}_low"], row[f"{name}_high"])


def signed_interval(mean: float, low: float, high: float) -> str:
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _task_header(scores: Sequence[dict[Hashable, Any]], task: str) -> str:
    first = next(row for row in scores if row["task"] == task)
    return f"{task} {first['metric']} (n={first['num_documents']})"


def _task_cell(scores: Sequence[dict[Hashable, Any]], task: str, label: str, seed: str) -> str:
    """The score of one model, or mean +- deviation over the seeds of a method."""
    found = [row for row in scores if row["task"] == task and row["label"] == label]
    values = [row["value"] for row in found if seed in ("mean", row["seed"])]
    if not values:
        return ""
    return plus_minus(*mean_and_std(values), 3)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None or value is pd.NA else str(value)

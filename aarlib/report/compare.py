"""Run directories side by side: every model's held-out CE, paired with its counterpart where the conversations agree."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from aarlib.report.records import RunRecords
from aarlib.report.tables import UNTOUCHED, mean_ce, paired_difference
from aarlib.report.text import Display, interval, number


def comparison_table(runs: Sequence[RunRecords]) -> pd.DataFrame:
    """One row per (run directory, model): run, label, seed, ce, and two paired differences with their number of rows.

    vs_untouched: against the untouched model of the same directory. vs_first: against the model of the same label and
    seed in the first directory, over the conversations that both hold (`vs_first_rows`); `note` says why it is absent.
    """
    first = _models(runs[0])
    rows: list[dict[str, Any]] = []
    for position, records in enumerate(runs):
        for (label, seed), held_out in _models(records).items():
            row = {"run": records.folder.name, "label": label, "seed": seed, "ce": mean_ce(held_out), "note": ""}
            row["rows"] = len(held_out)
            if label != UNTOUCHED:
                row |= _difference("vs_untouched", held_out, records.untouched)
            if position and (label, seed) in first:
                row |= _difference("vs_first", held_out, first[label, seed])
            rows.append(row)
    names = [f"{name}{end}" for name in ("vs_untouched", "vs_first") for end in ("", "_low", "_high", "_rows")]
    return pd.DataFrame(rows, columns=["run", "label", "seed", "ce", "rows", *names, "note"])


def comparison_display(table: pd.DataFrame) -> Display:
    headers = (
        "run",
        "method",
        "seed",
        "held-out CE",
        "rows",
        "vs untouched [95%]",
        "vs first run [95%]",
        "paired",
        "note",
    )
    rows = tuple(
        (
            *(row["run"], row["label"], row["seed"], number(row["ce"], 4), str(row["rows"])),
            *(interval(row, "vs_untouched"), interval(row, "vs_first")),
            *(number(row["vs_first_rows"], 0), row["note"]),
        )
        for row in table.to_dict("records")
    )
    return Display(headers, rows, tuple(row[1] == UNTOUCHED for row in rows))


def _models(records: RunRecords) -> dict[tuple[str, str], pd.DataFrame]:
    ordered = sorted(records.runs, key=lambda record: records.labels.index(record.label))
    trained = {(record.label, str(record.run.seed)): record.held_out for record in ordered}
    return {(UNTOUCHED, ""): records.untouched, **trained}


def _difference(name: str, ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, Any]:
    try:
        (mean, low, high), num_rows = paired_difference(ours, theirs)
    except ValueError as error:
        return {"note": f"not paired: {error}"}
    return {name: mean, f"{name}_low": low, f"{name}_high": high, f"{name}_rows": num_rows}

"""Summaries of runs as Markdown: blocks `<!-- run NAME -->` to `<!-- end run -->` of a page, from NAME.json."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aarlib.report.tables import UNTOUCHED
from aarlib.report.text import duration, number, plus_minus, signed_interval
from aarlib.stats import mean_and_std

Summary = Mapping[str, Any]
_BLOCK = re.compile(r"(<!-- run (?P<name>\w+) -->\n).*?(<!-- end run -->)", re.DOTALL)


def read_summaries(folder: Path, names: Sequence[str]) -> dict[str, Summary]:
    """Those of `names` that `folder` holds as <name>.json."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def named_blocks(page: str) -> list[str]:
    return [match["name"] for match in _BLOCK.finditer(page)]


def filled(page: str, summaries: Mapping[str, Summary]) -> str:
    """Every block made again from its summary; ValueError for a block without one."""

    def block(match: re.Match[str]) -> str:
        if match["name"] not in summaries:
            raise ValueError(
                f"the page shows run {match['name']!r}, of which there is no summary; write it with "
                "`python -m pipelines.report RUN_DIR --summary docs/studies/results/NAME.json`"
            )
        return f"{match[1]}{rendered(summaries[match['name']])}\n{match[3]}"

    return _BLOCK.sub(block, page)


def rendered(summary: Summary) -> str:
    """A row for the untouched model and one for each method over its seeds, then what the run was and cost."""
    rows = [row for row in summary["held_out"] if row["label"] == UNTOUCHED]
    for label in summary["methods"]:
        found = [row for row in summary["held_out"] if row["label"] == label]
        rows += [row for row in found if row["seed"] == "mean"] or found[:1]
    tasks = list(dict.fromkeys(row["task"] for row in summary["scores"]))
    head = ["method", "seeds", "held-out CE", "against untouched", "against SFT of the same seed", "step-0 CE"]
    head += [_task_name(summary, task) for task in tasks] + ["trainable", "time (s)", "peak (GiB)"]
    cells = [[*_held_out(row, summary), *(_score(row, summary, task) for task in tasks), *_costs(row)] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{_facts(summary)}"


def _held_out(row: Summary, summary: Summary) -> list[str]:
    label, seeds = row["label"], len(_seeds(summary, row["label"]))
    name = summary["methods"].get(label, label)
    return [
        *(name, str(seeds) if label != UNTOUCHED else "", plus_minus(row["ce"], _nan(row["ce_std"]), 4)),
        *(_interval(row, side) for side in ("vs_untouched", "vs_sft")),
        number(row["step0_ce"], 4),
    ]


def _costs(row: Summary) -> list[str]:
    return [number(row["num_trainable"], 0), number(row["wall_s"], 1), number(row["peak_gib"], 2)]


def _seeds(summary: Summary, label: str) -> list[str]:
    return [row["seed"] for row in summary["held_out"] if row["label"] == label and row["seed"] not in ("", "mean")]


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _interval(row: Summary, side: str) -> str:
    return "" if row[side] is None else signed_interval(row[side], row[f"{side}_low"], row[f"{side}_high"])


def _task_name(summary: Summary, task: str) -> str:
    first = next(row for row in summary["scores"] if row["task"] == task)
    return f"{task} {first['metric']} (n={first['num_documents']})"


def _score(row: Summary, summary: Summary, task: str) -> str:
    found = [s["value"] for s in summary["scores"] if s["task"] == task and s["label"] == row["label"]]
    return plus_minus(*mean_and_std(found), 3) if found else ""


def _facts(summary: Summary) -> str:
    parts = [f"{summary['num_held_out']:,} held-out conversations", f"{summary['steps']:,} steps"]
    if summary["stages"] is not None:
        parts.append(f"all stages {duration(sum(summary['stages']['wall_s'].values()))}")
        parts.append(f"peak of the whole process tree {summary['stages']['peak_gib']:.2f} GiB")
    seeds = sorted({seed for label in summary["methods"] for seed in _seeds(summary, label)}, key=int)
    return f"{'; '.join(parts)}; seeds {', '.join(seeds)}; intervals are 95% bootstraps over conversations."

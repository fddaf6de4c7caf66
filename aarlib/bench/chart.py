"""Time and memory against sequence length: rows as a bench stores them, and their picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from aarlib.bench.process import Turns


def by_length(
    length: int, batch: int, turns: Mapping[str, Turns], memory_gib: Mapping[str, float | None]
) -> dict[str, Any]:
    """JSON-able; memory None: out of memory."""
    seconds = {name: item._asdict() for name, item in turns.items()}
    return {"length": length, "batch": batch, "turns": seconds, "memory_gib": dict(memory_gib)}


def draw(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Median seconds and extra GiB by way, both on logarithmic axes; a way that ran out of memory has no point there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    lengths = [row["length"] for row in rows]
    seconds = [{name: median(turns["wall"]) for name, turns in row["turns"].items() if turns["wall"]} for row in rows]
    peaks = [row["memory_gib"] for row in rows]
    for panel, values, unit in zip(panels, (seconds, peaks), ("s, median", "GiB, extra peak"), strict=True):
        for way in dict.fromkeys(name for row in values for name in row):
            points = [
                (length, row[way]) for length, row in zip(lengths, values, strict=True) if row.get(way) is not None
            ]
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", label=way)
        panel.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=unit)
        panel.set_xticks(lengths, [str(length) for length in lengths], minor=False)
        panel.set_xticks([], minor=True)
        panel.legend(fontsize=7)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path

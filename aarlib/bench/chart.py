"""Time and memory against sequence length, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from aarlib.bench.process import Turns


def draw(
    path: Path,
    title: str,
    lengths: Sequence[int],
    turns: Sequence[Mapping[str, Turns]],
    memory_gib: Sequence[Mapping[str, float | None]],
) -> Path:
    """Median seconds and extra GiB by way, both on logarithmic axes; a way that ran out of memory has no point there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    seconds = [{name: item.seconds for name, item in row.items()} for row in turns]
    for panel, rows, unit in zip(panels, (seconds, memory_gib), ("s, median", "GiB, extra peak"), strict=True):
        for way in dict.fromkeys(name for row in rows for name in row):
            points = [(length, row[way]) for length, row in zip(lengths, rows, strict=True) if row.get(way) is not None]
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", label=way)
        panel.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=unit)
        panel.set_xticks(list(lengths), [str(length) for length in lengths])
        panel.legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    return path

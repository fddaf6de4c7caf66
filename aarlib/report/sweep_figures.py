"""A sweep in one figure: parallel coordinates of its trials, and the metric against each dimension."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from aarlib.report.figures import Theme, _describe
from aarlib.report.records import Sweep
from aarlib.report.tables import _value

METRIC_LABEL = "held-out CE (nats per target token)"


class Dimension(NamedTuple):
    """One varied path: a number in [0, 1] per trial, and what stands at its ticks."""

    name: str
    positions: np.ndarray
    ticks: np.ndarray
    labels: tuple[str, ...]


def sweep_overview(sweep: Sweep, theme: Theme) -> Figure:
    """Trials with a held-out CE; dashed where the scheduler stopped them."""
    trials = sweep.trials.dropna(subset=["held_out_ce"])
    dimensions = [_dimension(path, list(trials[path])) for path in sweep.varied]
    width = max(8.0, 3.0 * len(dimensions))
    figure = Figure(figsize=(width, 7.0), layout=ConstrainedLayoutEngine(hspace=0.08), facecolor=theme.surface)
    grid = figure.add_gridspec(2, len(dimensions))
    _parallel(figure.add_subplot(grid[0, :]), trials, dimensions, theme)
    for index, dimension in enumerate(dimensions):
        _scatter(figure.add_subplot(grid[1, index]), trials, dimension, theme, first=index == 0)
    return figure


def _dimension(path: str, values: Sequence[object]) -> Dimension:
    """Numbers to scale, everything else in order of appearance."""
    name = path.rpartition(".")[2]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        numbers = np.array(values, dtype=float)
        low, high = numbers.min(), numbers.max()
        ticks = np.unique(numbers) if len(np.unique(numbers)) <= 6 else np.linspace(low, high, 5)
        return Dimension(
            name, _scaled(numbers, low, high), _scaled(ticks, low, high), tuple(f"{tick:g}" for tick in ticks)
        )
    texts = [_value(list(value) if isinstance(value, tuple) else value) for value in values]
    distinct = list(dict.fromkeys(texts))
    places = np.array([distinct.index(text) for text in texts], dtype=float)
    last = max(1, len(distinct) - 1)
    return Dimension(name, places / last, np.arange(len(distinct)) / last, tuple(distinct))


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return (values - low) / (high - low) if high > low else np.full(len(values), 0.5)


def _parallel(axis: Axes, trials: pd.DataFrame, dimensions: list[Dimension], theme: Theme) -> None:
    metric = trials["held_out_ce"].to_numpy(dtype=float)
    colours = colormaps["viridis"](_scaled(metric, metric.min(), metric.max()))
    metric_axis = _dimension("x.held-out CE", list(metric))
    axes = [*dimensions, metric_axis]
    _describe(axis, theme, "Trials", "", "")
    axis.set_xticks(range(len(axes)), [dimension.name for dimension in axes])
    axis.set_yticks([])
    for index, status in enumerate(trials["status"]):
        line = [dimension.positions[index] for dimension in axes]
        axis.plot(line, color=colours[index], linewidth=1.5, linestyle="-" if status == "finished" else "--")
    for place, dimension in enumerate(axes):
        axis.axvline(place, color=theme.muted, linewidth=0.8)
        for tick, label in zip(dimension.ticks, dimension.labels, strict=True):
            axis.annotate(label, (place, tick), xytext=(4, 2), textcoords="offset points", fontsize=8, color=theme.ink)


def _scatter(axis: Axes, trials: pd.DataFrame, dimension: Dimension, theme: Theme, first: bool) -> None:
    finished = (trials["status"] == "finished").to_numpy()
    metric = trials["held_out_ce"].to_numpy(dtype=float)
    _describe(axis, theme, dimension.name, "", METRIC_LABEL if first else "")
    axis.plot(dimension.positions[finished], metric[finished], "o", color=theme.series[0], markersize=5)
    axis.plot(dimension.positions[~finished], metric[~finished], "x", color=theme.muted, markersize=5)
    axis.set_xticks(dimension.ticks, dimension.labels, rotation=30, ha="right")

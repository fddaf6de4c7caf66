"""Tables to matplotlib figures: figure objects only, no pyplot state; each in a light or a dark theme."""

import io
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from aarlib.report.records import RunRecords
from aarlib.report.tables import UNTOUCHED


class Theme(NamedTuple):
    name: str
    ink: str
    muted: str
    grid: str
    surface: str
    series: tuple[str, ...]
    """Distinct under the common colour-vision deficiencies, in the order in which methods take them."""


LIGHT = Theme(
    "light", "#1f2328", "#59636e", "#e3e6ea", "#ffffff",
    ("#1f6fb4", "#d1660a", "#1b8a5a", "#8e44ad", "#b5322f", "#7a6a00", "#00808a"),
)  # fmt: skip
DARK = Theme(
    "dark", "#e8eaed", "#a2abb5", "#30363d", "#15181c",
    ("#6cb2f0", "#f0a04b", "#5cc795", "#c99be0", "#ef8a84", "#d3c14a", "#5ccbd4"),
)  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v", "P", "X")


class Style(NamedTuple):
    colour: str
    marker: str


def styles(labels: Sequence[str], theme: Theme) -> dict[str, Style]:
    """Colour and marker of each method, the same in every figure of a page."""
    found = {
        label: Style(theme.series[i % len(theme.series)], MARKERS[i % len(MARKERS)]) for i, label in enumerate(labels)
    }
    return found | {UNTOUCHED: Style(theme.muted, "o")}


def training_curves(records: RunRecords, theme: Theme) -> Figure:
    """Against step: training CE, its difference to SFT of the same seed on the same batch, and picks changed."""
    curves = [("Training cross-entropy", "CE (nats per target token)", _metric(records, "train/ce"))]
    if records.baseline is not None and len(records.labels) > 1:
        curves.append(
            ("Training CE minus that of SFT", "CE difference (nats per target token)", _minus_baseline(records))
        )
    picks = {name: 100 * curve for name, curve in _metric(records, "routing/picks_changed").items()}
    curves.append(("Expert picks changed", "picks unlike the stock router's (%)", picks))
    figure, axes = _panels(theme, len(curves), height=3.3, width=12.0)
    for axis, (title, ylabel, by_run) in zip(axes, curves, strict=True):
        _describe(axis, theme, title, "optimizer step", ylabel)
        for label, style in _method_styles(records, theme):
            _curve(axis, [curve for (name, _), curve in by_run.items() if name == label], label, style)
    _legend(axes[0], theme)
    return figure


def _metric(records: RunRecords, key: str) -> dict[tuple[str, int], pd.Series]:
    """By (label, seed)."""
    return {
        (record.label, record.run.seed): pd.Series(list(record.metrics[key]), index=list(record.metrics["step"]))
        for record in records.runs
        if key in record.metrics
    }


def _minus_baseline(records: RunRecords) -> dict[tuple[str, int], pd.Series]:
    curves = _metric(records, "train/ce")
    return {
        (label, seed): curve - curves[records.baseline, seed]
        for (label, seed), curve in curves.items()
        if label != records.baseline and records.baseline is not None and (records.baseline, seed) in curves
    }


def _curve(axis: Axes, curves: Sequence[pd.Series], label: str, style: Style) -> None:
    if not curves:
        return
    if len(curves) > 1:
        for curve in curves:
            axis.plot(list(curve.index), list(curve), color=style.colour, alpha=0.35, linewidth=0.9)
    mean = sum(curves[1:], curves[0]) / len(curves)
    axis.plot(list(mean.index), list(mean), color=style.colour, linewidth=2.0, label=label)


def held_out_differences(table: pd.DataFrame, theme: Theme) -> Figure:
    """Held-out CE difference against the untouched model and against SFT of the same seed, with 95% intervals."""
    rows = [row for row in table.to_dict("records") if row["label"] != UNTOUCHED]
    references = {"vs_untouched": "Against the untouched model", "vs_sft": "Against routing-only SFT, same seed"}
    shown = [name for name in references if any(pd.notna(row[name]) for row in rows)]
    figure, axes = _panels(theme, len(shown), height=1.3 + 0.3 * len(rows))
    style = styles(list(dict.fromkeys(row["label"] for row in rows)), theme)
    for axis, name in zip(axes, shown, strict=True):
        _describe(axis, theme, references[name], "held-out CE difference (nats per target token)", "")
        axis.axvline(0, color=theme.muted, linewidth=1)
        for position, row in enumerate(rows):
            if pd.notna(row[name]):
                _interval(axis, row, name, position, style[row["label"]])
        names = [f"{row['label']}  {'mean' if row['seed'] == 'mean' else 'seed ' + row['seed']}" for row in rows]
        _name_rows(axis, names, visible=axis is axes[0])
    return figure


def _interval(axis: Axes, row: dict[Hashable, Any], name: str, position: int, style: Style) -> None:
    wide = row["seed"] == "mean"
    ends = [row[f"{name}_low"], row[f"{name}_high"]]
    axis.plot(ends, [position, position], color=style.colour, linewidth=2.6 if wide else 1.4)
    axis.plot([row[name]], [position], marker=style.marker, color=style.colour, markersize=8 if wide else 5)


def task_scores(scores: pd.DataFrame, theme: Theme) -> Figure:
    """Main metric of each task: a dot per (method, seed) with its standard error."""
    rows = scores.to_dict("records")
    tasks, labels = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "label"))
    figure, axes = _panels(theme, len(tasks), height=1.5 + 0.3 * len(labels))
    style = styles([label for label in labels if label != UNTOUCHED], theme)
    for axis, task in zip(axes, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        xlabel = f"{of_task[0]['metric']} ({of_task[0]['num_documents']} documents, bar: standard error)"
        _describe(axis, theme, task, xlabel, "")
        for position, label in enumerate(labels):
            _scores(axis, [row for row in of_task if row["label"] == label], position, style[label])
        _name_rows(axis, labels, visible=axis is axes[0])
    return figure


def _scores(axis: Axes, rows: list[dict[Hashable, Any]], position: int, style: Style) -> None:
    for index, row in enumerate(rows):
        y = position + 0.18 * (index - (len(rows) - 1) / 2)
        if pd.notna(row["stderr"]):
            ends = [row["value"] - row["stderr"], row["value"] + row["stderr"]]
            axis.plot(ends, [y, y], color=style.colour, linewidth=1.2)
        axis.plot([row["value"]], [y], marker=style.marker, color=style.colour, markersize=5.5)


def routing_change(routing: pd.DataFrame, records: RunRecords, theme: Theme) -> Figure:
    """By layer, after training: picks changed, and the largest expert's share of the picks."""
    figure, axes = _panels(theme, 2, height=3.1)
    panels = (
        ("picks_changed", "Picks changed by layer", "picks unlike the stock router's (%)"),
        ("expert_load_max_share", "Load of the busiest expert", "share of the layer's picks (%)"),
    )
    for axis, (key, title, ylabel) in zip(axes, panels, strict=True):
        _describe(axis, theme, title, "decoder layer", ylabel)
        for label, style in _method_styles(records, theme):
            layers, shares = _mean_by_layer(routing, label, key)
            axis.plot(layers, shares, color=style.colour, marker=style.marker, markersize=5, label=label)
        axis.set_xticks(sorted(set(routing["layer"])))
    _legend(axes[0], theme)
    return figure


def _mean_by_layer(routing: pd.DataFrame, label: str, key: str) -> tuple[list[int], list[float]]:
    """Percent, mean over seeds."""
    found: dict[int, list[float]] = {}
    for row in routing.to_dict("records"):
        if row["label"] == label:
            found.setdefault(row["layer"], []).append(100 * row[key])
    return sorted(found), [sum(found[layer]) / len(found[layer]) for layer in sorted(found)]


def sweep_trials(trials: pd.DataFrame, theme: Theme) -> Figure:
    """Held-out CE difference of each finished trial (`setting`, mean, low, high), best on top."""
    figure, (axis,) = _panels(theme, 1, height=1.3 + 0.34 * len(trials), width=8.5)
    xlabel = "held-out CE difference to the untouched model (nats per target token)"
    _describe(axis, theme, "Sweep trials, best on top", xlabel, "")
    axis.axvline(0, color=theme.muted, linewidth=1)
    for position, row in enumerate(trials.to_dict("records")):
        axis.plot([row["low"], row["high"]], [position, position], color=theme.series[0], linewidth=2)
        axis.plot([row["mean"]], [position], "o", color=theme.series[0], markersize=6)
    _name_rows(axis, list(trials["setting"]), visible=True)
    return figure


def as_svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "aarlib"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _method_styles(records: RunRecords, theme: Theme) -> list[tuple[str, Style]]:
    style = styles(records.labels, theme)
    return [(label, style[label]) for label in records.labels]


def _panels(theme: Theme, count: int, height: float, width: float = 10.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06), facecolor=theme.surface)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    return figure, axes


def _describe(axis: Axes, theme: Theme, title: str, xlabel: str, ylabel: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=theme.ink, fontweight="bold", pad=8)
    axis.set_xlabel(xlabel, fontsize=9, color=theme.muted)
    axis.set_ylabel(ylabel, fontsize=9, color=theme.muted)
    axis.set_facecolor("none")
    axis.tick_params(colors=theme.muted, labelsize=9, length=0)
    axis.grid(visible=True, color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(theme.grid)
    for label in axis.get_yticklabels():
        label.set_color(theme.ink)


def _name_rows(axis: Axes, names: Sequence[str], visible: bool) -> None:
    """Rows from top to bottom, named where `visible`."""
    axis.set_yticks(range(len(names)), names if visible else [""] * len(names))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")


def _legend(axis: Axes, theme: Theme) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=9, labelcolor=theme.ink)

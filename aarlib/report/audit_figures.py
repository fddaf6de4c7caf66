"""The audit's figures from its results: utility by router rank, captured share, gain by layer with intervals."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from aarlib.report.figures import LIGHT, styles

ALL, POOLED = "all", "pooled"


def write_figures(measures: pd.DataFrame, ranks: pd.DataFrame, folder: Path) -> list[Path]:
    """A PNG file for every horizon of the audit's tables `measures` and `by_rank`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for horizon in dict.fromkeys(measures["horizon"]):
        paths.append(folder / f"audit_{horizon}.png")
        figure_of(measures, ranks, horizon).savefig(paths[-1], dpi=120)
    return paths


def figure_of(measures: pd.DataFrame, ranks: pd.DataFrame, horizon: str) -> Figure:
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    of_horizon = _rows(measures, (measures["horizon"] == horizon) & (measures["seed"] == ALL))
    by_rank(axes[0], _rows(ranks, ranks["horizon"] == horizon))
    captured(axes[1], of_horizon)
    by_layer(axes[2], of_horizon)
    return figure


def by_rank(axes: Axes, ranks: pd.DataFrame) -> None:
    utility = _rows(ranks, ranks["measure"].str.startswith("utility_"))
    for domain, part in _domains(utility):
        place = part["measure"].str.removeprefix("utility_").astype(int)
        _errorbars(axes, list(place), part, domain, list(dict.fromkeys(ranks["domain"])))
    axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
    axes.set(
        xlabel="router rank of the slot", ylabel="utility of committing to it (nats)", title="Utility by router rank"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7)


def captured(axes: Axes, measures: pd.DataFrame) -> None:
    names = {"vertex_share": "vertices / structured", "gradient_captured": "gradient / vertices"}
    domains = list(dict.fromkeys(measures["domain"]))
    for name in names:
        part = _rows(measures, (measures["measure"] == name) & (measures["layer"] == POOLED))
        shift = 0.2 * (list(names).index(name) - 0.5)
        _errorbars(
            axes,
            [domains.index(domain) + shift for domain in part["domain"]],
            part,
            names[name],
            list(names.values()),
            "",
        )
    axes.set(xticks=range(len(domains)), ylabel="share of the oracle's gain", title="Captured share")
    axes.set_xticklabels(domains, rotation=20)
    axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
    axes.legend(fontsize=7)


def by_layer(axes: Axes, measures: pd.DataFrame) -> None:
    part = _rows(measures, (measures["measure"] == "structured_oracle") & (measures["layer"] != POOLED))
    for domain, rows in _domains(part):
        _errorbars(axes, rows["layer"].astype(int).tolist(), rows, domain, list(dict.fromkeys(part["domain"])))
    axes.axhline(0, color=LIGHT.muted, linewidth=0.8)
    axes.set(xlabel="layer", ylabel="delta CE of the structured oracle (nats)", title="Headroom by layer")
    axes.set_xticks(sorted(set(part["layer"].astype(int))))
    axes.legend(fontsize=7)


def _rows(frame: pd.DataFrame, keep: Any) -> pd.DataFrame:
    return pd.DataFrame(frame.loc[keep])


def _domains(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(domain), _rows(frame, frame["domain"] == domain)) for domain in dict.fromkeys(frame["domain"])]


def _errorbars(axes: Axes, x: list[float], rows: pd.DataFrame, label: str, labels: list[str], line: str = "-") -> None:
    style = styles(labels, LIGHT)[label]
    error = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
    axes.errorbar(
        x,
        rows["value"],
        yerr=error,
        label=label,
        color=style.colour,
        marker=style.marker,
        linestyle=line or "none",
        capsize=2,
    )

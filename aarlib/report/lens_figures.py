"""Figures of the lens: sender x receiver maps, ranked senders with intervals, prediction and removal. Figure objects only."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from aarlib.report.figures import LIGHT, MARKERS, Theme
from aarlib.report.figures import _describe as describe
from aarlib.report.figures import _legend as legend
from aarlib.report.figures import _name_rows as name_rows
from aarlib.report.figures import _panels as panels

TITLES = {
    "variance": "Influence: variance over experts",
    "aps": "Promotion: mean positive score",
    "ans": "Suppression: mean negative score",
}


def sender_maps(frames: Mapping[str, pd.DataFrame], theme: Theme = LIGHT) -> Figure:
    """Variance (logarithmic), APS and ANS of every sender at every receiver; APS and ANS share one zero-centred scale."""
    height = 1.6 + 0.24 * len(frames["variance"])
    figure, axes = panels(theme, 3, height=height, width=13.0)
    variance = frames["variance"].to_numpy()
    largest = max(float(np.nanmax(np.abs(frames[name].to_numpy()))) for name in ("aps", "ans"))
    most = float(np.nanmax(variance))
    norms = {
        "variance": LogNorm(max(float(np.nanmin(variance[variance > 0])), 1e-4 * most), most),
        "aps": TwoSlopeNorm(0, -largest, largest),
        "ans": TwoSlopeNorm(0, -largest, largest),
    }
    for axis, name in zip(axes, TITLES, strict=True):
        colours = "viridis" if name == "variance" else "RdBu_r"
        image = heat_map(axis, frames[name], colours, norms[name], theme, TITLES[name], named=axis is axes[0])
        figure.colorbar(image, ax=axis, shrink=0.8, pad=0.02)
    return figure


def heat_map(axis: Axes, frame: pd.DataFrame, colours: str, norm: Any, theme: Theme, title: str, named: bool) -> Any:
    describe(axis, theme, title, "receiving router (layer)", "")
    values = np.ma.masked_invalid(frame.to_numpy(dtype=np.float64))
    image = axis.imshow(values, aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
    axis.set_xticks(range(len(frame.columns)), [str(column) for column in frame.columns])
    name_rows(axis, [str(name) for name in frame.index], visible=named)
    axis.grid(visible=False)
    return image


def ranked_senders(tables: dict[str, pd.DataFrame], source: str, theme: Theme = LIGHT) -> Figure:
    """The most influential heads, experts and neurons, with 95% intervals."""
    chosen = [name for name in ("top_heads", "top_experts", "top_neurons") if name in tables]
    frames = [_of(tables[name], source) for name in chosen]
    figure, axes = panels(theme, len(chosen), height=1.3 + 0.3 * max(len(frame) for frame in frames), width=13.0)
    for axis, name, frame in zip(axes, chosen, frames, strict=True):
        describe(axis, theme, f"Most influential {name.removeprefix('top_')}", "variance, summed over receivers", "")
        interval_rows(axis, frame, theme.series[0])
        name_rows(axis, list(frame["sender"]), visible=True)
        axis.set_xlim(left=0)
    return figure


def interval_rows(axis: Axes, frame: pd.DataFrame, colour: str) -> None:
    for position, row in enumerate(frame.to_dict("records")):
        axis.barh(position, row["value"], color=colour, alpha=0.35, height=0.62)
        axis.plot([row["low"], row["high"]], [position, position], color=colour, linewidth=2.4)


def by_receiver(tables: dict[str, pd.DataFrame], source: str, theme: Theme = LIGHT) -> Figure:
    """MoE against attention senders at each receiver, and picks predicted from earlier layers."""
    figure, axes = panels(theme, 2, height=3.4, width=11.0)
    describe(axes[0], theme, "Mean variance of a sender", "receiving router (layer)", "variance over experts")
    kinds = _of(tables["kinds"], source)
    for index, (kind, label) in enumerate((("moe", "MoE outputs"), ("attn", "attention outputs"))):
        part = kinds[kinds["measure"] == kind]
        _line(axes[0], part, "receiver", theme.series[index], MARKERS[index], label)
    axes[0].set_yscale("log")
    describe(axes[1], theme, "Picks predicted from earlier layers", "receiving router (layer)", "recall at K")
    recall = _of(tables["recall"], source)
    for index, (lag, part) in enumerate(recall.groupby("lag")):
        _line(
            axes[1], part, "receiver", theme.series[index], MARKERS[index], f"{lag} layer{'s' if lag > 1 else ''} ahead"
        )
    common = recall.drop_duplicates("receiver").sort_values("receiver")
    axes[1].plot(common["receiver"], common["commonest"], color=theme.muted, linestyle="--", label="commonest experts")
    axes[1].plot(common["receiver"], common["chance"], color=theme.muted, linestyle=":", label="chance")
    legend(axes[0], theme)
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, labelcolor=theme.ink)
    return figure


def removal(tables: dict[str, pd.DataFrame], theme: Theme = LIGHT) -> Figure:
    """CE after dropping attention layers by influence, and what removing experts of high and low influence did."""
    figure, axes = panels(theme, 2, height=3.4, width=11.0)
    describe(axes[0], theme, "Attention layers dropped", "number of layers", "CE change (nats per token)")
    dropped = tables["attention"]
    for index, (how, label) in enumerate((("lowest", "lowest variance first"), ("highest", "highest variance first"))):
        _line(axes[0], dropped[dropped["how"] == how], "count", theme.series[index], MARKERS[index], label)
    legend(axes[0], theme)
    describe(axes[1], theme, "One expert removed", "CE change (nats per token)", "")
    part: Any = tables["ablation"][tables["ablation"]["measure"] == "ce_delta"]
    axes[1].axvline(0, color=theme.muted, linewidth=1)
    interval_rows(axes[1], part, theme.series[0])
    names = [f"{row['group']}, {row['how'].replace('_', ' ')}" for row in part.to_dict("records")]
    name_rows(axes[1], names, visible=True)
    return figure


def heads_of_the_task(tables: dict[str, pd.DataFrame], theme: Theme = LIGHT) -> Figure:
    """Every head: direct effect on the answer's logit difference against the variance of its scores at the last token."""
    figure, (axis,) = panels(theme, 1, height=4.0, width=7.0)
    title = "Heads in indirect object identification"
    describe(axis, theme, title, "direct effect on the logit difference", "variance at the last token")
    heads = tables["ioi_heads"]
    axis.scatter(heads["value"], heads["last_variance"], color=theme.series[0], s=26)
    for row in heads.head(5).to_dict("records"):
        place = (row["value"], row["last_variance"])
        axis.annotate(row["head"], place, (4, 4), textcoords="offset points", fontsize=8, color=theme.ink)
    axis.axvline(0, color=theme.muted, linewidth=1)
    return figure


def head_maps(pairs: pd.DataFrame, head: str, theme: Theme = LIGHT) -> Figure:
    """A head on one prompt: its attention weights, and the variance of each (query, key) pair's scores at later routers."""
    part: Any = pairs[pairs["name"] == head]
    tokens = part.drop_duplicates("query").sort_values("query")["token"].to_list()
    figure, axes = panels(theme, 2, height=1.4 + 0.28 * len(tokens), width=12.0)
    titles = {
        "attention": f"{head}: attention weight",
        "influence": f"{head}: variance of its scores, all routers",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        frame = part.pivot(index="query", columns="key", values=name)
        frame.index = frame.columns = pd.Index(tokens)
        largest = float(np.nanmax(frame.to_numpy()))
        image = heat_map(axis, frame, "viridis", Normalize(0.0, largest), theme, title, named=True)
        axis.set_xlabel("key")
        axis.tick_params(axis="x", rotation=90)
        figure.colorbar(image, ax=axis, shrink=0.8, pad=0.02)
    return figure


def _of(frame: pd.DataFrame, source: str) -> Any:
    return frame[frame["source"] == source]


def _line(axis: Axes, part: Any, along: str, colour: str, marker: str, label: str) -> None:
    part = part.sort_values(along)
    axis.plot(part[along], part["value"], color=colour, marker=marker, markersize=5, label=label)
    axis.fill_between(part[along], part["low"], part["high"], color=colour, alpha=0.2, linewidth=0)


def figures(
    maps: Mapping[str, pd.DataFrame],
    tables: dict[str, pd.DataFrame],
    source: str,
    theme: Theme = LIGHT,
    pairs: pd.DataFrame | None = None,
) -> dict[str, Figure]:
    """`maps`: sender x receiver frames by the names of TITLES; `pairs`: both maps of the heads on one prompt (heads of linear
    attention have none)."""
    found = {
        "sender_maps": sender_maps(maps, theme),
        "ranked_senders": ranked_senders(tables, source, theme),
        "by_receiver": by_receiver(tables, source, theme),
    }
    if "attention" in tables:
        found["removal"] = removal(tables, theme)
    if "ioi_heads" in tables:
        found["ioi_heads"] = heads_of_the_task(tables, theme)
        mapped = set() if pairs is None else set(pairs["name"])
        shown = [head for head in tables["ioi_heads"]["head"] if head in mapped]
        if pairs is not None and shown:
            found["ioi_maps"] = head_maps(pairs, shown[0], theme)
    return found

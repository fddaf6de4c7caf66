"""Tables of the lens's round two: what happened when experts and attention layers were taken away, and IOI."""

from typing import Any

import numpy as np
import pandas as pd

from aarlib.studies.lens_samples import mean_interval, rank_correlation, resampled

FUNCTIONAL_HEADS = 3
"""Heads with the largest direct effect that are set beside all others."""


def causal_tables(causal: pd.DataFrame, influence: Any = None) -> dict[str, pd.DataFrame]:
    """`influence`: variance of each ablated expert by name, for the rank correlation with what its removal did."""
    found: dict[str, pd.DataFrame] = {}
    records = set(causal["record"]) if len(causal) else set()
    if "ablation" in records:
        found["ablation"] = ablation(causal)
        found["coexistence"] = coexistence(causal)
        found["attention"] = attention(causal)
        if influence is not None:
            found["ablation_ranks"] = ablation_ranks(causal, influence)
    if "ioi_heads" in records:
        found |= ioi_tables(causal)
    return found


def _of(frame: pd.DataFrame, **fields: Any) -> Any:
    for name, value in fields.items():
        frame = frame[frame[name] == value]  # pyright: ignore[reportAssignmentType]
    return frame


def _interval_row(values: Any, texts: Any = None, **fields: Any) -> dict[str, Any]:
    """Mean with its interval; `values` by piece and `texts` by piece: whole texts are resampled, else the values."""
    if texts is None:
        found = mean_interval(np.asarray(values, dtype=np.float64))
    else:
        groups = values.dropna().groupby(texts)
        table = resampled(np.stack([groups.sum().to_numpy(np.float64), groups.size().to_numpy(np.float64)], axis=1))
        found = table.interval(lambda sums: sums[..., 0] / sums[..., 1])
    return {**fields, "value": found.mean, "low": found.low, "high": found.high}


def texts_of(causal: Any) -> Any:
    """The text of each piece that something was taken away on; None where the records do not say."""
    if "text" not in causal or causal["text"].isna().all():
        return None
    return causal.dropna(subset=["text"]).drop_duplicates("document").set_index("document")["text"]


def ablation(causal: pd.DataFrame) -> pd.DataFrame:
    """Mean over a group's experts, then over pieces: CE change, and changed picks and moved logits of later routers."""
    rows, texts = [], texts_of(causal)
    for group in ("top", "bottom"):
        for how in ("zero", "route_around"):
            part = _of(causal, record="ablation", group=group, how=how)
            for measure in ("ce_delta", "picks_changed", "logits_moved"):
                by_piece = part.dropna(subset=[measure]).groupby("document")[measure].mean()
                rows.append(_interval_row(by_piece, texts, group=group, how=how, measure=measure))
    return pd.DataFrame(rows)


def ablation_ranks(causal: pd.DataFrame, influence: Any) -> pd.DataFrame:
    """Over the ablated experts: rank correlation of influence with the mean effects of removal; interval over experts."""
    rows = []
    for how in ("zero", "route_around"):
        part = _of(causal, record="ablation", how=how)
        for measure in ("ce_delta", "picks_changed", "logits_moved"):
            effects = part.dropna(subset=[measure]).groupby("name")[measure].mean()
            names = [name for name in effects.index if name in influence.index]
            found = rank_correlation(influence[names].to_numpy(float), effects[names].to_numpy(float))
            rows.append({"how": how, "measure": measure, "experts": len(names), **found._asdict()})
    return pd.DataFrame(rows).rename(columns={"mean": "value"})


def coexistence(causal: pd.DataFrame) -> pd.DataFrame:
    """Without the first, the second, both: CE, moved logits of each later router; how often the second was chosen, its variance.

    CE of both minus the sum of each alone is 0 where the two removals do not know of one another.
    """
    texts, rows, changes = texts_of(causal), [], {}
    for name in ("first", "second", "both"):
        part = _of(causal, record="coexistence", name=name)
        changes[name] = part.dropna(subset=["ce_delta"]).set_index("document")["ce_delta"]
        rows.append(_interval_row(changes[name], texts, without=name, measure="CE change"))
        for receiver, group in part.dropna(subset=["receiver"]).groupby("receiver"):
            values = group.groupby("document")["logits_moved"].mean()
            rows.append(_interval_row(values, texts, without=name, measure=f"logits moved, router {int(receiver)}"))
    apart = changes["both"] - changes["first"] - changes["second"]
    rows.append(_interval_row(apart, texts, without="both minus each", measure="CE change"))
    measures = {"value": "second expert chosen", "influence": "second expert's variance, all later routers"}
    activation = _of(causal, record="activation")
    for column, measure in measures.items():
        found = {name: _second(group, column) for name, group in activation.groupby("name", sort=False)}
        rows += [_interval_row(found[name], texts, without=name, measure=measure) for name in found]
        if {"first", "stock"} <= found.keys():
            change = found["first"] - found["stock"]
            rows.append(_interval_row(change, texts, without="first minus stock", measure=measure))
    return pd.DataFrame(rows)


def _second(activation: Any, column: str) -> Any:
    """By piece: share of tokens that choose the second expert, or its variance summed over later routers."""
    by_piece = activation.groupby("document")[column]
    return by_piece.first() if column == "value" else by_piece.sum()


def attention(causal: pd.DataFrame) -> pd.DataFrame:
    """CE change without the n lowest- or highest-variance attention layers, and their paired difference."""
    part, texts, rows = _of(causal, record="attention"), texts_of(causal), []
    for (how, name), group in part.groupby(["how", "name"], sort=False):
        layers = len(name.split(","))
        rows.append(_interval_row(group.set_index("document")["ce_delta"], texts, how=how, layers=name, count=layers))
    sizes = sorted({row["count"] for row in rows})
    for size in sizes:
        sides = []
        for how in ("lowest", "highest"):
            names = [row["layers"] for row in rows if row["how"] == how and row["count"] == size]
            if names:
                sides.append(_of(part, how=how, name=names[0]).set_index("document")["ce_delta"])
        if len(sides) == 2:
            rows.append(_interval_row(sides[1] - sides[0], texts, how="highest minus lowest", layers="", count=size))
    return pd.DataFrame(rows)


def ioi_tables(causal: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """`ioi_heads`: every head, most direct effect first; `ioi`: the functional heads against the others.

    Functional heads are chosen on prompts with an even number, and their variance is reported on the others.
    """
    part = _of(causal, record="ioi_heads")
    values = {
        name: part.pivot(index="document", columns="name", values=name_of) for name, name_of in _HEAD_VALUES.items()
    }
    chosen = values["direct"][values["direct"].index % 2 == 0]
    order = chosen.mean().abs().sort_values(ascending=False).index
    maps = _of(causal, record="ioi_maps").pivot(index="document", columns="name", values="value")
    heads = []
    for name in order:
        row = _interval_row(values["direct"][name], head=name)
        row |= {f"{side}_variance": float(values[side][name].mean()) for side in ("last", "all")}
        row["map correlation"] = float(maps[name].mean()) if name in maps else np.nan
        heads.append(row)
    functional, others = list(order[:FUNCTIONAL_HEADS]), list(order[FUNCTIONAL_HEADS:])
    rows = []
    difference = _of(causal, record="logit_difference")["value"]
    rows.append(_interval_row(difference > 0, measure="prompts with the answer above the repeated name"))
    rows.append(_interval_row(difference, measure="logit difference"))
    rows.append(_interval_row(values["direct"].sum(axis=1), measure="of it, written directly by all heads together"))
    measured = values["direct"].index % 2 == 1
    for side, text in (("last", "at the last token"), ("all", "over all tokens")):
        variance = values[side][measured]
        both = [variance[names].mean(axis=1) for names in (functional, others)]
        rows.append(_interval_row(both[0], measure=f"variance of the functional heads, {text}"))
        rows.append(_interval_row(both[1], measure=f"variance of the other heads, {text}"))
        rows.append(_interval_row(both[0] - both[1], measure=f"difference, {text}"))
        same_layer = [variance[name] - variance[_neighbours(name, others)].mean(axis=1) for name in functional]
        rows.append(_interval_row(sum(same_layer) / len(same_layer), measure=f"difference within the layer, {text}"))
        found = rank_correlation(values["direct"].mean().abs()[order].to_numpy(), values[side].mean()[order].to_numpy())
        name = f"rank correlation of absolute direct effect and variance over heads, {text}"
        rows.append({"measure": name, "value": found.mean, "low": found.low, "high": found.high})
    for names, text in ((functional, "functional"), (others, "other")):
        kept = [name for name in names if name in maps]
        if kept:
            rows.append(_interval_row(maps[kept].mean(axis=1), measure=f"map correlation, {text} heads"))
    return {"ioi_heads": pd.DataFrame(heads), "ioi": pd.DataFrame(rows)}


def _neighbours(name: str, others: list[str]) -> list[str]:
    """Other heads of the same layer."""
    return [other for other in others if other.rsplit(".", 2)[0] == name.rsplit(".", 2)[0]]


_HEAD_VALUES = {"direct": "direct", "last": "influence", "all": "influence_all"}

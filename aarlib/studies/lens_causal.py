"""Tables of the lens's round two: what happened when experts and attention layers were taken away, and IOI."""

from typing import Any

import numpy as np
import pandas as pd

from aarlib.studies.lens import rank_correlation
from aarlib.studies.lens_samples import mean_interval

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


def _interval_row(values: Any, **fields: Any) -> dict[str, Any]:
    found = mean_interval(np.asarray(values, dtype=np.float64))
    return {**fields, "value": found.mean, "low": found.low, "high": found.high}


def ablation(causal: pd.DataFrame) -> pd.DataFrame:
    """Mean over a group's experts, then over documents: CE change, and changed picks and moved logits of later routers."""
    rows = []
    for group in ("top", "bottom"):
        for how in ("zero", "route_around"):
            part = _of(causal, record="ablation", group=group, how=how)
            for measure in ("ce_delta", "picks_changed", "logits_moved"):
                by_document = part.dropna(subset=[measure]).groupby("document")[measure].mean()
                rows.append(_interval_row(by_document, group=group, how=how, measure=measure))
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
    """Without the first, the second, both: moved logits of each later router; how often the second was chosen."""
    rows = []
    for name in ("first", "second", "both"):
        part = _of(causal, record="coexistence", name=name)
        rows.append(_interval_row(part.dropna(subset=["ce_delta"])["ce_delta"], without=name, measure="CE change"))
        for receiver, group in part.dropna(subset=["receiver"]).groupby("receiver"):
            values = group.groupby("document")["logits_moved"].mean()
            rows.append(_interval_row(values, without=name, measure=f"logits moved, router {int(receiver)}"))
    for name, group in _of(causal, record="activation").groupby("name", sort=False):
        row = {"value": float(group["value"].iloc[0]), "low": np.nan, "high": np.nan}
        rows.append({"without": name, "measure": "second expert chosen", **row})
        row["value"] = float(group["influence"].sum())
        rows.append({"without": name, "measure": "second expert's variance, all later routers", **row})
    return pd.DataFrame(rows)


def attention(causal: pd.DataFrame) -> pd.DataFrame:
    """CE change without the n lowest- or highest-variance attention layers, and their paired difference."""
    part = _of(causal, record="attention")
    rows = []
    for (how, name), group in part.groupby(["how", "name"], sort=False):
        layers = len(name.split(","))
        rows.append(_interval_row(group["ce_delta"], how=how, layers=name, count=layers))
    sizes = sorted({row["count"] for row in rows})
    for size in sizes:
        sides = []
        for how in ("lowest", "highest"):
            names = [row["layers"] for row in rows if row["how"] == how and row["count"] == size]
            if names:
                sides.append(_of(part, how=how, name=names[0]).set_index("document")["ce_delta"])
        if len(sides) == 2:
            rows.append(_interval_row(sides[1] - sides[0], how="highest minus lowest", layers="", count=size))
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

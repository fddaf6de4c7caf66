"""The tables of the lens: the findings of *Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs* (ICLR
2026), one table each. Records of `pipelines.decompose` in, frames out. Intervals are 95%, over documents unless said.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from aarlib.stats import Interval, spearman
from aarlib.studies.lens_samples import Array, Senders, depth, rank_correlation, resampled, row_of, senders_of

TOP = 10


def lens_tables(records: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Every table of round one, all sources below one another in each."""
    tables: dict[str, list[pd.DataFrame]] = {}
    sources = list(dict.fromkeys(records["source"].dropna()))
    levels = set(records["level"].dropna())
    for source in sources:
        layers = senders_of(records, source, "layer")
        found = {
            "kinds": kinds(layers),
            "embedding": embedding(layers),
            "locality": locality(layers),
            "stripes": stripes(layers),
            "first_position": first_position(layers),
            "recall": recall(records, source),
        }
        by_level = {
            level: senders_of(records, source, level) for level in ("head", "expert", "neuron") if level in levels
        }
        found |= {f"top_{level}s": top_senders(senders) for level, senders in by_level.items()}
        found["concentration"] = concentration(by_level)
        if "expert" in by_level:
            found["super_experts"] = super_experts(by_level["expert"])
        with_aarv = {"layer": layers, **by_level}
        found["aarv"] = variance_against_aarv({n: s for n, s in with_aarv.items() if "aarv" in s.sums})
        for name, frame in found.items():
            tables.setdefault(name, []).append(frame.assign(source=source))
    return {name: _source_first(pd.concat(frames, ignore_index=True)) for name, frames in tables.items()}


def ratio(numerator: int, denominator: int) -> Callable[[Array], Array]:
    """Of two columns of resampled sums."""
    return lambda sums: sums[..., numerator] / sums[..., denominator]


def _source_first(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[["source", *(name for name in frame if name != "source")]]  # pyright: ignore[reportReturnType]


def kinds(layers: Senders) -> pd.DataFrame:
    """Mean variance of the MoE senders and of the attention senders of each receiver, and their ratio.

    Senders of the same layers only: attention and MoE parts of layers 0..receiver-1 (not the receiver's own attention).
    """
    sums, rows = layers.sums["variance"], []
    for index, receiver in enumerate(layers.receivers):
        groups = {
            kind: [i for i in layers.indices(kind) if layers.reached[i, index] and depth(layers.senders[i]) < receiver]
            for kind in ("moe", "attn")
        }
        if not groups["moe"]:
            continue
        pairs = [layers.senders[i].replace("moe.", "attn.") for i in groups["moe"]]
        groups["attn"] = [i for i in groups["attn"] if layers.senders[i] in pairs]
        means = np.stack([sums[:, groups[kind], index].mean(1) for kind in ("moe", "attn")], axis=1)
        table = resampled(np.concatenate([means, layers.tokens[:, None]], axis=1))
        for column, kind in enumerate(("moe", "attn")):
            rows.append(row_of(table.interval(ratio(column, 2)), receiver=receiver, measure=kind))
        rows.append(row_of(table.interval(ratio(0, 1)), receiver=receiver, measure="moe / attn"))
    return pd.DataFrame(rows)


def embedding(layers: Senders) -> pd.DataFrame:
    """Variance of the token embedding at each receiver, and its share of the sum over all senders' variances."""
    index, sums = layers.senders.index("embedding"), layers.sums["variance"]
    rows = []
    for column, receiver in enumerate(layers.receivers):
        table = resampled(np.stack([sums[:, index, column], sums[:, :, column].sum(1), layers.tokens], axis=1))
        rows.append(row_of(table.interval(ratio(0, 2)), receiver=receiver, measure="variance"))
        rows.append(row_of(table.interval(ratio(0, 1)), receiver=receiver, measure="share"))
    return pd.DataFrame(rows)


def locality(layers: Senders) -> pd.DataFrame:
    """Mean distance receiver - sender in layers, weighted by APS and by |ANS|, over attention and MoE senders.

    `unweighted` is the mean distance of all pairs: promotion is local if APS is nearer than ANS.
    """
    chosen = [i for i, name in enumerate(layers.senders) if name.split(".")[0] in ("attn", "moe", "mlp", "shared")]
    distance = np.array([[receiver - depth(layers.senders[i]) for receiver in layers.receivers] for i in chosen])
    reached = layers.reached[chosen]
    columns = []
    for measure, sign in (("aps", 1), ("ans", -1)):
        weights = sign * layers.sums[measure][:, chosen] * reached
        columns += [(weights * distance).sum((1, 2)), weights.sum((1, 2))]
    table = resampled(np.stack(columns, axis=1))
    plain = float(distance[reached].mean())
    return pd.DataFrame(
        [
            row_of(table.interval(ratio(0, 1)), measure="distance weighted by APS"),
            row_of(table.interval(ratio(2, 3)), measure="distance weighted by ANS"),
            row_of(table.interval(lambda s: s[..., 2] / s[..., 3] - s[..., 0] / s[..., 1]), measure="ANS minus APS"),
            row_of(Interval(plain, float("nan"), float("nan")), measure="unweighted"),
            row_of(table.interval(ratio(3, 1)), measure="absolute ANS / APS"),
        ]
    )


def stripes(layers: Senders) -> pd.DataFrame:
    """Of each MoE sender: variance at the next MoE layer and at the last one, and `value`, the least of its ratios to the median
    MoE sender over the receivers from two layers on.

    A stripe stays above the median up to the last receiver: `value` above 1; `share of resamples` is how often it is.
    """
    moe = layers.indices("moe")
    sums, reached = layers.sums["variance"][:, moe], layers.reached[moe]
    table = resampled(np.concatenate([sums.reshape(len(sums), -1), layers.tokens[:, None]], axis=1))
    means = np.where(reached, _means(table.total, reached.shape), np.nan)
    draws = np.where(reached, _means(table.draws, reached.shape), np.nan)
    rows = []
    for row, index in enumerate(moe):
        columns = np.flatnonzero(reached[row])
        later, last = columns[1:], draws[:, row, columns[-1]]
        found = {
            "sender": layers.senders[index],
            "next": float(means[row, columns[0]]),
            "last": float(means[row, columns[-1]]),
            "last from": float(np.percentile(last, 2.5)),
            "last to": float(np.percentile(last, 97.5)),
        }
        if len(later):
            least, spread = (_least_ratio(side, row, later) for side in (means, draws))
            low, high = np.percentile(spread, [2.5, 97.5])
            found |= {"value": float(least), "low": float(low), "high": float(high), "stripe": bool(least > 1)}
            found["share of resamples"] = float((spread > 1).mean())
        rows.append(found)
    return pd.DataFrame(rows)


def _means(sums: Array, shape: tuple[int, ...]) -> Array:
    """[..., C * R + 1] sums with tokens last to [..., C, R] means."""
    return (sums[..., :-1] / sums[..., -1:]).reshape(*sums.shape[:-1], *shape)


def _least_ratio(means: Array, row: int, columns: Any) -> Any:
    return (means[..., row, columns] / np.nanmedian(means[..., columns], axis=-2)).min(-1)


def first_position(layers: Senders) -> pd.DataFrame:
    """Mean variance over the pairs of a kind's senders and their receivers, with and without each document's first token."""
    rows = []
    for kind in ("embedding", "attn", "moe", "shared", "mlp"):
        chosen = layers.indices(kind)
        if chosen:
            both, pairs = layers.sums["variance"][:, chosen].sum((1, 2)), layers.reached[chosen].sum()
            first = layers.sums["variance_first"][:, chosen].sum((1, 2))
            counts = [layers.tokens, layers.first_tokens]
            table = resampled(np.stack([both / pairs, first / pairs, *counts], axis=1))
            rows.append(row_of(table.interval(ratio(0, 2)), kind=kind, measure="all positions"))
            found = table.interval(lambda s: (s[..., 0] - s[..., 1]) / (s[..., 2] - s[..., 3]))
            rows.append(row_of(found, kind=kind, measure="without the first"))
            rows.append(row_of(table.interval(ratio(1, 3)), kind=kind, measure="the first alone"))
    return pd.DataFrame(rows)


def recall(records: pd.DataFrame, source: str) -> pd.DataFrame:
    """Share of a receiver's picks among the top-K predicted from `lag` layers earlier; chance; always the commonest experts."""
    rows: Any = records[(records["record"] == "recall") & (records["source"] == source)]
    counts: Any = records[(records["record"] == "counts") & (records["source"] == source)]
    by_expert: Any = counts.groupby(["receiver", "sender"])["value"].sum()
    num_experts = counts["sender"].nunique()
    units: Any = counts[counts["sender"] == "0"].groupby("receiver")["tokens"].sum()
    found = []
    for (receiver, lag), group in rows.groupby(["receiver", "lag"]):
        picks = by_expert[receiver]
        top_k = round(float(picks.sum() / units[receiver]))
        table = resampled(group.groupby("text")[["value", "tokens"]].sum().to_numpy(dtype=np.float64))
        common = float(picks.sort_values().iloc[-top_k:].sum() / picks.sum())
        row = row_of(table.interval(ratio(0, 1)), receiver=int(receiver), lag=int(lag))
        found.append({**row, "chance": top_k / num_experts, "commonest": common})
    return pd.DataFrame(found)


def total_influence(senders: Senders) -> Array:
    """[N, C]: variance summed over the receivers a sender reaches, per sample summed over tokens."""
    return senders.sums["variance"].sum(2)


def top_senders(senders: Senders, count: int = TOP) -> pd.DataFrame:
    """The senders with the largest variance summed over receivers; intervals over documents (heads) or units.

    `without the first`: the same over all tokens but each document's first, and the place that the sender has there.
    """
    influence = total_influence(senders)
    order = np.argsort(-influence.sum(0), kind="stable")[:count]
    table = resampled(
        np.concatenate([influence[:, order], influence.sum(1, keepdims=True), senders.tokens[:, None]], axis=1)
    )
    rest = (influence - senders.sums["variance_first"].sum(2)).sum(0) / (senders.tokens - senders.first_tokens).sum()
    places = rankdata(-rest, method="min")
    rows = []
    for place, index in enumerate(order):
        row = row_of(table.interval(ratio(place, -1)), sender=senders.senders[index])
        row["share"] = float(table.total[place] / table.total[-2])
        row |= {"without the first": float(rest[index]), "place there": int(places[index])}
        if "selected" in senders.sums:
            chosen = senders.sums["selected"][:, index].max(1).sum()
            row["selection rate"] = float(chosen / senders.tokens.sum())
            row["conditional mean"] = float(influence[:, index].sum() / chosen) if chosen else float("nan")
        rows.append(row)
    return pd.DataFrame(rows)


def concentration(levels: dict[str, Senders]) -> pd.DataFrame:
    """Share of all influence of a level that its largest 1%, 5% and 10% of senders hold (at least one)."""
    rows = []
    for level, senders in levels.items():
        influence = total_influence(senders)
        order = np.argsort(-influence.sum(0), kind="stable")
        for percent in (1, 5, 10):
            count = max(1, round(len(order) * percent / 100))
            table = resampled(np.stack([influence[:, order[:count]].sum(1), influence.sum(1)], axis=1))
            row = row_of(table.interval(ratio(0, 1)), level=level, largest=f"{percent}%", senders=count)
            rows.append({**row, "of": len(order)})
    return pd.DataFrame(rows)


def super_experts(experts: Senders, count: int = TOP) -> pd.DataFrame:
    """Overlap of the most influential experts with those of the largest output element, beside chance, and the rank
    correlation of the two over experts; intervals over units."""
    influence, largest = total_influence(experts), experts.sums["largest"].max(2)
    names = np.argsort(-largest.max(0), kind="stable")[:3]
    draws = [_both(influence, largest, drawn, count) for drawn in _drawn(len(influence))]
    bounds = np.nanpercentile(np.array(draws), [2.5, 97.5], axis=0)
    values = _both(influence, largest, np.arange(len(influence)), count)
    chance = (count * count / influence.shape[1], 0.0)
    rows = [
        {"measure": name, "value": value, "low": low, "high": high, "by chance": by_chance}
        for name, value, low, high, by_chance in zip(
            (f"experts in the top {count} by both", "rank correlation"), values, *bounds, chance, strict=True
        )
    ]
    return pd.DataFrame(rows).assign(**{"largest outputs": ", ".join(experts.senders[index] for index in names)})


def _drawn(size: int, count: int = 2000, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, size, (count, size))


class Overlap(NamedTuple):
    shared: float
    spearman: float


def _both(influence: Array, largest: Array, drawn: Any, count: int) -> Overlap:
    sides = influence[drawn].sum(0), largest[drawn].max(0)
    tops = [set(np.argsort(-values, kind="stable")[:count].tolist()) for values in sides]
    return Overlap(float(len(tops[0] & tops[1])), spearman(*sides))


def variance_against_aarv(levels: dict[str, Senders]) -> pd.DataFrame:
    """Rank correlation of variance and AARV over the senders of each receiver, and pooled; intervals over senders, of which the
    pooled one draws a sender's cells at all receivers together."""
    rows = []
    for level, senders in levels.items():
        variance, aarv = senders.mean("variance"), senders.mean("aarv")
        for index, receiver in enumerate(senders.receivers):
            reached = senders.reached[:, index]
            if reached.sum() >= 4:
                found = rank_correlation(variance[reached, index], aarv[reached, index])
                cells = {"senders": int(reached.sum()), "cells": int(reached.sum())}
                rows.append(row_of(found, level=level, receiver=str(receiver), **cells))
        found = rank_correlation(variance[senders.reached], aarv[senders.reached], np.nonzero(senders.reached)[0])
        cells = {"senders": int(senders.reached.any(1).sum()), "cells": int(senders.reached.sum())}
        rows.append(row_of(found, level=level, receiver="pooled", **cells))
    return pd.DataFrame(rows)

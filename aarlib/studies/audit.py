"""The audit's tables (DESIGN 2.4): what could be gained inside the selected set, and what points at it. Records in, frames out.

A measure is a ratio of sums over locked samples, so that each is bootstrapped over windows alike. Delta CE in nats per token,
negative is better; utility is -delta CE. K selected experts, N samples.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from aarlib.stats import mean_and_std
from aarlib.studies.audit_samples import (
    Development,
    Locked,
    Parts,
    Samples,
    best_fixed_action,
    conservative_threshold,
    gradient_best,
    separate,
)
from aarlib.studies.intervals import Ratio, distinct, mean_of, ratio_intervals, select

POOLED = "pooled"
ALL_SEEDS = "all"
Array = NDArray[np.float64]


class Choice(NamedTuple):
    """What one seed chose on development."""

    fixed_action: str
    threshold: float
    development_windows: int


def audit_tables(records: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """`measures`, `by_rank`, `choices` and `noise` of an audit's records.

    measures: one row per (domain, horizon, seed, layer, measure) with value, interval over windows and, for all seeds
    together, the n-1 deviation of the seeds' values. Layers together are `pooled`, seeds together `all`.
    """
    measures, ranks, choices = [], [], []
    for keys in _groups(records):
        group = select(records, **keys)
        seeds = {int(seed): separate(select(group, seed=seed)) for seed in distinct(group, "seed")}
        chosen = {seed: choose(parts.development) for seed, parts in seeds.items()}
        choices += [{**keys, "seed": str(seed), **choice._asdict()} for seed, choice in chosen.items()]
        for frame in _measures_of(seeds, chosen):
            measures.append(frame.assign(**keys))
        ranks.append(_by_rank(select(group, split="locked")).assign(**keys))
    return {
        "measures": _tidy(pd.concat(measures, ignore_index=True)),
        "by_rank": pd.concat(ranks, ignore_index=True),
        "choices": pd.DataFrame(choices),
        "noise": noise_floor(records),
    }


def _groups(records: pd.DataFrame) -> list[dict[str, str]]:
    return [
        {"domain": domain, "horizon": horizon}
        for domain in distinct(records, "domain")
        for horizon in distinct(records, "horizon")
    ]


def choose(development: Development) -> Choice:
    windows = len(set(development.windows))
    return Choice(best_fixed_action(development), conservative_threshold(development), windows)


def _measures_of(seeds: Mapping[int, Parts], chosen: Mapping[int, Choice]) -> Iterator[pd.DataFrame]:
    """Each seed and all seeds, each layer and all layers."""
    layers: list[int | None] = [
        None,
        *sorted({layer for parts in seeds.values() for layer in parts.locked.layers.tolist()}),
    ]
    for layer in layers:
        sides = {seed: parts.locked.of_layer(layer) for seed, parts in seeds.items()}
        by_seed = {seed: measures(locked, chosen[seed]) for seed, locked in sides.items()}
        label = POOLED if layer is None else str(layer)
        frames = {seed: ratio_intervals(by_seed[seed], sides[seed].windows) for seed in sides}
        for seed, frame in frames.items():
            yield frame.assign(seed=str(seed), layer=label)
        together = ratio_intervals(joined(by_seed), np.concatenate([locked.windows for locked in sides.values()]))
        values = np.stack([frame["value"].to_numpy() for frame in frames.values()])
        spread = [mean_and_std(column).std if np.isfinite(column).all() else np.nan for column in values.T]
        yield together.assign(seed=ALL_SEEDS, layer=label, std=spread)


def joined(by_seed: Mapping[int, Mapping[str, Ratio]]) -> dict[str, Ratio]:
    sides = list(by_seed.values())
    return {
        name: Ratio(*(np.concatenate(part) for part in zip(*(side[name] for side in sides), strict=True)))
        for name in sides[0]
    }


def measures(locked: Locked, choice: Choice) -> dict[str, Ratio]:
    """Everything reported of locked samples, under what was chosen on development."""
    if not isinstance(locked, Locked):
        raise TypeError(f"measures are of Locked samples, not of {type(locked).__name__}")
    return {
        **oracle_measures(locked, choice.fixed_action),
        **router_measures(locked),
        **gradient_measures(locked, choice.threshold),
    }


def oracle_measures(locked: Samples, fixed_action: str) -> dict[str, Ratio]:
    structured, vertex = locked.delta.min(1), locked.vertices.min(1)
    named = dict(zip(locked.actions, locked.delta.T, strict=True))
    commit = np.take_along_axis(locked.vertices, locked.weights.argmax(1)[:, None], 1)[:, 0]
    return {
        "structured_oracle": mean_of(structured),
        "vertex_oracle": mean_of(vertex),
        "vertex_or_native_oracle": mean_of(np.minimum(vertex, 0)),
        "vertex_share": Ratio(vertex, structured),
        "fixed_action": mean_of(named[fixed_action]),
        "uniform": mean_of(named["uniform"]),
        "temperature_0.5": mean_of(named["temperature_0.5"]),
        "temperature_2.0": mean_of(named["temperature_2.0"]),
        "router_top1_vertex": mean_of(commit),
    }


def router_measures(locked: Samples) -> dict[str, Ratio]:
    """How the router's weights order the vertices; rank 1 is the largest weight."""
    best = locked.vertices.argmin(1)
    ranks = rankdata(-locked.weights, axis=1)
    return {
        "router_top1_is_best": mean_of((locked.weights.argmax(1) == best).astype(np.float64)),
        "best_vertex_rank": mean_of(np.take_along_axis(ranks, best[:, None], 1)[:, 0]),
        "router_spearman": mean_of(row_spearman(locked.weights, -locked.vertices)),
    }


def gradient_measures(locked: Samples, threshold: float) -> dict[str, Ratio]:
    """What first-order utilities find, and the policy that acts only where they reach `threshold`."""
    predicted, acted = locked.gradient_utility, gradient_best(locked)
    acts = predicted.max(1) >= threshold
    careful = np.where(acts, acted, 0.0)
    return {
        **ranking_measures("gradient", predicted, locked),
        "gradient_best_vertex": mean_of(acted),
        "gradient_captured": Ratio(acted, locked.vertices.min(1)),
        "gradient_harm": mean_of((acted > 0).astype(np.float64)),
        "conservative": mean_of(careful),
        "conservative_harm": mean_of((careful > 0).astype(np.float64)),
        "conservative_acts": mean_of(acts.astype(np.float64)),
    }


def ranking_measures(prefix: str, predicted: Array, samples: Samples) -> dict[str, Ratio]:
    """Spearman within the selected set, pairwise accuracy (ties of either side dropped), rate of the exact best."""
    utility = -samples.vertices
    pairwise = pairwise_accuracy(predicted, utility)
    return {
        f"{prefix}_spearman": mean_of(row_spearman(predicted, utility)),
        f"{prefix}_pairwise": pairwise,
        f"{prefix}_top1": mean_of((predicted.argmax(1) == utility.argmax(1)).astype(np.float64)),
    }


def row_spearman(first: Array, second: Array) -> Array:
    """[N]: rank correlation of each row's K values, average ranks for ties; NaN where a row is constant."""
    ranks = [rankdata(values, axis=1) - (values.shape[1] + 1) / 2 for values in (first, second)]
    norm = np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1))
    return np.divide((ranks[0] * ranks[1]).sum(1), norm, out=np.full(len(norm), np.nan), where=norm > 0)


def pairwise_accuracy(predicted: Array, utility: Array) -> Ratio:
    first, second = np.triu_indices(utility.shape[1], k=1)
    ours = np.sign(predicted[:, first] - predicted[:, second])
    theirs = np.sign(utility[:, first] - utility[:, second])
    decided = (ours != 0) & (theirs != 0)
    return Ratio(((ours == theirs) & decided).sum(1).astype(np.float64), decided.sum(1).astype(np.float64))


def _by_rank(locked: pd.DataFrame) -> pd.DataFrame:
    """Mean vertex utility of the slot at each router rank, layers and seeds together."""
    samples = Locked.from_records(locked)
    order = np.argsort(-samples.weights, axis=1, kind="stable")
    utility = np.take_along_axis(-samples.vertices, order, 1)
    best = np.take_along_axis(samples.vertices == samples.vertices.min(1, keepdims=True), order, 1)
    rows = {f"utility_{rank + 1}": mean_of(utility[:, rank]) for rank in range(samples.top_k)}
    rows |= {f"best_{rank + 1}": mean_of(best[:, rank].astype(np.float64)) for rank in range(samples.top_k)}
    return ratio_intervals(rows, samples.windows)


def noise_floor(records: pd.DataFrame) -> pd.DataFrame:
    """Differences of a delta CE between exact and batched replay, by horizon, on the windows replayed both ways: a sample's
    largest over the actions; the noise floor is the largest of all."""
    rows = []
    for horizon in distinct(records, "horizon"):
        noise = select(records, horizon=horizon)["noise"].to_numpy(np.float64)
        measured = noise[np.isfinite(noise)]
        if measured.size:
            median, high = np.percentile(measured, [50, 99])
            rows.append((horizon, median, high, measured.max(), measured.size))
    return pd.DataFrame(rows, columns=["horizon", "median", "percentile_99", "noise_floor", "num_samples"])


def _tidy(frame: pd.DataFrame) -> pd.DataFrame:
    first = ["domain", "horizon", "seed", "layer", "measure", "value", "low", "high", "std"]
    return pd.DataFrame(frame, columns=[*first, "num_units", "num_samples", "num_excluded"])

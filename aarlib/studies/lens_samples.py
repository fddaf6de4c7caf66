"""Records of the lens as arrays: documents x senders x receivers, and statistics with intervals over documents.

N documents (or units), C senders, R receivers.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from aarlib.stats import RESAMPLES, Interval, spearman

Array = NDArray[np.float64]
MEASURES = ("variance", "aps", "ans", "aarv")
RANK_DRAWS = 2000
WEIGHTS_AT_ONCE = 10_000_000


class Senders(NamedTuple):
    """Sums over tokens. A cell whose sender does not reach its receiver is 0, and False in `reached`."""

    senders: tuple[str, ...]
    receivers: tuple[int, ...]
    sums: dict[str, Array]
    """By measure, [N, C, R]; also <measure>_first where it was kept."""
    tokens: Array
    first_tokens: Array
    """[N]."""
    reached: NDArray[np.bool_]
    """[C, R]."""
    samples: tuple[str, ...]
    """[N]: document, or unit."""

    def mean(self, measure: str = "variance", without_first: bool = False) -> Array:
        """[C, R]; NaN where not reached."""
        total, tokens = self.sums[measure].sum(0), self.tokens.sum()
        if without_first:
            total, tokens = total - self.sums[f"{measure}_first"].sum(0), tokens - self.first_tokens.sum()
        return np.where(self.reached, total / tokens, np.nan)

    def frame(self, measure: str = "variance", without_first: bool = False) -> pd.DataFrame:
        values = self.mean(measure, without_first)
        return pd.DataFrame(values, index=pd.Index(self.senders, name="sender"), columns=list(self.receivers))

    def indices(self, kind: str) -> list[int]:
        """Senders of a kind: embedding, attn, moe, shared, mlp."""
        return [index for index, name in enumerate(self.senders) if name.split(".")[0] == kind]


def senders_of(records: pd.DataFrame, source: str, level: str) -> Senders:
    """Of one source and level; samples are documents, all their pieces together; units of several where records are by unit."""
    rows: Any = records[(records["record"] == "moments") & (records["level"] == level) & (records["source"] == source)]
    if rows.empty:
        raise ValueError(
            f"source = {source!r}, level = {level!r}: no records; sources: {sorted(set(records['source']))}"
        )
    by_piece = rows["document"].notna().all()
    sample = rows["text"].where(rows["text"].notna(), rows["unit"])
    names = list(dict.fromkeys(rows["sender"]))
    receivers = sorted(int(receiver) for receiver in set(rows["receiver"]))
    labels, n = np.unique(sample.to_numpy(), return_inverse=True)
    c = pd.Index(names).get_indexer(pd.Index(rows["sender"]))
    r = pd.Index(receivers).get_indexer(pd.Index(rows["receiver"].astype(int)))
    shape = (len(labels), len(names), len(receivers))
    sums: dict[str, Array] = {}
    for name in (*MEASURES, *(f"{measure}_first" for measure in MEASURES), "selected", "largest"):
        if name in rows and bool(rows[name].notna().any()):
            sums[name] = np.zeros(shape)
            add = np.maximum if name == "largest" else np.add
            add.at(sums[name], (n, c, r), rows[name].to_numpy(dtype=np.float64))
    reached = np.zeros(shape[1:], dtype=np.bool_)
    reached[c, r] = True
    pieces = rows.assign(sample=n).drop_duplicates(["sample", "document" if by_piece else "unit"])
    counts = [np.bincount(pieces["sample"], pieces[name], shape[0]) for name in ("tokens", "first_tokens")]
    tokens, first = (count.astype(np.float64) for count in counts)
    return Senders(tuple(names), tuple(receivers), sums, tokens, first, reached, tuple(labels.tolist()))


class Resampled(NamedTuple):
    """Column sums of a [N, M] table: of all samples, and of 10,000 bootstrap resamples of them."""

    total: Array
    draws: Array
    """[10000, M]."""

    def interval(self, statistic: Callable[[Array], Array]) -> Interval:
        """95% percentile interval of a statistic of the sums; `statistic` maps [..., M] to [...]."""
        values = statistic(self.draws)
        low, high = np.nanpercentile(values, [2.5, 97.5])
        return Interval(float(statistic(self.total)), float(low), float(high))


def resampled(values: Array, seed: int = 0) -> Resampled:
    return Resampled(values.sum(0), _counts(len(values), seed) @ values)


@lru_cache(maxsize=4)
def _counts(size: int, seed: int) -> NDArray[np.float32]:
    """How often each of `size` samples is drawn in each resample; drawn once, as many tables have the same samples."""
    generator = np.random.default_rng(seed)
    counts = np.zeros((RESAMPLES, size), dtype=np.float32)
    for row in counts:
        row += np.bincount(generator.integers(0, size, size), minlength=size)
    return counts


def mean_interval(values: Array) -> Interval:
    """Of a mean over samples; NaN values are left out."""
    finite = values[np.isfinite(values)]
    table = resampled(np.stack([finite, np.ones_like(finite)], axis=1))
    return table.interval(lambda sums: sums[..., 0] / sums[..., 1])


def row_of(interval: Interval, **fields: Any) -> dict[str, Any]:
    return {**fields, "value": interval.mean, "low": interval.low, "high": interval.high}


def rank_correlation(first: Array, second: Array, groups: NDArray[np.int64] | None = None, seed: int = 0) -> Interval:
    """Spearman with its 95% percentile bootstrap over the pairs, or over `groups`: all pairs of one are drawn together."""
    labels = np.arange(len(first)) if groups is None else np.unique(groups, return_inverse=True)[1]
    size, generator = int(labels.max()) + 1, np.random.default_rng(seed)
    step, values = max(1, WEIGHTS_AT_ONCE // len(first)), list[Array]()
    for start in range(0, RANK_DRAWS, step):
        draws = generator.integers(0, size, size=(min(step, RANK_DRAWS - start), size))
        counts = np.stack([np.bincount(draw, minlength=size) for draw in draws])
        values.append(_weighted_spearman(first, second, counts[:, labels].astype(np.float64)))
    low, high = np.nanpercentile(np.concatenate(values), [2.5, 97.5])
    return Interval(spearman(first, second), float(low), float(high))


def _weighted_spearman(first: Array, second: Array, weights: Array) -> Array:
    """[draws]: of the pairs, each taken weights[draw, pair] times; NaN where one side is constant."""
    total = weights.sum(1, keepdims=True)
    ranks = [_weighted_ranks(values, weights) - (total + 1) / 2 for values in (first, second)]
    norms = np.sqrt((weights * ranks[0] ** 2).sum(1) * (weights * ranks[1] ** 2).sum(1))
    products = (weights * ranks[0] * ranks[1]).sum(1)
    return np.divide(products, norms, out=np.full(len(norms), np.nan), where=norms > 0)


def _weighted_ranks(values: Array, weights: Array) -> Array:
    """Average ranks where value i stands weights[draw, i] times, [draws, pairs]."""
    distinct, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(len(distinct)))
    mass = np.add.reduceat(weights[:, order], starts, axis=1)
    return (np.cumsum(mass, axis=1) - mass / 2 + 0.5)[:, place]


def depth(sender: str) -> float:
    """Layer in which a component is written; -1 for the embedding."""
    pieces = sender.split(".")
    return float(pieces[1]) if len(pieces) > 1 and pieces[1].isdigit() else -1.0

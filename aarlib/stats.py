"""Intervals and rank statistics. Bootstraps are percentile, 10,000 resamples, fixed seed; +- is the n-1 deviation."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

RESAMPLES = 10_000
_DRAWS_PER_CHUNK = 2_000_000


class Interval(NamedTuple):
    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


class MeanStd(NamedTuple):
    mean: float
    std: float
    """n-1 standard deviation; NaN for a single value."""


def paired_bootstrap(
    values: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean of paired differences, one value a unit (window, conversation)."""
    values_N = _finite("values", values)
    return ratio_bootstrap(values_N, np.ones_like(values_N), confidence, resamples, seed)


def ratio_bootstrap(
    sums: ArrayLike, counts: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap over units of sum(sums) / sum(counts).

    With sums = a conversation's CE difference summed over its targets and counts = their number: the token-weighted
    mean difference, conversations resampled whole.
    """
    sums_N, counts_N = _finite("sums", sums), _finite("counts", counts)
    if sums_N.shape != counts_N.shape:
        raise ValueError(f"sums has {sums_N.size} values and counts {counts_N.size}; give one of each a unit")
    if (counts_N <= 0).any():
        raise ValueError(f"counts has a value of {counts_N.min()}; leave out units without targets")
    ratios = np.concatenate(
        [sums_N[draw].sum(axis=1) / counts_N[draw].sum(axis=1) for draw in _draws(sums_N.size, resamples, seed)]
    )
    tail = 50 * (1 - confidence)
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(float(sums_N.sum() / counts_N.sum()), float(low), float(high))


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Rank correlation with average ranks for ties; NaN where either is constant."""
    first_N, second_N = _finite("first", first), _finite("second", second)
    if first_N.shape != second_N.shape:
        raise ValueError(f"first has {first_N.size} values and second {second_N.size}; they must be paired")
    ranks = [stats.rankdata(values) - (values.size + 1) / 2 for values in (first_N, second_N)]
    norm = np.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1]))
    return float(ranks[0] @ ranks[1] / norm) if norm else float("nan")


def win_fraction(differences: ArrayLike) -> float:
    """Share of units whose difference (ours - theirs, of a loss) is below 0; a tie counts half."""
    values_N = _finite("differences", differences)
    return float(np.mean(values_N < 0) + np.mean(values_N == 0) / 2)


def mean_and_std(values: ArrayLike) -> MeanStd:
    """Mean and n-1 standard deviation over seeds."""
    values_N = _finite("values", values)
    std = float(values_N.std(ddof=1)) if values_N.size > 1 else float("nan")
    return MeanStd(float(values_N.mean()), std)


def _draws(size: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Indices [resamples, size] in chunks of bounded memory; the draws do not depend on the chunking."""
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS_PER_CHUNK // size)
    for start in range(0, resamples, rows):
        yield generator.integers(0, size, size=(min(rows, resamples - start), size))


def _finite(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array: NDArray[Any] = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; give a flat list of at least one number")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] = {array[bad[0]]} ({bad.size} of {array.size} not finite); leave them out")
    return array

"""Intervals of means that are ratios of sums, units (windows, documents) resampled whole."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from aarlib.stats import RESAMPLES

_DRAWS_PER_CHUNK = 2_000_000


class Ratio(NamedTuple):
    """A measure as sum(numerator) / sum(denominator) over samples; a sample with denominator 0 is excluded."""

    numerator: NDArray[np.float64]
    denominator: NDArray[np.float64]


def select(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The rows whose columns have these values."""
    keep = np.ones(len(frame), dtype=bool)
    for column, value in values.items():
        keep &= np.asarray(frame[column] == value)
    return pd.DataFrame(frame.loc[keep])


def distinct(frame: pd.DataFrame, column: str) -> list[Any]:
    """The column's values in order of first appearance."""
    return list(dict.fromkeys(frame[column]))


def mean_of(values: NDArray[np.float64]) -> Ratio:
    """The mean of `values`; NaN values are excluded."""
    finite = np.isfinite(values)
    return Ratio(np.where(finite, values, 0.0), finite.astype(np.float64))


def ratio_intervals(
    measures: Mapping[str, Ratio], units: NDArray[np.str_], confidence: float = 0.95, seed: int = 0
) -> pd.DataFrame:
    """Every measure with its percentile bootstrap over `units` (one label a sample), the same resamples for all.

    Columns measure, value, low, high, num_units, num_samples, num_excluded. 10,000 resamples, fixed seed.
    """
    labels, of_sample = np.unique(units, return_inverse=True)
    names = list(measures)
    sums = np.stack([_per_unit(measures[name].numerator, of_sample, len(labels)) for name in names], axis=1)
    counts = np.stack([_per_unit(measures[name].denominator, of_sample, len(labels)) for name in names], axis=1)
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS_PER_CHUNK // len(labels))
    resampled = []
    for start in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - start)
        draws = generator.multinomial(len(labels), np.full(len(labels), 1 / len(labels)), size=size)
        resampled.append(_divided(draws @ sums, draws @ counts))
    tail = 50 * (1 - confidence)
    resampled = np.concatenate(resampled)
    return pd.DataFrame(
        {
            "measure": names,
            "value": _divided(sums.sum(0), counts.sum(0)),
            "low": [_percentile(column, tail) for column in resampled.T],
            "high": [_percentile(column, 100 - tail) for column in resampled.T],
            "num_units": len(labels),
            "num_samples": len(units),
            "num_excluded": [int((measures[name].denominator == 0).sum()) for name in names],
        }
    )


def _per_unit(values: NDArray[np.float64], of_sample: NDArray[np.intp], num_units: int) -> NDArray[np.float64]:
    return np.bincount(of_sample, weights=values, minlength=num_units).astype(np.float64)


def _divided(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts != 0)


def _percentile(values: NDArray[np.float64], q: float) -> float:
    finite = values[np.isfinite(values)]
    return float(np.percentile(finite, q)) if finite.size else float("nan")

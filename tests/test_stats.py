"""Bootstraps against scipy's and against what is known in closed form."""

import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats as scipy_stats

from aarlib import stats
from aarlib.stats import mean_and_std, paired_bootstrap, ratio_bootstrap, spearman, win_fraction


def test_paired_bootstrap_agrees_with_scipys_percentile_bootstrap():
    values = np.random.default_rng(3).gamma(2.0, size=200) - 1.5
    interval = paired_bootstrap(values)
    other = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(9)
    ).confidence_interval
    assert interval.mean == pytest.approx(values.mean(), abs=1e-12)
    assert interval.low == pytest.approx(other.low, abs=0.02)
    assert interval.high == pytest.approx(other.high, abs=0.02)
    assert interval.low < interval.mean < interval.high


def test_the_interval_covers_the_truth_at_about_its_confidence():
    generator = np.random.default_rng(5)
    intervals = [paired_bootstrap(generator.normal(0.3, 1.0, size=60), resamples=500) for _ in range(300)]
    coverage = np.mean([interval.low < 0.3 < interval.high for interval in intervals])
    assert 0.90 < coverage < 0.98
    wide = paired_bootstrap(generator.normal(size=60), confidence=0.99)
    narrow = paired_bootstrap(generator.normal(size=60), confidence=0.5)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_ratio_bootstrap_weights_by_tokens_and_resamples_conversations():
    generator = np.random.default_rng(1)
    counts = generator.integers(1, 200, size=80)
    sums = -0.2 * counts + generator.normal(size=80) * np.sqrt(counts)
    interval = ratio_bootstrap(sums, counts)
    assert interval.mean == pytest.approx(sums.sum() / counts.sum(), abs=1e-12)
    assert interval.mean != pytest.approx((sums / counts).mean(), abs=1e-3)
    draws = np.random.default_rng(2).integers(0, 80, size=(10_000, 80))
    by_hand = np.percentile(sums[draws].sum(1) / counts[draws].sum(1), [2.5, 97.5])
    assert (interval.low, interval.high) == pytest.approx(tuple(by_hand), abs=0.005)
    assert interval.excludes_zero


def test_equal_counts_give_the_paired_bootstrap():
    values = np.random.default_rng(4).normal(size=50)
    scaled = ratio_bootstrap(values * 7, np.full(50, 7))
    assert scaled == pytest.approx(paired_bootstrap(values), abs=1e-12)


def test_identical_units_give_an_interval_of_no_width():
    assert paired_bootstrap([0.5] * 10) == (0.5, 0.5, 0.5)
    assert not paired_bootstrap([0.0] * 10).excludes_zero
    assert paired_bootstrap([-0.5] * 10).excludes_zero


def test_memory_is_bounded_and_chunks_change_nothing(monkeypatch):
    values = np.random.default_rng(0).normal(size=3_000)
    tracemalloc.start()
    whole = paired_bootstrap(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120e6 < 8 * 10_000 * values.size
    monkeypatch.setattr(stats, "_DRAWS_PER_CHUNK", 100_000)
    assert paired_bootstrap(values) == whole
    assert paired_bootstrap(values, seed=1) != whole


def test_spearman_agrees_with_scipy_ties_included():
    generator = np.random.default_rng(7)
    first, second = generator.integers(0, 5, size=40), generator.normal(size=40)
    assert spearman(first, second) == pytest.approx(scipy_stats.spearmanr(first, second).statistic, abs=1e-12)
    assert spearman([1, 2, 3], [10, 20, 25]) == 1.0
    assert spearman([1, 2, 3], [3, 2, 1]) == -1.0
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_win_fraction_counts_lower_losses_and_half_the_ties():
    assert win_fraction([-1.0, -2.0, 3.0, 0.0]) == 0.625
    assert win_fraction([1.0]) == 0.0


def test_mean_and_std_is_over_n_minus_one():
    assert mean_and_std([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_and_std([5.0]).mean == 5.0
    assert math.isnan(mean_and_std([5.0]).std)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_bootstrap([]), r"values has shape \(0,\); give a flat list"),
        (lambda: paired_bootstrap([[1.0]]), r"values has shape \(1, 1\)"),
        (lambda: paired_bootstrap([1.0, float("nan")]), r"values\[1\] = nan \(1 of 2 not finite\); leave them out"),
        (lambda: ratio_bootstrap([1.0], [1, 2]), "sums has 1 values and counts 2"),
        (lambda: ratio_bootstrap([1.0, 2.0], [1, 0]), "counts has a value of 0.0; leave out units without targets"),
        (lambda: spearman([1], [1, 2]), "must be paired"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

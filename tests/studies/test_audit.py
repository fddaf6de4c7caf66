import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from aarlib.audit.actions import action_names
from aarlib.studies.audit import audit_tables, choose, measures, pairwise_accuracy, row_spearman
from aarlib.studies.audit_samples import (
    Development,
    Locked,
    Samples,
    best_fixed_action,
    conservative_threshold,
    separate,
)
from aarlib.studies.intervals import Ratio, mean_of, ratio_intervals

TOP_K = 3
NAMES = action_names(TOP_K)


def records(num_windows=12, layers=(1, 3), seeds=(0, 1), horizons=("full", "4"), offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for draw in seeds:
        for index in range(2 * num_windows):
            split = "development" if index < num_windows else "locked"
            for layer in layers:
                for horizon in horizons:
                    ce = 2 + 0.1 * rng.standard_normal(len(NAMES)) + (offset if split == "locked" else 0)
                    utility = -(ce - ce[0])[-TOP_K:]
                    rows.append(
                        {
                            "domain": "c4",
                            "seed": draw,
                            "split": split,
                            "window": f"{split}{draw}.{index}+0",
                            "layer": layer,
                            "horizon": horizon,
                            "weights": rng.dirichlet(np.ones(TOP_K)),
                            "ce": ce,
                            "gradient_utility": utility + 0.05 * rng.standard_normal(TOP_K),
                            "noise": 1e-7 if index == 0 else np.nan,
                        }
                    )
    return pd.DataFrame(rows)


def one_horizon(**changes):
    return separate(records(horizons=("full",), seeds=(0,), **changes))


def samples(kind, vertices, predicted, weights=None) -> Samples:
    """Samples whose actions other than vertices do nothing."""
    vertices = np.asarray(vertices, dtype=float)
    delta = np.concatenate([np.zeros((len(vertices), len(NAMES) - TOP_K)), vertices], axis=1)
    weights = np.full_like(vertices, 1 / TOP_K) if weights is None else np.asarray(weights, dtype=float)
    windows = np.array([f"c4/w{index}+0" for index in range(len(vertices))])
    return kind(windows, np.zeros(len(vertices), dtype=int), delta, weights, np.asarray(predicted, dtype=float))


def value(locked, name, choice=None):
    choice = choice or choose(samples(Development, [[1, 1, 1.0]], [[0, 0, 0.0]]))
    ratio = measures(locked, choice)[name]
    return ratio.numerator.sum() / ratio.denominator.sum()


def test_values_by_hand():
    locked = samples(
        Locked,
        vertices=[[-0.2, 0.1, 0.3], [0.4, 0.2, 0.1]],
        predicted=[[0.3, 0.2, -1.0], [0.5, 0.1, 0.0]],
        weights=[[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]],
    )
    assert value(locked, "structured_oracle") == pytest.approx(-0.1)  # -0.2, and native's 0
    assert value(locked, "vertex_oracle") == pytest.approx(-0.05)
    assert value(locked, "vertex_or_native_oracle") == pytest.approx(-0.1)
    assert value(locked, "vertex_share") == pytest.approx(0.5)  # a ratio of means
    assert value(locked, "router_top1_vertex") == pytest.approx(0.0)  # -0.2 and 0.2
    assert value(locked, "router_top1_is_best") == 0.5
    assert value(locked, "best_vertex_rank") == 1.5
    assert value(locked, "router_spearman") == pytest.approx((1 + 0.5) / 2)  # the second: weights 1 3 2, utility 1 2 3
    assert value(locked, "gradient_top1") == 0.5
    assert value(locked, "gradient_best_vertex") == pytest.approx((-0.2 + 0.4) / 2)
    assert value(locked, "gradient_captured") == pytest.approx(0.1 / -0.05)
    assert value(locked, "gradient_harm") == 0.5
    assert value(locked, "gradient_pairwise") == pytest.approx(3 / 6)


def test_rank_correlation_and_pairwise_accuracy_against_plain_ones():
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((20, 5)), rng.integers(0, 3, (20, 5)).astype(float)
    second[0] = 1.0
    ours = row_spearman(first, second)
    assert np.isnan(ours[0])
    for row in range(1, 20):
        assert ours[row] == pytest.approx(scipy_stats.spearmanr(first[row], second[row]).statistic)
    ratio = pairwise_accuracy(first, second)
    agree = decided = 0
    for a, b in zip(first, second, strict=True):
        for i in range(5):
            for j in range(i):
                if b[i] != b[j]:
                    decided += 1
                    agree += (a[i] > a[j]) == (b[i] > b[j])
    assert (ratio.numerator.sum(), ratio.denominator.sum()) == (agree, decided)


def test_constant_samples_are_excluded_and_counted():
    locked = samples(Locked, [[0.1, 0.1, 0.1], [0.3, 0.2, 0.1]], [[1, 2, 3], [1, 2, 3]])
    frame = ratio_intervals(measures(locked, choose(samples(Development, [[1, 1, 1]], [[0, 0, 0]]))), locked.windows)
    row = frame.set_index("measure").loc["gradient_spearman"]
    assert row["num_excluded"] == 1
    assert row["value"] == pytest.approx(1.0)


def test_the_conservative_threshold_is_the_smallest_with_little_harm():
    predicted = np.zeros((100, TOP_K))
    predicted[:, 0] = np.linspace(1, 0.01, 100)
    vertices = np.zeros((100, TOP_K))
    vertices[:, 0] = -0.1
    vertices[[40, 50, 60], 0] = 0.1  # the third harm makes 3%
    threshold = conservative_threshold(samples(Development, vertices, predicted))
    assert threshold == pytest.approx(predicted[59, 0])
    vertices[:3, 0] = 0.1
    assert conservative_threshold(samples(Development, vertices, predicted)) == pytest.approx(predicted[1, 0])
    assert conservative_threshold(samples(Development, np.full((10, TOP_K), 0.1), np.ones((10, TOP_K)))) == np.inf


def test_choices_are_made_on_development_only():
    parts = one_horizon()
    for chooser in (best_fixed_action, conservative_threshold, choose):
        with pytest.raises(TypeError, match="Development samples, not on Locked"):
            chooser(parts.locked)
    with pytest.raises(TypeError, match="Locked samples, not of Development"):
        measures(parts.development, choose(parts.development))  # pyright: ignore[reportArgumentType]


def test_what_is_chosen_does_not_see_locked_losses():
    assert choose(one_horizon().development) == choose(one_horizon(offset=5.0).development)
    ours, theirs = (audit_tables(records(offset=offset))["choices"] for offset in (0.0, 5.0))
    pd.testing.assert_frame_equal(ours, theirs)


def test_a_shared_document_an_empty_side_and_mixed_horizons_are_refused():
    frame = records(horizons=("full",), seeds=(0,))
    leaked = frame.copy()
    leaked.loc[leaked["split"] == "locked", "window"] = leaked.loc[
        leaked["split"] == "development", "window"
    ].to_numpy()
    leaked["window"] = (
        leaked["window"].str.replace("+0", "+128", regex=False).where(leaked["split"] == "locked", leaked["window"])
    )
    with pytest.raises(ValueError, match="development and locked share 12 documents"):
        separate(leaked)
    for split in ("development", "locked"):
        with pytest.raises(ValueError, match=f"no {split} records"):
            separate(frame[frame["split"] != split])
    with pytest.raises(ValueError, match="horizons .* are mixed"):
        separate(records(seeds=(0,)))


def test_intervals_resample_windows_whole():
    rng = np.random.default_rng(0)
    per_window = rng.standard_normal(40)
    windows = np.repeat([f"w{index}" for index in range(40)], 4)
    frame = ratio_intervals({"m": mean_of(np.repeat(per_window, 4))}, windows)
    row = frame.iloc[0]
    assert row["value"] == pytest.approx(per_window.mean())
    error = per_window.std() / np.sqrt(40)
    assert (row["high"] - row["low"]) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)
    zero = ratio_intervals({"none": Ratio(np.zeros(3), np.zeros(3))}, np.array(["a", "b", "c"])).iloc[0]
    assert np.isnan(zero["value"]) and zero["num_excluded"] == 3


def test_tables_have_every_group_once():
    tables = audit_tables(records())
    frame = tables["measures"]
    assert not frame.duplicated(["domain", "horizon", "seed", "layer", "measure"]).any()
    assert set(frame["seed"]) == {"0", "1", "all"} and set(frame["layer"]) == {"1", "3", "pooled"}
    assert (frame["low"] <= frame["value"] + 1e-12).all() and (frame["value"] <= frame["high"] + 1e-12).all()
    pooled = frame[(frame["seed"] == "all") & (frame["layer"] == "pooled")]
    assert (pooled["num_units"] == 24).all() and (pooled["num_samples"] == 48).all()
    assert tables["noise"]["noise_floor"].tolist() == [1e-7, 1e-7]
    assert set(tables["by_rank"]["measure"]) == {f"{what}_{r}" for what in ("utility", "best") for r in (1, 2, 3)}

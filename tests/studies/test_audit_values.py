"""Every measure of the audit on samples in which each action has a loss of its own, worked out by hand. K = 3, 10 actions."""

import numpy as np
import pandas as pd
import pytest

from aarlib.audit.actions import action_names
from aarlib.studies.audit import Choice, audit_tables, choose, measures
from aarlib.studies.audit_samples import Development, Locked, best_fixed_action
from aarlib.studies.intervals import select

NAMES = action_names(3)
# native, uniform, temperature 0.5, 2.0, mix 0 1 2, vertex 0 1 2
FIRST = [0, 0.01, -0.02, 0.03, -0.04, 0.05, -0.06, 0.07, -0.08, 0.09]
SECOND = [0, 0.02, 0.01, -0.05, 0.01, -0.04, -0.02, 0.03, 0.04, -0.03]
WEIGHTS = [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]
PREDICTED = [[0.1, 0.5, 0.2], [0.3, 0.2, 0.1]]


def samples(kind, deltas, predicted=PREDICTED, weights=WEIGHTS):
    windows = np.array([f"c4/w{index}+0" for index in range(len(deltas))])
    arrays = (np.asarray(values, dtype=float) for values in (deltas, weights, predicted))
    return kind(windows, np.zeros(len(deltas), dtype=int), *arrays)


def test_development_chooses_the_action_with_the_lowest_mean_but_never_native():
    # means: 0.015 -0.005 -0.01 -0.015 0.005 -0.04 0.05 -0.02 0.03
    assert best_fixed_action(samples(Development, [FIRST, SECOND])) == "mix_2"
    harmful = np.linspace(0, 0.9, len(NAMES))[None].repeat(2, 0)
    assert best_fixed_action(samples(Development, harmful)) == "uniform"


def test_the_threshold_is_where_development_harm_starts():
    # the gradient's vertices: -0.08 where it predicts 0.5, and 0.03 where it predicts 0.3
    chosen = choose(samples(Development, [FIRST, SECOND]))
    assert chosen == Choice("mix_2", 0.5, 2)


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        ("structured_oracle", (-0.08 - 0.05) / 2),
        ("vertex_oracle", (-0.08 - 0.03) / 2),
        ("vertex_or_native_oracle", (-0.08 - 0.03) / 2),
        ("vertex_share", 0.11 / 0.13),
        ("fixed_action", (-0.06 - 0.02) / 2),
        ("uniform", (0.01 + 0.02) / 2),
        ("temperature_0.5", (-0.02 + 0.01) / 2),
        ("temperature_2.0", (0.03 - 0.05) / 2),
        ("router_top1_vertex", (0.07 - 0.03) / 2),
        ("router_top1_is_best", 1 / 2),
        ("best_vertex_rank", (2 + 1) / 2),
        ("router_spearman", (0.5 + 0.5) / 2),  # weights rank 3 2 1 and 1 2 3, utilities 2 3 1 and 2 1 3
        ("gradient_spearman", (0.5 - 0.5) / 2),  # predictions rank 1 3 2 and 3 2 1
        ("gradient_pairwise", (2 + 1) / 6),
        ("gradient_top1", 1 / 2),
        ("gradient_best_vertex", (-0.08 + 0.03) / 2),
        ("gradient_captured", 0.05 / 0.11),
        ("gradient_harm", 1 / 2),
        ("conservative", -0.08 / 2),
        ("conservative_harm", 0.0),
        ("conservative_acts", 1 / 2),
    ],
)
def test_a_measure_by_hand(measure, value):
    ratio = measures(samples(Locked, [FIRST, SECOND]), Choice("mix_2", 0.5, 2))[measure]
    assert ratio.numerator.sum() / ratio.denominator.sum() == pytest.approx(value, abs=1e-12)


def test_every_measure_is_worked_out_here():
    (mark,) = test_a_measure_by_hand.pytestmark
    assert {name for name, _ in mark.args[1]} == set(measures(samples(Locked, [FIRST]), Choice("mix_2", 0.5, 2)))


def test_a_lower_threshold_acts_and_harms_more():
    found = measures(samples(Locked, [FIRST, SECOND]), Choice("mix_2", 0.3, 2))
    means = {name: ratio.numerator.sum() / ratio.denominator.sum() for name, ratio in found.items()}
    assert means["conservative"] == pytest.approx((-0.08 + 0.03) / 2)
    assert (means["conservative_harm"], means["conservative_acts"]) == (0.5, 1.0)


def test_seeds_are_shown_alone_together_and_by_their_n_minus_1_deviation():
    scale = {0: 1.0, 1: 2.0, 2: 6.0}
    rows = [
        {
            "domain": "c4", "seed": seed, "split": split, "window": f"{split}{seed}.{index}+0", "layer": 1, "horizon": "full",
            "weights": WEIGHTS[index], "ce": 2 + factor * np.array(delta), "gradient_utility": PREDICTED[index], "noise": np.nan,
        }
        for seed, factor in scale.items()
        for split in ("development", "locked")
        for index, delta in enumerate([FIRST, SECOND])
    ]  # fmt: skip
    found = audit_tables(pd.DataFrame(rows))["measures"]
    uniform = select(found, measure="uniform", layer="pooled").set_index("seed")
    assert uniform.loc[["0", "1", "2"], "value"].to_numpy() == pytest.approx([0.015, 0.03, 0.09])
    assert uniform.loc["all", "value"] == pytest.approx(0.045)
    assert uniform.loc["all", "std"] == pytest.approx(0.015 * np.sqrt((4 + 1 + 9) / 2))  # 1, 2, 6 about 3
    assert uniform.loc[["0", "1", "2"], "std"].isna().all()

"""Predictions go from records to tables, and nothing of locked records gets into a fit."""

import numpy as np
import pandas as pd
import pytest

from aarlib.audit.gradients import utilities
from aarlib.audit.predictions import examples_of, predictions
from aarlib.studies.audit_predictors import predictor_tables
from tests.studies.test_audit import TOP_K, records

D_MODEL = 6


def with_features(seed: int = 0) -> pd.DataFrame:
    """The vertices' utilities are those of the gradient, exactly; the gradient is that of the hidden state."""
    rng = np.random.default_rng(seed)
    frame = records(num_windows=6, seeds=(0, 1), horizons=("full",))
    hidden = rng.standard_normal((len(frame), D_MODEL))
    outputs = rng.standard_normal((len(frame), TOP_K, D_MODEL))
    frame = frame.assign(
        hidden=list(hidden),
        outputs=list(outputs.reshape(len(frame), -1)),
        gradient=list(hidden),
        suffix=list(0 * hidden),
    )
    frame["expert_ids"] = [rng.permutation(8)[:TOP_K] for _ in range(len(frame))]
    examples = examples_of(frame)
    exact = utilities(examples.gradient, examples.outputs, examples.weights).numpy().astype(np.float64)
    ce = [np.concatenate([row[:-TOP_K], row[0] - utility]) for row, utility in zip(frame["ce"], exact, strict=True)]
    return frame.assign(ce=ce, gradient_utility=list(exact))


def test_predictions_become_tables_and_locked_labels_change_no_fit():
    frame = with_features()
    first = predictions(frame, 8, kinds=("gradient_field",))
    tables = predictor_tables(first)
    found = tables["predictors"].set_index(["seed", "measure"])["value"]
    assert found["all", "credit_subspace_lossless"] == pytest.approx(1.0)
    assert found["all", "gradient_field_spearman"] > 0.5
    assert tables["fits"]["seed"].tolist() == ["0", "1"] and tables["fits"]["can_learn"].all()
    locked = np.asarray(frame["split"] == "locked")
    leaky = frame.assign(
        gradient=[-g if out else g for g, out in zip(frame["gradient"], locked, strict=True)],
        ce=[c[::-1].copy() if out else c for c, out in zip(frame["ce"], locked, strict=True)],
    )
    second = predictions(leaky, 8, kinds=("gradient_field",))
    for one, other in zip(first.records["gradient_field"], second.records["gradient_field"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_records_without_features_are_refused():
    with pytest.raises(ValueError, match="records hold no features; set audit.predictors = true"):
        predictions(with_features().assign(hidden=None), 8)

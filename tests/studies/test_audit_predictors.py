"""Predictions go from records to tables, and nothing of locked records gets into a fit."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from aarlib.audit import predictions as predictions_module
from aarlib.audit.gradients import utilities
from aarlib.audit.predictions import FEATURES, LOSSLESS, examples_of, predictions
from aarlib.audit.predictors import KINDS, fit
from aarlib.studies.audit_predictors import predictor_tables
from aarlib.studies.intervals import select
from tests.studies.test_audit import TOP_K, records

D_MODEL = 6


def with_features(seed: int = 0, seeds: tuple[int, ...] = (0, 1)) -> pd.DataFrame:
    """The vertices' utilities are those of the gradient, exactly; the gradient is that of the hidden state."""
    rng = np.random.default_rng(seed)
    frame = records(num_windows=6, seeds=seeds, horizons=("full",))
    hidden = rng.standard_normal((len(frame), D_MODEL))
    outputs = rng.standard_normal((len(frame), TOP_K, D_MODEL))
    frame = frame.assign(
        hidden=list(hidden),
        outputs=list(outputs.reshape(len(frame), -1)),
        gradient=list(hidden),
        suffix=list(rng.standard_normal((len(frame), D_MODEL))),
    )
    frame["expert_ids"] = [rng.permutation(8)[:TOP_K] for _ in range(len(frame))]
    examples = examples_of(frame)
    exact = utilities(examples.gradient, examples.outputs, examples.weights).numpy().astype(np.float64)
    ce = [np.concatenate([row[:-TOP_K], row[0] - utility]) for row, utility in zip(frame["ce"], exact, strict=True)]
    return frame.assign(ce=ce, gradient_utility=list(exact))


def changed(frame: pd.DataFrame, split: str, names: tuple[str, ...]) -> pd.DataFrame:
    """Other values in the columns `names` of one split."""
    rows = np.asarray(frame["split"] == split)
    values = {
        name: [np.roll(value, 1) if change else value for value, change in zip(frame[name], rows, strict=True)]
        for name in names
    }
    return frame.assign(**values)


@pytest.fixture(scope="module")
def field():
    return predictions(with_features(), 8, kinds=("gradient_field",))


def test_predictions_become_tables_of_every_seed_and_layer(field):
    tables = predictor_tables(field)
    found = tables["predictors"].set_index(["layer", "seed", "measure"])
    assert set(tables["predictors"]["layer"]) == {"1", "3", "pooled"}
    for layer in ("1", "3", "pooled"):
        assert found.loc[(layer, "all", LOSSLESS), "value"] == pytest.approx(1.0)
        assert found.loc[(layer, "all", "gradient_field_spearman"), "value"] > 0.5
    pooled, single = ([found.loc[(layer, "all", LOSSLESS), "num_samples"] for layer in ls] for ls in (["pooled"], "13"))
    assert pooled == [24] and single == [12, 12]
    seeds = [found.loc[("pooled", seed, "gradient_field_policy"), "value"] for seed in "01"]
    together = found.loc[("pooled", "all", "gradient_field_policy")]
    assert together["value"] == pytest.approx(np.mean(seeds)) and together["std"] == pytest.approx(
        np.std(seeds, ddof=1)
    )
    assert tables["fits"]["seed"].tolist() == ["0", "1"] and tables["fits"]["can_learn"].all()


def test_a_predictor_that_cannot_learn_has_no_locked_score(field):
    rng = np.random.default_rng(0)
    second = np.asarray(field.records["seed"] == 1)
    noise = [
        rng.standard_normal(TOP_K) if bad else row
        for row, bad in zip(field.records["gradient_field"], second, strict=True)
    ]
    tables = predictor_tables(field._replace(records=field.records.assign(gradient_field=noise)))
    assert tables["fits"]["can_learn"].tolist() == [True, False] and tables["fits"]["train_spearman"].iloc[1] < 0.5
    found = tables["predictors"]
    scores, lossless = found[found["measure"] != LOSSLESS], select(found, measure=LOSSLESS)
    for seed, learned in {"0": True, "1": False, "all": False}.items():
        rows = select(scores, seed=seed)
        assert (rows["can_learn"] == learned).all() and len(rows) == 3 * 6
        assert rows[["value", "low", "high"]].notna().all(axis=None) == learned
        assert learned or rows[["value", "low", "high", "std"]].isna().all(axis=None)
    assert lossless["can_learn"].all() and lossless["value"].notna().all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_locked_records_gets_into_a_fit(kind, monkeypatch):
    monkeypatch.setattr(predictions_module, "fit", partial(fit, num_steps=10))
    frame = with_features(seeds=(0,))
    everything = (*FEATURES, "weights", "expert_ids", "ce", "gradient_utility")
    development = np.asarray(frame["split"] == "development")

    def scores(of: pd.DataFrame) -> np.ndarray:
        return np.stack(predictions(of, 8, kinds=(kind,)).records[kind].to_list())

    first = scores(frame)
    leaky = scores(changed(frame, "locked", everything))
    np.testing.assert_array_equal(first[development], leaky[development])
    assert np.abs(first[~development] - leaky[~development]).max() > 1e-3, "what is scored did change"
    labels = scores(changed(frame, "locked", ("ce", "gradient", "gradient_utility")))
    np.testing.assert_array_equal(first, labels)
    retrained = scores(changed(frame, "development", ("ce", "gradient")))
    assert np.abs(first - retrained).max() > 1e-3, "development labels do get into the fit"


def test_records_without_features_are_refused():
    with pytest.raises(ValueError, match="records hold no features; set audit.predictors = true"):
        predictions(with_features().assign(hidden=None), 8)

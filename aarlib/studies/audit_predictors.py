"""Predictors of commitment, as aarlib.audit.predictions scored them: on their own samples, and on each domain's locked ones."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from aarlib.audit.predictions import LOSSLESS, Predictions
from aarlib.studies.audit import ALL_SEEDS, Array, joined, ranking_measures
from aarlib.studies.audit_samples import Development, Locked, Samples, separate
from aarlib.studies.intervals import Ratio, distinct, mean_of, ratio_intervals, select

CAN_LEARN = 0.5
"""Spearman on its own training samples that a predictor must reach before its locked score means anything."""


def predictor_tables(predicted: Predictions) -> dict[str, pd.DataFrame]:
    """`fits` (a row per kind and seed) and `predictors` (a row per domain, seed, kind and measure, layers pooled)."""
    kept, kinds = predicted.records, distinct(predicted.fits, "kind")
    frames = []
    by_domain: dict[str, dict[int, dict[str, Ratio]]] = {}
    windows: dict[str, list[np.ndarray]] = {}
    for seed in distinct(kept, "seed"):
        for domain in distinct(kept, "domain"):
            of_domain = select(kept, seed=seed, domain=domain)
            locked = separate(of_domain).locked
            measured = dict(_measured(kinds, locked, select(of_domain, split="locked")))
            frames.append(ratio_intervals(measured, locked.windows).assign(domain=domain, seed=str(seed)))
            by_domain.setdefault(domain, {})[seed] = measured
            windows.setdefault(domain, []).append(locked.windows)
    for domain, sides in by_domain.items():
        frame = ratio_intervals(joined(sides), np.concatenate(windows[domain]))
        frames.append(frame.assign(domain=domain, seed=ALL_SEEDS))
    return {"fits": _fits(predicted), "predictors": pd.concat(frames, ignore_index=True)}


def _fits(predicted: Predictions) -> pd.DataFrame:
    """With the Spearman of each on the samples it was fitted on."""
    spearman = []
    for row in predicted.fits.to_dict("records"):
        seeds = np.asarray(predicted.records["seed"].astype(str) == row["seed"])
        development = select(pd.DataFrame(predicted.records.loc[seeds]), split="development")
        samples, scores = Development.from_records(development), _scores(development, row["kind"])
        found = ranking_measures("train", scores, samples)["train_spearman"]
        spearman.append(float(found.numerator.sum() / found.denominator.sum()))
    can_learn = [value >= CAN_LEARN for value in spearman]
    return predicted.fits.assign(train_spearman=spearman, can_learn=can_learn)


def _measured(kinds: list[str], locked: Locked, records: pd.DataFrame) -> Iterator[tuple[str, Ratio]]:
    lossless = _scores(records, LOSSLESS)
    gradient = Samples(locked.windows, locked.layers, -_padded(locked.gradient_utility), locked.weights, lossless)
    yield LOSSLESS, ranking_measures("x", lossless, gradient)["x_spearman"]
    for kind in kinds:
        scores = _scores(records, kind)
        yield from ranking_measures(kind, scores, locked).items()
        acted = np.take_along_axis(locked.vertices, scores.argmax(1)[:, None], 1)[:, 0]
        yield f"{kind}_policy", mean_of(acted)
        yield f"{kind}_captured", Ratio(acted, locked.vertices.min(1))
        yield f"{kind}_harm", mean_of((acted > 0).astype(np.float64))


def _padded(vertices: Array) -> Array:
    return np.concatenate([np.zeros((len(vertices), 4 + vertices.shape[1])), vertices], axis=1)


def _scores(records: pd.DataFrame, name: str) -> Array:
    return np.stack(records[name].to_list())

"""Predictors of commitment, as aarlib.audit.predictions scored them: on their own samples, and on each domain's locked ones."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from aarlib.audit.predictions import LOSSLESS, Predictions
from aarlib.stats import mean_and_std
from aarlib.studies.audit import ALL_SEEDS, POOLED, Array, joined, ranking_measures
from aarlib.studies.audit_samples import Development, Locked, Samples, separate
from aarlib.studies.intervals import Ratio, distinct, mean_of, ratio_intervals, select

CAN_LEARN = 0.5
"""Spearman on its own training samples that a predictor must reach before its locked score means anything."""
SCORES = ["value", "low", "high", "std"]


def predictor_tables(predicted: Predictions) -> dict[str, pd.DataFrame]:
    """`fits`: a row per kind and seed. `predictors`: a row per domain, layer (and all, `pooled`), seed (and all) and measure.

    Locked scores of a kind that cannot learn, in any of the row's seeds, are NaN and its can_learn False.
    """
    fits, kept = _fits(predicted), predicted.records
    frames = []
    for domain in distinct(kept, "domain"):
        of_domain = select(kept, domain=domain)
        frames.append(_by_seed(of_domain, fits).assign(domain=domain, layer=POOLED))
        for layer in sorted(distinct(of_domain, "layer")):
            frames.append(_by_seed(select(of_domain, layer=layer), fits).assign(domain=domain, layer=str(layer)))
    return {"fits": fits, "predictors": pd.concat(frames, ignore_index=True)}


def _by_seed(records: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """Each seed, and all together with the n-1 deviation of the seeds' values."""
    kinds = distinct(fits, "kind")
    measured: dict[int, dict[str, Ratio]] = {}
    windows, frames = list[np.ndarray](), list[pd.DataFrame]()
    for seed in distinct(records, "seed"):
        of_seed = select(records, seed=seed)
        locked = separate(of_seed).locked
        measured[seed] = dict(_measured(kinds, locked, select(of_seed, split="locked")))
        windows.append(locked.windows)
        frames.append(ratio_intervals(measured[seed], locked.windows).assign(seed=str(seed), std=np.nan))
    values = np.stack([frame["value"].to_numpy() for frame in frames])
    spread = [mean_and_std(column).std if np.isfinite(column).all() else np.nan for column in values.T]
    together = ratio_intervals(joined(measured), np.concatenate(windows))
    frames.append(together.assign(seed=ALL_SEEDS, std=spread))
    return _read(pd.concat(frames, ignore_index=True), select(fits, can_learn=False))


def _read(frame: pd.DataFrame, failed: pd.DataFrame) -> pd.DataFrame:
    """Only what may be read: nothing of a predictor whose fit failed."""
    kinds = frame["measure"].where(frame["measure"] != LOSSLESS, "").str.rpartition("_")[0]
    pairs = set(zip(failed["kind"], failed["seed"], strict=True)) | {(kind, ALL_SEEDS) for kind in failed["kind"]}
    can_learn = np.array([pair not in pairs for pair in zip(kinds, frame["seed"], strict=True)])
    frame = frame.assign(can_learn=can_learn)
    frame.loc[~can_learn, SCORES] = np.nan
    return frame


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

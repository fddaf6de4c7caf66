"""Predictors of commitment: fitted on development samples of all domains of a seed, reported on each domain's locked samples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from aarlib.audit.predictors import (
    KINDS,
    Examples,
    Kind,
    Predictor,
    credit_coordinates,
    credit_utilities,
    displacements,
    fit,
    predict,
)
from aarlib.studies.audit import ALL_SEEDS, Array, joined, ranking_measures
from aarlib.studies.audit_samples import Development, Locked, Samples, separate
from aarlib.studies.intervals import Ratio, distinct, mean_of, ratio_intervals, select

FEATURES = ("hidden", "outputs", "gradient", "suffix")
CAN_LEARN = 0.5
"""Spearman on its own training samples that a predictor must reach before its locked score means anything."""


class Fitted(NamedTuple):
    predictor: Predictor
    train_spearman: float

    @property
    def can_learn(self) -> bool:
        return self.train_spearman >= CAN_LEARN


def predictor_tables(records: pd.DataFrame, num_experts: int, kinds: Sequence[Kind] = KINDS) -> dict[str, pd.DataFrame]:
    """`fits` (a row per kind and seed) and `predictors` (a row per domain, seed, kind and measure, layers pooled)."""
    kept = pd.DataFrame(records.dropna(subset=list(FEATURES)))
    if kept.empty:
        raise ValueError("records hold no features; set audit.predictors = true and audit the full horizon")
    fits, frames = [], []
    by_domain: dict[str, dict[int, dict[str, Ratio]]] = {}
    windows: dict[str, list[np.ndarray]] = {}
    for seed in distinct(kept, "seed"):
        development = select(kept, seed=seed, split="development")
        fitted: dict[Kind, Fitted] = {kind: fit_on(development, num_experts, kind, int(seed)) for kind in kinds}
        fits += [_fit_row(kind, int(seed), one, len(development)) for kind, one in fitted.items()]
        for domain in distinct(kept, "domain"):
            of_domain = select(kept, seed=seed, domain=domain)
            locked = separate(of_domain).locked
            measured = dict(_measured(fitted, locked, examples_of(select(of_domain, split="locked"))))
            frames.append(ratio_intervals(measured, locked.windows).assign(domain=domain, seed=str(seed)))
            by_domain.setdefault(domain, {})[seed] = measured
            windows.setdefault(domain, []).append(locked.windows)
    for domain, sides in by_domain.items():
        frame = ratio_intervals(joined(sides), np.concatenate(windows[domain]))
        frames.append(frame.assign(domain=domain, seed=ALL_SEEDS))
    return {"fits": pd.DataFrame(fits), "predictors": pd.concat(frames, ignore_index=True)}


def fit_on(development: pd.DataFrame, num_experts: int, kind: Kind, seed: int) -> Fitted:
    """Fit on development records and score the fit on them."""
    if set(development["split"]) != {"development"}:
        raise ValueError(f"predictors are fitted on development records, not on {sorted(set(development['split']))}")
    samples, examples = Development.from_records(development), examples_of(development)
    predictor = fit(kind, examples, num_experts, seed)
    spearman = ranking_measures("train", _scores(predictor, examples), samples)["train_spearman"]
    return Fitted(predictor, float(spearman.numerator.sum() / spearman.denominator.sum()))


def examples_of(records: pd.DataFrame) -> Examples:
    samples = Samples.from_records(records)
    hidden, outputs, gradient, suffix = (
        torch.tensor(np.stack(records[name].to_list()), dtype=torch.float32) for name in FEATURES
    )
    return Examples(
        hidden,
        outputs.unflatten(1, (samples.top_k, -1)),
        torch.tensor(samples.weights, dtype=torch.float32),
        torch.tensor(np.stack(records["expert_ids"].to_list())),
        torch.tensor(samples.layers),
        gradient,
        suffix,
        torch.tensor(-samples.vertices, dtype=torch.float32),
    )


def _measured(fitted: Mapping[Kind, Fitted], locked: Locked, examples: Examples) -> Iterator[tuple[str, Ratio]]:
    displacement = displacements(examples.outputs, examples.weights)
    coordinates = credit_coordinates(examples.gradient, displacement)
    lossless = credit_utilities(coordinates, displacement).numpy()
    gradient = Samples(locked.windows, locked.layers, -_padded(locked.gradient_utility), locked.weights, lossless)
    yield "credit_subspace_lossless", ranking_measures("x", lossless, gradient)["x_spearman"]
    for kind, one in fitted.items():
        scores = _scores(one.predictor, examples)
        yield from ranking_measures(kind, scores, locked).items()
        acted = np.take_along_axis(locked.vertices, scores.argmax(1)[:, None], 1)[:, 0]
        yield f"{kind}_policy", mean_of(acted)
        yield f"{kind}_captured", Ratio(acted, locked.vertices.min(1))
        yield f"{kind}_harm", mean_of((acted > 0).astype(np.float64))


def _padded(vertices: Array) -> Array:
    return np.concatenate([np.zeros((len(vertices), 4 + vertices.shape[1])), vertices], axis=1)


def _scores(predictor: Predictor, examples: Examples) -> Array:
    return predict(predictor, examples).double().numpy()


def _fit_row(kind: Kind, seed: int, fitted: Fitted, num_samples: int) -> dict[str, object]:
    return {
        "kind": kind,
        "seed": str(seed),
        "num_parameters": fitted.predictor.num_parameters,
        "num_samples": num_samples,
        "num_steps": fitted.predictor.num_steps,
        "train_spearman": fitted.train_spearman,
        "can_learn": fitted.can_learn,
    }

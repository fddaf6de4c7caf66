"""Predictors fitted on an audit's development records, seed by seed, and their scores of all records. Records in, frames out."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from aarlib.audit.predictors import (
    KINDS,
    Examples,
    Kind,
    credit_coordinates,
    credit_utilities,
    displacements,
    fit,
    predict,
)

logger = logging.getLogger("aarlib")

FEATURES = ("hidden", "outputs", "gradient", "suffix")
LOSSLESS = "credit_subspace_lossless"


class Predictions(NamedTuple):
    records: pd.DataFrame
    """Those that hold features, with a column of scores [K] for each kind, and LOSSLESS: utilities from the exact coordinates."""
    fits: pd.DataFrame
    """kind, seed, num_parameters, num_samples, num_steps."""


def predictions(records: pd.DataFrame, num_experts: int, kinds: Sequence[Kind] = KINDS) -> Predictions:
    """A predictor of each kind for each seed, fitted on that seed's development records of all domains."""
    kept = records.dropna(subset=list(FEATURES)).reset_index(drop=True)
    if kept.empty:
        raise ValueError("records hold no features; set audit.predictors = true and audit the full horizon")
    scored: dict[str, list[Any]] = {name: [None] * len(kept) for name in (*kinds, LOSSLESS)}
    fits = []
    for seed in dict.fromkeys(kept["seed"]):
        rows = np.flatnonzero(np.asarray(kept["seed"] == seed))
        own = pd.DataFrame(kept.iloc[rows])
        development = pd.DataFrame(own.loc[np.asarray(own["split"] == "development")])
        examples = examples_of(own)
        displacement = displacements(examples.outputs, examples.weights)
        lossless = credit_utilities(credit_coordinates(examples.gradient, displacement), displacement)
        _put(scored[LOSSLESS], rows, lossless)
        for kind in kinds:
            logger.info("predictors: fitting %s of seed %s on %d samples", kind, seed, len(development))
            predictor = fit(kind, development_examples(development), num_experts, int(seed))
            _put(scored[kind], rows, predict(predictor, examples))
            counts = {"num_parameters": predictor.num_parameters, "num_samples": len(development)}
            fits.append({"kind": kind, "seed": str(seed), **counts, "num_steps": predictor.num_steps})
    return Predictions(kept.assign(**scored), pd.DataFrame(fits))


def development_examples(development: pd.DataFrame) -> Examples:
    """What may be fitted on; ValueError for anything else."""
    if set(development["split"]) != {"development"}:
        raise ValueError(f"predictors are fitted on development records, not on {sorted(set(development['split']))}")
    return examples_of(development)


def examples_of(records: pd.DataFrame) -> Examples:
    weights, ce = np.stack(records["weights"].to_list()), np.stack(records["ce"].to_list())
    top_k = weights.shape[1]
    hidden, outputs, gradient, suffix = (
        torch.tensor(np.stack(records[name].to_list()), dtype=torch.float32) for name in FEATURES
    )
    return Examples(
        hidden,
        outputs.unflatten(1, (top_k, -1)),
        torch.tensor(weights, dtype=torch.float32),
        torch.tensor(np.stack(records["expert_ids"].to_list())),
        torch.tensor(records["layer"].to_numpy(np.int64)),
        gradient,
        suffix,
        torch.tensor(ce[:, :1] - ce[:, -top_k:], dtype=torch.float32),
    )


def _put(column: list[Any], rows: Any, scores: torch.Tensor) -> None:
    for row, values in zip(rows, scores.double().numpy(), strict=True):
        column[row] = values

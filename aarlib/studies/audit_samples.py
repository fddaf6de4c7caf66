"""Audit records as arrays, development and locked apart by type: what is chosen takes Development, what is reported, Locked."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from aarlib.audit.actions import action_names
from aarlib.studies.intervals import distinct, select

MAX_DEVELOPMENT_HARM = 0.02


@dataclass(frozen=True)
class Samples:
    """N samples (window, layer) of one horizon; A actions, K slots."""

    windows: NDArray[np.str_]
    layers: NDArray[np.int64]
    delta: NDArray[np.float64]
    """[N, A]: CE of each action minus the native one's, nats."""
    weights: NDArray[np.float64]
    """[N, K]"""
    gradient_utility: NDArray[np.float64]
    """[N, K]"""

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]

    @property
    def actions(self) -> tuple[str, ...]:
        return action_names(self.top_k)

    @property
    def vertices(self) -> NDArray[np.float64]:
        """[N, K]: delta CE of committing to each slot."""
        return self.delta[:, -self.top_k :]

    def of_layer(self, layer: int | None) -> Self:
        """The samples of one layer; all of them for None."""
        if layer is None:
            return self
        keep = self.layers == layer
        return type(self)(*(value[keep] for value in vars(self).values()))

    @staticmethod
    def windows_of(records: pd.DataFrame) -> NDArray[np.str_]:
        return np.array(
            [f"{domain}/{window}" for domain, window in zip(records["domain"], records["window"], strict=True)]
        )

    @classmethod
    def from_records(cls, records: pd.DataFrame) -> Self:
        ce = np.stack(records["ce"].to_list())
        return cls(
            cls.windows_of(records),
            records["layer"].to_numpy(np.int64),
            ce - ce[:, :1],
            np.stack(records["weights"].to_list()).astype(np.float64),
            np.stack(records["gradient_utility"].to_list()).astype(np.float64),
        )


class Development(Samples):
    """Samples on which actions, thresholds and predictors are chosen."""


class Locked(Samples):
    """Samples on which everything is reported, and nothing is chosen."""


class Parts(NamedTuple):
    development: Development
    locked: Locked


def separate(records: pd.DataFrame) -> Parts:
    """Development and locked samples of records of one horizon.

    Raises ValueError where one of them is empty, a split has another name, or a window or its document is in both.
    """
    horizons = sorted(distinct(records, "horizon"))
    if len(horizons) != 1:
        raise ValueError(f"records of horizons {horizons} are mixed; give those of one horizon")
    unknown = sorted(set(records["split"]) - {"development", "locked"})
    if unknown:
        raise ValueError(f"split {unknown[0]!r} is neither development nor locked")
    sides = {split: select(records, split=split) for split in ("development", "locked")}
    for split, side in sides.items():
        if side.empty:
            raise ValueError(f"no {split} records; audit.{split} must be 1 or more windows")
    documents = {split: {document_of(window) for window in Samples.windows_of(side)} for split, side in sides.items()}
    shared = sorted(documents["development"] & documents["locked"])
    if shared:
        raise ValueError(
            f"development and locked share {len(shared)} documents, {shared[0]!r} among them; split by document"
        )
    return Parts(Development.from_records(sides["development"]), Locked.from_records(sides["locked"]))


def document_of(window: str) -> str:
    """The document that a window `<document>+<offset>` starts in."""
    return window.rpartition("+")[0]


def best_fixed_action(development: Development) -> str:
    """The one action other than native with the lowest mean loss over all layers."""
    _require_development(development)
    means = development.delta.mean(0)
    return development.actions[1 + int(np.argmin(means[1:]))]


def conservative_threshold(development: Development, max_harm: float = MAX_DEVELOPMENT_HARM) -> float:
    """The smallest threshold on max_j G_j whose policy harms at most `max_harm` of all development samples; inf for none.

    The policy commits to argmax_j G_j where max_j G_j reaches the threshold and leaves the others native.
    """
    _require_development(development)
    predicted = development.gradient_utility.max(1)
    harmed = gradient_best(development) > 0
    order = np.argsort(-predicted, kind="stable")
    harm = np.cumsum(harmed[order]) / len(order)
    # equal predictions act together: a threshold is valid where its whole group is counted
    last_of_group = np.append(predicted[order][1:] != predicted[order][:-1], True)
    allowed = np.flatnonzero((harm <= max_harm) & last_of_group)
    return float(predicted[order][allowed[-1]]) if allowed.size else float("inf")


def gradient_best(samples: Samples) -> NDArray[np.float64]:
    """Delta CE of the vertex with the largest gradient utility."""
    return np.take_along_axis(samples.vertices, samples.gradient_utility.argmax(1)[:, None], 1)[:, 0]


def _require_development(samples: Samples) -> None:
    if not isinstance(samples, Development):
        raise TypeError(f"choices are made on Development samples, not on {type(samples).__name__}")

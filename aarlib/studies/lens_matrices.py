"""Sender x receiver matrices of a lens run, every cell with its interval over documents."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from aarlib.studies.lens_samples import Array, Senders, resampled, senders_of

MEASURES = ("variance", "aps", "ans")
CELLS_AT_ONCE = 1024
COLUMNS = {
    "source": "name of the source",
    "level": "layer, head or expert",
    "sender": "component",
    "receiver": "layer of the router",
    "measure": "variance, aps or ans",
    "positions": "all, or without_first: every document's first token left out",
    "value": "mean over tokens",
    "low": "of the 95% interval, documents (experts: units of whole documents) resampled",
    "high": "of the same",
}


class CellIntervals(NamedTuple):
    value: Array
    low: Array
    high: Array


def matrices(records: pd.DataFrame, levels: tuple[str, ...] = ("layer", "head", "expert")) -> pd.DataFrame:
    """COLUMNS: one row a source, level, reached (sender, receiver) cell, measure and positions."""
    moments: Any = records[records["record"] == "moments"]
    frames = [
        matrix(senders_of(records, str(source), str(level))).assign(source=source, level=level)
        for source, level in moments[["source", "level"]].drop_duplicates().itertuples(index=False)
        if level in levels
    ]
    return pd.concat(frames, ignore_index=True)[list(COLUMNS)]  # pyright: ignore[reportReturnType]


def matrix(senders: Senders) -> pd.DataFrame:
    row, column = np.nonzero(senders.reached)
    cells = {
        "sender": np.array(senders.senders, dtype=object)[row],
        "receiver": np.array(senders.receivers)[column],
    }
    frames = []
    for measure in MEASURES:
        whole = senders.sums[measure][:, row, column]
        rest = whole - senders.sums[f"{measure}_first"][:, row, column]
        sides = {
            "all": cell_intervals(whole, senders.tokens),
            "without_first": cell_intervals(rest, senders.tokens - senders.first_tokens),
        }
        frames += [
            pd.DataFrame({**cells, "measure": measure, "positions": positions, **found._asdict()})
            for positions, found in sides.items()
        ]
    return pd.concat(frames, ignore_index=True)


def cell_intervals(sums: Array, tokens: Array) -> CellIntervals:
    """Of sums [N, cells] over tokens [N]: mean a token, and the 95% interval with the N samples drawn again."""
    parts = []
    for start in range(0, sums.shape[1], CELLS_AT_ONCE):
        block = resampled(np.concatenate([sums[:, start : start + CELLS_AT_ONCE], tokens[:, None]], axis=1))
        value, draws = (side[..., :-1] / side[..., -1:] for side in block)
        parts.append(np.stack([value, *np.percentile(draws, [2.5, 97.5], axis=0)]))
    return CellIntervals(*np.concatenate(parts, axis=1))

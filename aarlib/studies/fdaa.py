"""FDAA's tables (DESIGN 2.5): heads and controls on exactly paired windows. Records in, frames out.

Records: run, domain, split, layers, arm, seed, window, ce_sum, num_targets. Delta CE in nats per token of a window, negative is
better;
a window's value is the mean over seeds, then windows are bootstrapped.
"""

import hashlib
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from aarlib.stats import mean_and_std, paired_bootstrap, win_fraction

FIXED = ("uniform", "temperature_0.5", "temperature_2.0", "static")
"""Among which the strongest is chosen on development."""
MASKED = ("no_outputs", "no_hidden", "router_and_id")
KEYS = ["run", "domain", "layers"]
POOLED, ALL = "pooled", "all"


class Compared(NamedTuple):
    """One arm against another on the same windows."""

    mean: float
    low: float
    high: float
    seed_std: float
    """n-1 deviation over seeds of the mean over windows; NaN for one seed."""
    seeds: tuple[float, ...]
    win: float
    num_windows: int


def window_ce(records: pd.DataFrame) -> pd.DataFrame:
    """Mean CE of each window as columns (arm, seed), rows by (run, domain, split, layers, window); arms paired, none missing."""
    frame = records.assign(ce=records["ce_sum"] / records["num_targets"])
    counts = frame.groupby(["run", "domain", "split", "layers", "window"])["num_targets"].nunique()
    uneven = counts.index[(counts != 1).to_numpy()]
    if len(uneven):
        raise ValueError(f"window {uneven[0]} has different target counts between arms")
    return frame.pivot(index=["run", "domain", "split", "layers", "window"], columns=["arm", "seed"], values="ce")


def compare(ce: pd.DataFrame, arm: str, against: str) -> Compared:
    """`arm` minus `against` over the rows of `ce`; an arm with one seed stands beside every seed of the other.

    ValueError where both have several seeds and not the same ones, or a window is missing.
    """
    ours, theirs = _seeds(ce, arm), _seeds(ce, against)
    seeds = ours.columns if len(ours.columns) >= len(theirs.columns) else theirs.columns
    differences = np.stack([_of(ours, seed) - _of(theirs, seed) for seed in seeds])
    by_window = differences.mean(axis=0)
    by_seed = differences.mean(axis=1)
    interval = paired_bootstrap(by_window)
    std = mean_and_std(by_seed).std
    return Compared(*interval, std, tuple(map(float, by_seed)), win_fraction(by_window), len(by_window))


def strongest_fixed(development: pd.DataFrame) -> str:
    """The control with the lowest mean CE on development windows."""
    present = {arm for arm, _ in development.columns}
    return min(
        (arm for arm in FIXED if arm in present), key=lambda arm: float(_seeds(development, arm).to_numpy().mean())
    )


def domain_table(records: pd.DataFrame, layers: str | None = None) -> pd.DataFrame:
    """One row per (run, domain, layers): the head against native and every control, on test windows."""
    ce = window_ce(records)
    rows = []
    for keys in ce.index.droplevel(["split", "window"]).unique():
        if layers is not None and keys[2] != layers:
            continue
        part = ce.loc[keys[:2]].xs(keys[2], level="layers")
        development, test = _complete(part.loc["development"], keys), _complete(part.loc["test"], keys)
        strongest = strongest_fixed(development)
        row = dict(zip(KEYS, keys, strict=True)) | {"native_ce": float(_seeds(test, "native").to_numpy().mean())}
        controls = ["native", "permuted", *(arm for arm in FIXED if arm in {name for name, _ in test.columns})]
        for control in controls:
            row |= _named(f"vs_{control}", compare(test, "fdaa", control))
        row |= {"strongest_fixed": strongest, **_named("vs_strongest", compare(test, "fdaa", strongest))}
        rows.append(row)
    return pd.DataFrame(rows)


def control_table(records: pd.DataFrame) -> pd.DataFrame:
    """One row per (run, domain, layers, arm): every control and mask against native, on test windows."""
    ce = window_ce(records)
    rows = []
    for keys in ce.index.droplevel(["split", "window"]).unique():
        test = _complete(ce.loc[keys[:2]].xs(keys[2], level="layers").loc["test"], keys)
        for arm in sorted({name for name, _ in test.columns} - {"native"}):
            rows.append(
                dict(zip(KEYS, keys, strict=True)) | {"arm": arm} | _named("vs_native", compare(test, arm, "native"))
            )
    return pd.DataFrame(rows)


def layer_table(records: pd.DataFrame) -> pd.DataFrame:
    """A head of several layers: each layer alone, pooled over (window, layer) cells, and all of them together.

    A window's pooled value is its mean over layers, so that windows are resampled whole.
    """
    ce = window_ce(records)
    rows = []
    for run, domain in ce.index.droplevel(["split", "layers", "window"]).unique():
        part = ce.loc[(run, domain)]
        places = [place for place in part.index.get_level_values("layers").unique()]
        if ALL not in places:
            continue
        singles = [place for place in places if place != ALL]
        choices = [(place, [place]) for place in singles] + [(POOLED, singles), (ALL, [ALL])]
        for label, chosen in choices:
            cells: Any = _complete(part[part.index.get_level_values("layers").isin(chosen)], (run, domain, label))
            cells = cells.groupby(level=["split", "window"], sort=False).mean()
            development, test = cells.loc["development"], cells.loc["test"]
            strongest = strongest_fixed(development)
            rows.append(
                {"run": run, "domain": domain, "layers": label, "strongest_fixed": strongest}
                | _named("vs_native", compare(test, "fdaa", "native"))
                | _named("vs_strongest", compare(test, "fdaa", strongest))
                | _named("vs_permuted", compare(test, "fdaa", "permuted"))
                | (_named("vs_static", compare(test, "fdaa", "static")) if _has(test, "static") else {})
            )
    return pd.DataFrame(rows)


def _complete(ce: pd.DataFrame, place: tuple[str, ...]) -> pd.DataFrame:
    """The (arm, seed) columns that were evaluated at `place`; ValueError where one of them lacks a window."""
    found = ce.dropna(axis=1, how="all")
    rows, columns = np.nonzero(found.isna().to_numpy())
    if rows.size:
        (arm, seed), where = found.columns[columns[0]], found.index[rows[0]]
        raise ValueError(
            f"records of {place}: {arm}, seed {seed}, is not finite or missing at {where}; evaluate its unit again"
        )
    return found


def _has(ce: pd.DataFrame, arm: str) -> bool:
    return arm in ce.columns.get_level_values("arm")


def _named(prefix: str, compared: Compared) -> dict[str, object]:
    return {f"{prefix}/{name}": value for name, value in compared._asdict().items()}


def _seeds(ce: pd.DataFrame, arm: str) -> pd.DataFrame:
    return ce.xs(arm, axis=1, level="arm")


def _of(values: pd.DataFrame, seed: int) -> np.ndarray:
    if len(values.columns) > 1 and seed not in values.columns:
        raise ValueError(
            f"seed {seed} has no counterpart among seeds {list(values.columns)} of the arm it is compared with; train it"
        )
    column = seed if seed in values.columns else values.columns[0]
    return values[column].to_numpy()


def window_table(records: pd.DataFrame) -> pd.DataFrame:
    """One row per (run, domain, split): how many windows, and the SHA-256 of their sorted ids, one a line."""
    rows = []
    groups: Any = records.groupby(["run", "domain", "split"], sort=False)
    for keys, part in groups:
        ids = sorted(part["window"].unique())
        digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        rows.append(dict(zip(("run", "domain", "split"), keys, strict=True)) | {"windows": len(ids), "sha256": digest})
    return pd.DataFrame(rows)


def results(records: pd.DataFrame) -> dict[str, list[dict[str, object]]]:
    """Every table as JSON-able rows: `domains`, `controls`, `layers`, and `windows`, on which they were measured."""
    found = {
        "domains": domain_table(records),
        "controls": control_table(records),
        "layers": layer_table(records),
        "windows": window_table(records),
    }
    return {name: _rows(frame) for name, frame in found.items()}


def metrics_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """MLflow metrics: of every (run, domain, layers) native CE, and the head against native, permuted and strongest control."""
    names = [f"vs_{other}/{part}" for other in ("native", "permuted", "strongest") for part in ("mean", "low", "high")]
    return {
        f"fdaa/{row['run']}/{row['domain']}/layers_{row['layers']}/{name}": float(row[name])
        for row in found["domains"]
        for name in ("native_ce", *names)
        if row[name] is not None
    }


def merged(studies: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Results of several studies as one, the beginning that all names of runs share left out."""
    joined = {key: [row for study in studies for row in study.get(key, ())] for key in studies[0]}
    shared = commonprefix([row["run"] for rows in joined.values() for row in rows if "run" in row])
    shared = shared[: shared.rfind("_") + 1]

    def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "run": row["run"].removeprefix(shared)} if "run" in row else dict(row)

    return {key: [shortened(row) for row in rows] for key, rows in joined.items()}


def _rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    return [{key: _plain(value) for key, value in row.items()} for row in frame.to_dict("records")]


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [round(float(item), 6) for item in value]
    if isinstance(value, float | np.floating):
        return None if np.isnan(value) else round(float(value), 6)
    return int(value) if isinstance(value, np.integer) else value

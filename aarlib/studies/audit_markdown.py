"""The audit's results as Markdown tables, from the JSON alone."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from aarlib.studies.audit import ALL_SEEDS, POOLED
from aarlib.studies.audit_findings import verdicts
from aarlib.studies.intervals import distinct, select

HEADROOM = {
    "structured_oracle": "structured oracle",
    "vertex_oracle": "vertex oracle",
    "vertex_or_native_oracle": "best of the vertices and native",
    "vertex_share": "its share",
    "fixed_action": "fixed action of development",
    "uniform": "uniform",
    "temperature_0.5": "tau 0.5",
    "temperature_2.0": "tau 2.0",
    "router_top1_vertex": "router's top-1 vertex",
}
ROUTER = {
    "router_top1_is_best": "top-1 is the best vertex",
    "best_vertex_rank": "mean rank of the best vertex",
    "router_spearman": "Spearman of weight and utility",
}
GRADIENT = {
    "gradient_spearman": "Spearman",
    "gradient_pairwise": "pairwise",
    "gradient_top1": "top-1",
    "gradient_best_vertex": "delta CE of its best vertex",
    "gradient_captured": "share of the vertex oracle",
    "gradient_harm": "harm rate",
}
CONSERVATIVE = {
    "conservative": "delta CE",
    "conservative_harm": "harm rate",
    "conservative_acts": "acts on",
}
CANNOT_LEARN = "not read: cannot learn"
"""In place of the locked score of a predictor that does not reach its training samples."""


def frame_of(found: Mapping[str, Any], name: str) -> pd.DataFrame:
    """One table of the results."""
    return pd.DataFrame(found[name]["rows"], columns=found[name]["columns"])


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Markdown tables by name, from the JSON alone."""
    frame = frame_of(found, "measures")
    horizons = distinct(frame, "horizon")
    floors = {horizon: _floor(frame_of(found, "noise"), horizon) for horizon in horizons}
    shown = {}
    for horizon in horizons:
        part = select(frame, horizon=horizon)
        floor = floors[horizon]
        shown[f"headroom_{horizon}"] = f"{_by_domain(part, HEADROOM)}\n\n{floor}"
        shown[f"router_{horizon}"] = f"{_by_domain(part, ROUTER)}\n\n{_constant(part, 'router_spearman')}"
        shown[f"gradient_{horizon}"] = f"{_by_domain(part, GRADIENT)}\n\n{_constant(part, 'gradient_spearman')} {floor}"
        shown[f"conservative_{horizon}"] = f"{_by_domain(part, CONSERVATIVE)}\n\n{floor}"
        shown[f"layers_{horizon}"] = f"{_by_layer(part)}\n\n{floor}"
    first = horizons[0]
    shown["findings"] = _findings(found, select(frame, horizon=first))
    shown["seeds"] = f"{_by_seed(select(frame, horizon=first))}\n\n{floors[first]}"
    shown["ranks"] = f"{_ranks(frame_of(found, 'by_rank'))}\n\n{floors[first]}"
    shown["choices"] = _choices(frame_of(found, "choices"))
    shown["noise"] = _noise(frame_of(found, "noise").to_dict("records"))
    if "fits" in found:
        shown["fits"] = _fits(frame_of(found, "fits"))
        predictors = frame_of(found, "predictors")
        shown["predictors"] = f"{_predictors(predictors)}\n\n{floors[first]}"
        shown["predictors_by_layer"] = f"{_predictors_by_layer(predictors)}\n\n{floors[first]}"
    return shown


def _floor(noise: pd.DataFrame, horizon: str) -> str:
    """The noise floor as a caption."""
    rows = select(noise, horizon=horizon).to_dict("records")
    if not rows:
        return "Noise floor of a delta CE: not measured."
    return (
        f"Noise floor of a delta CE (largest difference, exact against batched, {rows[0]['num_samples']} samples): "
        f"{rows[0]['noise_floor']:.1e}."
    )


def _constant(part: pd.DataFrame, measure: str) -> str:
    """How many samples have no rank correlation."""
    rows = select(part, seed=ALL_SEEDS, layer=POOLED, measure=measure).to_dict("records")
    counts = ", ".join(f"{row['domain']} {row['num_excluded']} of {row['num_samples']:,}" for row in rows)
    return f"Constant samples, left out of the Spearman: {counts}."


def _findings(found: Mapping[str, Any], part: pd.DataFrame) -> str:
    pooled = [select(part, seed=ALL_SEEDS, layer=POOLED)]
    if "predictors" in found:
        pooled.append(select(frame_of(found, "predictors"), seed=ALL_SEEDS, layer=POOLED))
    top_k = sum(name.startswith("best_") for name in distinct(frame_of(found, "by_rank"), "measure"))
    return markdown(*verdicts(pd.concat(pooled), top_k))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Any, deviation: bool = False) -> str:
    """value [low, high], and +- over seeds."""
    if pd.isna(row["value"]):
        return "none"
    digits = 4 if abs(row["value"]) < 1 else 3
    text = f"{row['value']:.{digits}f} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"
    std = row.get("std")
    return f"{text} +- {std:.{digits}f}" if deviation and std is not None and pd.notna(std) else text


def _by_domain(part: pd.DataFrame, measures: Mapping[str, str]) -> str:
    pooled = select(part, seed=ALL_SEEDS, layer=POOLED).set_index(["domain", "measure"])
    domains = distinct(part, "domain")
    rows = [
        [label, *(_cell(pooled.loc[(domain, name)], deviation=True) for domain in domains)]
        for name, label in measures.items()
    ]
    return markdown(["", *domains], rows)


def _by_layer(part: pd.DataFrame) -> str:
    shown = {
        "structured_oracle": "structured oracle",
        "vertex_share": "vertex share",
        "router_spearman": "router Spearman",
        "gradient_spearman": "gradient Spearman",
        "gradient_captured": "gradient captures",
    }
    table = select(part, seed=ALL_SEEDS).set_index(["domain", "layer", "measure"])
    layers = sorted(distinct(part, "layer"), key=_layer_order)
    keys = [(domain, layer) for domain in distinct(part, "domain") for layer in layers]
    rows = [[*key, *(_cell(table.loc[(*key, name)]) for name in shown)] for key in keys]
    return markdown(["domain", "layer", *shown.values()], rows)


def _layer_order(layer: str) -> int:
    return 10**6 if layer == POOLED else int(layer)


def _by_seed(part: pd.DataFrame) -> str:
    shown = ("structured_oracle", "vertex_oracle", "router_spearman", "gradient_spearman", "gradient_best_vertex")
    table = select(part, layer=POOLED).set_index(["domain", "seed", "measure"])
    seeds = [seed for seed in distinct(part, "seed") if seed != ALL_SEEDS]
    keys = [(domain, seed) for domain in distinct(part, "domain") for seed in seeds]
    rows = [[*key, *(_cell(table.loc[(*key, name)]) for name in shown)] for key in keys]
    return markdown(["domain", "seed", *(name.replace("_", " ") for name in shown)], rows)


def _ranks(frame: pd.DataFrame) -> str:
    full = select(frame, horizon=distinct(frame, "horizon")[0]).set_index(["domain", "measure"])
    domains, names = distinct(frame, "domain"), distinct(frame, "measure")
    labels = [name.replace("utility_", "utility of rank ").replace("best_", "best vertex at rank ") for name in names]
    rows = [
        [label, *(_cell(full.loc[(domain, name)]) for domain in domains)]
        for name, label in zip(names, labels, strict=True)
    ]
    return markdown(["", *domains], rows)


def _choices(frame: pd.DataFrame) -> str:
    rows = [
        [row["domain"], row["horizon"], row["seed"], row["fixed_action"], _threshold(row["threshold"])]
        for row in frame.to_dict("records")
    ]
    return markdown(["domain", "horizon", "seed", "fixed action", "threshold on max G"], rows)


def _threshold(value: Any) -> str:
    return "none: never acts" if value == "inf" else f"{float(value):.5f}"


def _noise(rows: list[dict[str, Any]]) -> str:
    shown = ("median", "percentile_99", "noise_floor")
    cells = [[str(row["horizon"]), *(f"{row[name]:.1e}" for name in shown), str(row["num_samples"])] for row in rows]
    return markdown(["horizon", "median", "99th percentile", "largest", "samples"], cells)


def _fits(frame: pd.DataFrame) -> str:
    rows = [
        [
            row["kind"].replace("_", " "),
            str(row["seed"]),
            f"{row['num_parameters']:,}",
            str(row["num_samples"]),
            f"{row['train_spearman']:.3f}",
            "yes" if row["can_learn"] else "no",
        ]
        for row in frame.to_dict("records")
    ]
    return markdown(["predictor", "seed", "parameters", "samples", "Spearman on its own samples", "can learn"], rows)


def _predictors(frame: pd.DataFrame) -> str:
    table = select(frame, seed=ALL_SEEDS, layer=POOLED).set_index(["domain", "measure"])
    domains, names = distinct(frame, "domain"), distinct(frame, "measure")
    shown = [name for name in names if name.endswith(("lossless", "spearman", "policy", "captured", "harm"))]
    rows = [
        [name.replace("_", " "), *(_predictor_cell(table.loc[(domain, name)]) for domain in domains)] for name in shown
    ]
    return markdown(["", *domains], rows)


def _predictors_by_layer(frame: pd.DataFrame) -> str:
    """Spearman within the selection, and delta CE of committing to the best-scored vertex."""
    table = select(frame, seed=ALL_SEEDS).set_index(["domain", "layer", "measure"])
    names = [name for name in distinct(frame, "measure") if name.endswith(("spearman", "policy"))]
    layers = sorted(distinct(frame, "layer"), key=_layer_order)
    keys = [(domain, layer) for domain in distinct(frame, "domain") for layer in layers]
    rows = [[*key, *(_predictor_cell(table.loc[(*key, name)]) for name in names)] for key in keys]
    return markdown(["domain", "layer", *(name.replace("_", " ") for name in names)], rows)


def _predictor_cell(row: Any) -> str:
    return _cell(row, deviation=True) if row["can_learn"] else CANNOT_LEARN

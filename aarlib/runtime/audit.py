"""The audit over a corpus: windows drawn per domain, seed and split, audited in units by the actors of `run_units`.

A unit is a shard of windows at all audited layers: the prefix, the native suffix and the backward of a window are then paid
once and not once a layer. One record for each (window, layer, horizon); RECORD_COLUMNS.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from aarlib.audit.actions import action_names, check_freedom
from aarlib.audit.gradients import Credit, credits, utilities
from aarlib.audit.replay import Isolation, action_ce
from aarlib.config import Config
from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.loading import load_config, meta_model
from aarlib.runtime.audit_config import AuditRunConfig
from aarlib.runtime.audit_units import draw_units
from aarlib.runtime.evaluation import load_base
from aarlib.runtime.unit_parts import Unit
from aarlib.runtime.units import Resources, run_units
from aarlib.studies.audit import ALL_SEEDS, POOLED
from aarlib.studies.intervals import select
from aarlib.training.adapter import load_adapter
from aarlib.training.config import ModelConfig

RECORD_COLUMNS = {
    "domain": "name of the corpus",
    "seed": "draw of windows and positions",
    "split": "development or locked",
    "window": "<document>+<token offset> of the window's first token",
    "position": "audited token, counted from 0 in the window",
    "layer": "audited MoE layer, counted from 0",
    "horizon": "targets of the loss, or full",
    "num_targets": "targets from the position to the horizon's end",
    "weights": "router's weights of the K selected experts, in the router's order",
    "expert_ids": "their ids",
    "ce": "mean CE in nats of each action, in the order of aarlib.audit.actions.action_names",
    "gradient_utility": "first-order predicted drop of the loss by committing to each slot",
    "noise": "largest difference of a delta CE between exact and batched replay; NaN where not measured",
    "hidden": "router input h (full horizon only, where predictors are asked for)",
    "outputs": "expert outputs u, K x D flattened",
    "gradient": "d loss / d routed sum",
    "suffix": "mean input embedding of the tokens after the position",
}


def audit(config: AuditRunConfig, folder: Path) -> pd.DataFrame:
    """All records of the config; finished units of `folder` are not repeated. Ray must be initialised."""
    units = draw_units(config)
    settings = {
        "model": config.model.model_dump(mode="json"),
        "adapter": None if config.adapter is None else str(config.adapter),
        "audit": config.audit.model_dump(mode="json", exclude={"domains"}),
        "gpus": config.ray.gpus_per_actor,
    }
    resources = Resources(
        cpus=config.ray.cpus_per_actor,
        gpus=config.ray.gpus_per_actor,
        environment={"OMP_NUM_THREADS": str(max(1, int(config.ray.cpus_per_actor)))},
    )
    records = run_units(
        units,
        Auditor,
        folder / "units",
        settings=settings,
        num_actors=config.ray.num_actors,
        resources=resources,
        label="audit",
    )
    temporary = folder / ".records.parquet.tmp"
    records.to_parquet(temporary, index=False)
    temporary.replace(folder / "records.parquet")
    return records


def check(config: AuditRunConfig) -> Anatomy:
    """The model's anatomy from its configuration alone; ValueError for layers that it does not have, or top_k = 1."""
    parts = anatomy(meta_model(load_config(config.model.name, config.model.revision, config.model.geometry)))
    check_freedom(parts.top_k)
    for layer in config.audit.layers:
        parts.moe_layer(layer)
    return parts


class Auditor:
    """The worker of `run_units`: oracle, gradient utilities and features of the windows of one unit."""

    def __init__(self, model: Mapping[str, Any], adapter: str | None, audit: Mapping[str, Any], gpus: float) -> None:
        self._model, _ = load_base(ModelConfig.from_mapping(model), gpus)
        self._adapter = None if adapter is None else load_adapter(self._model, adapter)
        self._settings = _UnitSettings.from_mapping(audit)
        self._parts = anatomy(self._model)

    def __call__(self, unit: Unit) -> pd.DataFrame:
        rows: Sequence[Mapping[str, Any]] = unit["windows"]
        device = self._model.get_input_embeddings().weight.device
        input_ids = torch.tensor([row["tokens"] for row in rows], device=device)
        places = [(index, row["position"]) for index, row in enumerate(rows)]
        losses = self._losses(input_ids, places)
        noise = self._noise(input_ids, places[: self._settings.noise_samples], losses)
        records = []
        for horizon in self._settings.horizons:
            count = None if horizon == "full" else horizon
            found = credits(self._model, input_ids, self._settings.layers, horizon=count, positions=places)
            for layer in self._settings.layers:
                for index, row in enumerate(rows):
                    ce = losses[index, row["position"], layer][:, :count].double()
                    records.append(
                        {
                            **{name: row[name] for name in ("domain", "seed", "split", "window", "position")},
                            "layer": layer,
                            "horizon": str(horizon),
                            "num_targets": ce.shape[1],
                            "ce": ce.mean(1).tolist(),
                            "noise": noise.get((index, layer, horizon), float("nan")),
                            **self._of_credit(found[layer], index, input_ids[index, row["position"] + 1 :], horizon),
                        }
                    )
        return pd.DataFrame(records).reindex(columns=list(RECORD_COLUMNS))

    def _losses(
        self, input_ids: Tensor, places: Sequence[tuple[int, int]], isolation: Isolation | None = None
    ) -> dict[Any, Tensor]:
        samples = [(*place, layer) for place in places for layer in self._settings.layers]
        found = action_ce(
            self._model,
            input_ids,
            samples,
            isolation=isolation or self._settings.isolation,
            max_tokens=self._settings.max_tokens,
        )
        return {sample.key: sample.ce for sample in found}

    def _noise(
        self, input_ids: Tensor, places: Sequence[tuple[int, int]], losses: Mapping[Any, Tensor]
    ) -> dict[Any, float]:
        """By (window, layer, horizon): the largest difference of a delta CE under the other isolation."""
        if not places:
            return {}
        others = self._losses(input_ids, places, "batched" if self._settings.isolation == "exact" else "exact")
        noise = {}
        for (index, position, layer), ce in others.items():
            for horizon in self._settings.horizons:
                count = None if horizon == "full" else horizon
                means = [side[:, :count].double().mean(1) for side in (ce, losses[index, position, layer])]
                deltas = [mean - mean[0] for mean in means]
                noise[index, layer, horizon] = float((deltas[0] - deltas[1]).abs().max())
        return noise

    def _of_credit(self, credit: Credit, index: int, following: Tensor, horizon: Any) -> dict[str, Any]:
        at = int((credit.rows == index).nonzero()[0, 0])
        own = utilities(credit.gradient[at], credit.outputs[at], credit.weights[at])
        fields: dict[str, Any] = {
            "weights": credit.weights[at].float().tolist(),
            "expert_ids": credit.expert_ids[at].tolist(),
            "gradient_utility": own.tolist(),
        }
        if self._settings.predictors and horizon == "full":
            suffix = self._model.get_input_embeddings()(following).float().mean(0)
            kept = {
                "hidden": credit.hidden[at],
                "outputs": credit.outputs[at].flatten(),
                "gradient": credit.gradient[at],
            }
            fields |= {name: value.float().cpu().numpy() for name, value in {**kept, "suffix": suffix}.items()}
        return fields


class _UnitSettings(Config):
    """The part of AuditConfig that an actor needs."""

    layers: tuple[int, ...]
    seeds: tuple[int, ...]
    window: int
    horizons: tuple[int | Literal["full"], ...]
    development: int
    locked: int
    locked_share: float
    isolation: Isolation
    noise_samples: int
    windows_per_unit: int
    max_tokens: int
    predictors: bool


def metrics_of(measures: pd.DataFrame, noise: pd.DataFrame) -> dict[str, float]:
    """MLflow metrics: every measure with layers and seeds pooled, and the noise floors."""
    pooled = select(measures, layer=POOLED, seed=ALL_SEEDS).dropna(subset=["value"])
    metrics = {
        f"audit/{row['domain']}/{row['horizon']}/{row['measure']}": float(row["value"])
        for row in pooled.to_dict("records")
    }
    floors = {f"audit/noise_floor/{row['horizon']}": float(row["noise_floor"]) for row in noise.to_dict("records")}
    return metrics | floors


def actions_of(parts: Anatomy) -> tuple[str, ...]:
    return action_names(parts.top_k)

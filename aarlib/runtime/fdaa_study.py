"""The FDAA study: every trained head and control on exactly the same windows, by `run_units`.

One unit per (run of `train`, domain, split). Arms act at one layer, on a prefix run once for all of them; heads of several layers
also at all of their layers together.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from aarlib.audit.head import Mask
from aarlib.data.chat import Encoded, collate
from aarlib.data.corpora import separator_id, split_of, windows
from aarlib.data.sampling import row_hash
from aarlib.fdaa.attach import AggregationHandle, attach_fdaa
from aarlib.fdaa.config import FixedConfig
from aarlib.fdaa.controls import window_permutations
from aarlib.runtime.evaluation import load_base
from aarlib.runtime.fdaa_config import FDAAConfig, FDAAStudyConfig
from aarlib.runtime.fdaa_runs import find_adapters
from aarlib.runtime.population import enable_only
from aarlib.runtime.storage import located
from aarlib.runtime.text_corpus import documents_of, find_texts
from aarlib.runtime.unit_parts import Unit
from aarlib.runtime.units import Resources, run_units
from aarlib.runtime.writer import adapter_folder
from aarlib.training.adapter import load_adapter
from aarlib.training.config import ModelConfig
from aarlib.training.objectives import RowCE, next_token_ce
from aarlib.training.prefix import FrozenPrefix, resumed

logger = logging.getLogger("aarlib")

ALL = "all"
FIXED = {"native": 1.0, "uniform": math.inf, "temperature_0.5": 0.5, "temperature_2.0": 2.0}
MASKS: dict[str, tuple[Mask, ...]] = {
    "no_outputs": ("outputs",),
    "no_hidden": ("hidden",),
    "router_and_id": ("hidden", "outputs"),
}


class Arm(NamedTuple):
    name: str
    """native, uniform, temperature_..., static, fdaa, permuted, or a mask of MASKS."""
    seed: int
    handle: AggregationHandle
    masked: tuple[Mask, ...] = ()
    permuted: bool = False


class Loss(NamedTuple):
    layers: str
    arm: Arm
    ce: RowCE


class Windows(NamedTuple):
    development: list[Encoded]
    test: list[Encoded]


def study(config: FDAAStudyConfig, folder: Path) -> pd.DataFrame:
    """Records of every (run, domain, split, layers, arm, seed, window): ce_sum, num_targets; also folder/records.parquet."""
    adapters = {name: find_adapters(config, name) for name in config.fdaa.runs}
    units = [
        {"id": f"{name}.{domain}.{split}", "run": name, "domain": domain, "split": split, "adapters": found}
        for name, found in adapters.items()
        for domain in config.fdaa.domains
        for split in ("development", "test")
    ]
    settings = {
        "model": config.model.model_dump(mode="json"),
        "fdaa": config.fdaa.model_dump(mode="json"),
        "gpus": config.ray.gpus_per_actor,
    }
    resources = Resources(cpus=config.ray.cpus_per_actor, gpus=config.ray.gpus_per_actor)
    frame = run_units(
        units,
        Evaluator,
        folder,
        settings=settings,
        place={"storage": located(config.ray.storage)},
        num_actors=config.ray.num_actors,
        resources=resources,
        label="study",
    )
    temporary = folder / ".records.parquet.tmp"
    frame.to_parquet(temporary, index=False)
    temporary.replace(folder / "records.parquet")
    return frame


class Evaluator:
    """The worker of `run_units`: holds the base, loads the heads of a run for each unit."""

    def __init__(self, model: Mapping[str, Any], fdaa: Mapping[str, Any], gpus: float, storage: str) -> None:
        self._storage = storage
        config = ModelConfig.from_mapping(model)
        self._model, self._tokenizer = load_base(config, gpus)
        if config.adapter is not None:
            load_adapter(self._model, config.adapter)
        self._config = FDAAStudyConfig.from_mapping({"name": "unit", "fdaa": fdaa}).fdaa
        self._windows: dict[str, Windows] = {}

    def __call__(self, unit: Unit) -> pd.DataFrame:
        handles: list[AggregationHandle] = []
        try:
            layers = unit["adapters"][0]["layers"]
            arms = self._arms(unit["adapters"], layers, handles)
            rows = getattr(self._of_domain(unit["domain"]), unit["split"])
            size = self._config.batch_size
            parts = [rows[start : start + size] for start in range(0, len(rows), size)]
            frames = [self._evaluate(part, arms, layers, handles) for part in parts]
        finally:
            for handle in handles:
                handle.detach()
        return pd.concat(frames, ignore_index=True).assign(run=unit["run"], domain=unit["domain"], split=unit["split"])

    def _arms(
        self, adapters: Sequence[Mapping[str, Any]], layers: Sequence[int], handles: list[AggregationHandle]
    ) -> list[Arm]:
        arms: list[Arm] = []
        for name, tau in FIXED.items():
            enable_only(None, handles)
            handles.append(attach_fdaa(self._model, FixedConfig(layers=tuple(layers), tau=tau)))
            arms.append(Arm(name, 0, handles[-1]))
        for adapter in adapters:
            enable_only(None, handles)
            folder = adapter_folder(self._storage, adapter["path"], adapter["sha256"])
            handle = load_adapter(self._model, folder, method=adapter["method"])
            assert isinstance(handle, AggregationHandle)
            handles.append(handle)
            if adapter["method"] == "static_calibrator":
                arms.append(Arm("static", adapter["seed"], handle))
                continue
            arms.append(Arm("fdaa", adapter["seed"], handle))
            arms.append(Arm("permuted", adapter["seed"], handle, permuted=True))
            arms += [Arm(name, adapter["seed"], handle, masked) for name, masked in MASKS.items()]
        return arms

    def _of_domain(self, name: str) -> Windows:
        if name not in self._windows:
            self._windows[name] = draw_windows(self._config, name, self._tokenizer)
        return self._windows[name]

    def _evaluate(
        self, rows: list[Encoded], arms: list[Arm], layers: Sequence[int], handles: list[AggregationHandle]
    ) -> pd.DataFrame:
        device = next(self._model.parameters()).device
        batch = {name: tensor.to(device) for name, tensor in collate(rows, self._tokenizer.pad_token_id or 0).items()}
        lengths = [len(row.input_ids) for row in rows]
        permutation = window_permutations([row.row_id for row in rows], lengths, batch["input_ids"].shape[1]).to(device)
        records = []
        with torch.no_grad():
            for places, arm, (ce_sum_B, num_targets_B) in self._losses(batch, arms, layers, handles, permutation):
                values = zip(rows, ce_sum_B.double().tolist(), num_targets_B.tolist(), strict=True)
                records += [(places, arm.name, arm.seed, row.row_id, ce, count) for row, ce, count in values]
        return pd.DataFrame(records, columns=["layers", "arm", "seed", "window", "ce_sum", "num_targets"])

    def _losses(
        self,
        batch: dict[str, Any],
        arms: list[Arm],
        layers: Sequence[int],
        handles: list[AggregationHandle],
        permutation: torch.Tensor,
    ) -> Iterator[Loss]:
        frozen = FrozenPrefix(handles[0].anatomy, min(layers))
        for layer in layers:
            enable_only(None, handles)
            prefix = frozen(batch, layer)
            tail = {**batch, "inputs_embeds": prefix.residual}
            for arm in arms:
                enable_only(arm.handle, handles)
                arm.handle.masked, arm.handle.permutation = arm.masked, permutation if arm.permuted else None
                with resumed(arm.handle, prefix):
                    yield Loss(str(layer), arm, next_token_ce(self._model, tail))
        if len(layers) > 1:
            for arm in arms:
                enable_only(arm.handle, handles)
                arm.handle.masked, arm.handle.permutation = arm.masked, permutation if arm.permuted else None
                yield Loss(ALL, arm, next_token_ce(self._model, batch))


def draw_windows(config: FDAAConfig, name: str, tokenizer: Any) -> Windows:
    """The first windows of a domain by a hash of their ids; a ValueError where its documents fill too few."""
    data = config.data(name)
    kept: dict[str, list[Any]] = {"train": [], "development": [], "test": []}
    for source in find_texts(data):
        for document in documents_of(source):
            kept[split_of(document.doc_id, data.held_out, data.test)].append(document)
    found = {}
    for split, wanted in (("development", config.development_windows), ("test", config.test_windows)):
        rows = list(windows(kept[split], tokenizer, config.window, separator_id(tokenizer)))
        rows.sort(key=lambda row: row_hash(row.row_id, "study"))
        if len(rows) < wanted:
            raise ValueError(
                f"fdaa.domains.{name}: its {split} documents fill {len(rows)} windows of {config.window} tokens, "
                f"{wanted} are wanted; ask for fewer or give more text"
            )
        found[split] = rows[:wanted]
    return Windows(**found)

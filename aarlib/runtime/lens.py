"""The lens over a corpus, in two rounds of units: influence on every piece, then what was influential really taken away."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pandas as pd
import torch
from torch import Tensor

from aarlib.lens.influence import MOMENTS, Sums, all_neuron_sums, expert_sums, head_sums, layer_sums
from aarlib.lens.neurons import NeuronConstants
from aarlib.lens.projection import Projection
from aarlib.lens.ranking import moments_and_aarv
from aarlib.lens.scores import Reading, closure_error, layer_scores, read
from aarlib.lens.uses import pick_counts, prefetch_recall
from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.loading import load_config, meta_model
from aarlib.runtime.evaluation import load_base
from aarlib.runtime.lens_config import LensRunConfig
from aarlib.runtime.lens_pieces import with_texts
from aarlib.runtime.unit_parts import Unit
from aarlib.runtime.units import Resources, run_units
from aarlib.training.adapter import load_adapter
from aarlib.training.config import ModelConfig

BY_DOCUMENT = {"layer": layer_sums, "head": head_sums}
COLUMNS = {
    "record": "moments, recall, counts or closure",
    "source": "name of the source",
    "document": "number of the piece in its source; empty: the whole unit",
    "chunk": "0: a document's first tokens; above: a further chunk of it",
    "level": "layer, head, expert or neuron",
    "sender": "component",
    "receiver": "layer of the router",
    "lag": "layers ahead (recall)",
    "tokens": "tokens summed over",
    "first_tokens": "first tokens among them",
    "selected": "tokens that chose the expert",
    "largest": "largest absolute element of the expert's output",
    "variance": "sum over tokens of the variance over experts",
    "aps": "sum over tokens of the mean positive score",
    "ans": "sum over tokens of the mean negative score",
    "aarv": "sum over tokens of the mean |rank change| of the chosen experts, the component zeroed",
    "variance_first": "as variance, first tokens alone",
    "aps_first": "as aps, first tokens alone",
    "ans_first": "as ans, first tokens alone",
    "value": "recall: sum over tokens; counts: how often `sender` was chosen; closure: the error of the sum over layers",
    "unit": "unit of work",
    "text": "the document that the piece is from, or the whole unit; empty: the unit holds several, all their pieces",
}


def check(config: LensRunConfig) -> Anatomy:
    """The model's anatomy from its configuration alone; ValueError for receivers that it does not have, or a short context."""
    parts = anatomy(meta_model(load_config(config.model.name, config.model.revision, config.model.geometry)))
    wrong = [layer for layer in config.lens.receivers or () if layer not in parts.moe_layers]
    if wrong:
        have = ", ".join(str(layer) for layer in parts.moe_layers)
        raise ValueError(f"lens.receivers: layers {wrong} have no router; layers that have one: {have}")
    context = parts.config.max_position_embeddings
    for name, source in config.lens.sources.items():
        if source.length > context:
            raise ValueError(
                f"lens.sources.{name}.length = {source.length} is more than the model's context of {context}"
            )
    return parts


def influence(config: LensRunConfig, units: list[dict[str, Any]], folder: Path) -> pd.DataFrame:
    """Round one: a record for each sender, receiver and piece (layers, heads) or unit (experts, neurons); COLUMNS."""
    records = run_round(config, folder / "influence", units, InfluenceWorker, "influence")
    return with_texts(records, units)


def run_round(
    config: LensRunConfig, folder: Path, units: list[dict[str, Any]], worker: Any, label: str
) -> pd.DataFrame:
    settings = {
        "model": config.model.model_dump(mode="json"),
        "adapter": None if config.adapter is None else str(config.adapter),
        "levels": list(config.lens.levels),
        "receivers": None if config.lens.receivers is None else list(config.lens.receivers),
        "lags": list(config.lens.lags),
        "gpus": config.ray.gpus_per_actor,
    }
    threads = str(max(1, int(config.ray.cpus_per_actor)))
    resources = Resources(config.ray.cpus_per_actor, config.ray.gpus_per_actor, {"OMP_NUM_THREADS": threads})
    return run_units(
        units, worker, folder, settings=settings, num_actors=config.ray.num_actors, resources=resources, label=label
    )


class Batch(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor


def padded(pieces: Sequence[Mapping[str, Any]], device: torch.device) -> Batch:
    """Right padded."""
    rows = [piece["tokens"] for piece in pieces]
    ids = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    return Batch(ids.to(device), mask.to(device))


class LensWorker:
    """Holds the model, with its adapter where one is named, and what folding made of it."""

    def __init__(
        self,
        model: Mapping[str, Any],
        adapter: str | None,
        levels: Sequence[str],
        receivers: Sequence[int] | None,
        lags: Sequence[int],
        gpus: float,
    ) -> None:
        self.model, self.tokenizer = load_base(ModelConfig.from_mapping({**model, "dtype": "float32"}), gpus)
        self.handle = None if adapter is None else load_adapter(self.model, adapter)
        self.parts = anatomy(self.model)
        self.levels, self.lags = tuple(levels), tuple(lags)
        self.projection = Projection(self.parts, receivers)
        self.constants = NeuronConstants(self.projection)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def read(self, pieces: Sequence[Mapping[str, Any]], edges: bool = False) -> Reading:
        return read(self.model, self.projection, *padded(pieces, self.device), edges=edges)


class InfluenceWorker(LensWorker):
    def __call__(self, unit: Unit) -> pd.DataFrame:
        pieces = unit["pieces"]
        reading = self.read(pieces)
        measure = moments_and_aarv(reading)
        frames = []
        for level, sums_of in BY_DOCUMENT.items():
            if level in self.levels:
                frames.append(records_by_document(sums_of(reading, measure), level, pieces))
        if "expert" in self.levels:
            frames.append(records_of_unit(expert_sums(reading, measure), "expert"))
        if "neuron" in self.levels:
            frames.append(records_of_unit(all_neuron_sums(reading, self.constants), "neuron"))
        closure: dict[str, Any] = {"record": "closure", "tokens": len(reading.capture.first)}
        closure["value"] = closure_error(reading, layer_scores(reading))
        frames += [_recall_records(reading, self.lags, pieces), _count_records(reading), pd.DataFrame([closure])]
        found = pd.concat(frames, ignore_index=True).assign(source=unit["source"])
        return found.reindex(columns=[name for name in COLUMNS if name not in ("unit", "text")])


def records_by_document(sums: Sums, level: str, pieces: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    frames = []
    for index, piece in enumerate(pieces):
        alone = sums._replace(
            all=sums.all[index : index + 1],
            first=sums.first[index : index + 1],
            tokens=sums.tokens[index : index + 1],
            first_tokens=sums.first_tokens[index : index + 1],
        )
        frames.append(records_of_unit(alone, level).assign(document=piece["number"], chunk=piece["chunk"]))
    return pd.concat(frames, ignore_index=True)


def records_of_unit(sums: Sums, level: str) -> pd.DataFrame:
    """One row per (sender, receiver) that reach one another."""
    values, first = (side.double().sum(0).cpu().numpy() for side in (sums.all, sums.first))
    row, column = (~pd.isna(values[..., 0])).nonzero()
    receivers = torch.tensor(sums.receivers).numpy()
    frame = pd.DataFrame({"sender": [sums.senders[index] for index in row], "receiver": receivers[column]})
    names = [*MOMENTS, "aarv"][: values.shape[-1]]
    for index, name in enumerate(names):
        frame[name] = values[row, column, index].astype("float32")
        if name != "aarv":
            frame[f"{name}_first"] = first[row, column, index].astype("float32")
    if sums.selected is not None:
        frame["selected"] = sums.selected.sum(0).cpu().numpy()[row]
    if sums.largest is not None:
        frame["largest"] = sums.largest.cpu().numpy()[row]
    counts = {"tokens": int(sums.tokens.sum()), "first_tokens": int(sums.first_tokens.sum())}
    return frame.assign(record="moments", level=level, **counts)


def _recall_records(reading: Reading, lags: Sequence[int], pieces: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    tokens = torch.bincount(reading.capture.documents).tolist()
    rows = [
        {
            "record": "recall",
            "document": piece["number"],
            "chunk": piece["chunk"],
            "receiver": item.receiver,
            "lag": item.lag,
            "tokens": tokens[index],
            "value": float(item.sums[index]),
        }
        for item in prefetch_recall(reading, lags)
        for index, piece in enumerate(pieces)
    ]
    return pd.DataFrame(rows)


def _count_records(reading: Reading) -> pd.DataFrame:
    counts, tokens = pick_counts(reading), len(reading.capture.first)
    rows = [
        {"record": "counts", "sender": str(expert), "receiver": receiver, "tokens": tokens, "value": float(count)}
        for receiver, row in zip(reading.projection.receivers, counts.tolist(), strict=True)
        for expert, count in enumerate(row)
    ]
    return pd.DataFrame(rows)


def facts(config: LensRunConfig, records: pd.DataFrame) -> dict[str, Any]:
    """What a reader of the tables must know of the run."""
    layers: Any = records[(records["record"] == "moments") & (records["level"] == "layer")]
    found: dict[str, Any] = {
        "model": config.model.name,
        "adapter": None if config.adapter is None else config.adapter.name,
    }
    for source in config.lens.sources:
        pieces = layers[layers["source"] == source].drop_duplicates("document")
        found[f"{source} pieces"] = len(pieces)
        found[f"{source} further chunks"] = int((pieces["chunk"] > 0).sum())
        found[f"{source} tokens"] = int(pieces["tokens"].sum())
    closure: Any = records.loc[records["record"] == "closure", "value"]
    return {**found, "closure error": float(closure.max())}


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    frame.to_parquet(temporary, index=False)
    temporary.replace(path)

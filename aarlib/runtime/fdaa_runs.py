"""What a study takes from finished runs of `train`: their heads, the proof that its texts were not trained on, their training."""

import json
import os
from collections import Counter
from typing import Any

from aarlib.runtime.fdaa_config import FDAAStudyConfig
from aarlib.runtime.handover import update
from aarlib.runtime.storage import storage_folder
from aarlib.runtime.text_corpus import find_texts
from aarlib.training.adapter import read_metadata
from aarlib.training.config import RunConfig
from aarlib.version import made_with


def find_adapters(config: FDAAStudyConfig, name: str) -> list[dict[str, Any]]:
    """The adapters of a run directory, by path below ray.storage, method and seed; a ValueError where it has other splits."""
    update(config.ray.storage, name)
    folder = storage_folder(config.ray.storage) / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"fdaa.runs: {folder} is no run directory; run `python -m pipelines.train` with its config first"
        )
    trained = RunConfig.from_mapping(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    for field in ("held_out", "test"):
        theirs, ours = getattr(trained.data, field), getattr(config.fdaa, field)
        if theirs != ours:
            raise ValueError(
                f"fdaa.{field} = {ours}, but {name} was trained with data.{field} = {theirs}; use the same"
            )
    _check_unseen(config, name, trained)
    found = []
    for run in trained.runs():
        path = folder / run.name / "adapter"
        if not path.is_dir():
            raise ValueError(f"fdaa.runs: {name} has no adapter of {run.name} yet; finish its training first")
        found.append(
            {
                "path": f"{name}/{run.name}/adapter",
                "method": run.method.name,
                "seed": run.seed,
                "layers": list(getattr(run.method, "layers", ())),
                "sha256": read_metadata(path)["sha256"],
            }
        )
    return found


def _check_unseen(config: FDAAStudyConfig, name: str, trained: RunConfig) -> None:
    """Files are compared, not patterns: a file that training read keeps its splits, so it must be read in the same way."""
    read = {_place(source.path): source for source in find_texts(trained.data)}
    for label, domain in config.fdaa.domains.items():
        for source in find_texts(config.fdaa.data(label)):
            seen = read.get(_place(source.path))
            if seen is None:
                continue
            if not domain.trained_on:
                raise ValueError(
                    f"fdaa.domains.{label}: trained_on = false, but {name} was trained on {source.path!r}; leave trained_on out"
                )
            if seen.documents != source.documents:
                raise ValueError(
                    f"fdaa.domains.{label}.documents = {source.documents!r}, but {name} was trained on {source.path!r} with "
                    f"{seen.documents!r}, which splits it elsewhere; use the same"
                )


def _place(path: str) -> str:
    """The same for every way to name a text; articles of a bundled register are the same however many are asked for."""
    if path.startswith("nano:"):
        return path.rpartition(":")[0]
    return path if "://" in path else os.path.realpath(path)


def describe_training(config: FDAAStudyConfig, name: str) -> dict[str, Any]:
    """Of a run directory: windows seen of each text and passes over them, tokens of a head, CE on development windows."""
    folder = storage_folder(config.ray.storage) / name
    trained = RunConfig.from_mapping(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    results = {
        run: json.loads((folder / run.name / "result.json").read_text(encoding="utf-8")) for run in trained.runs()
    }
    first = next(iter(results))
    seen = Counter[str]()
    for line in (folder / first.name / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        seen.update(json.loads(line)["row_ids"])
    windows, draws = Counter[str](), Counter[str]()
    for row_id, count in seen.items():
        text = row_id.rpartition(":")[0] if row_id.startswith("nano:") else row_id.partition(":")[0]
        windows[text] += 1
        draws[text] += count

    def ce(method: str) -> list[float]:
        return [result["held_out_ce"] for run, result in results.items() if run.method.name == method]

    return {
        "run": name,
        "windows": dict(windows),
        "passes": {text: round(draws[text] / count, 4) for text, count in windows.items()},
        "tokens": results[first]["tokens"],
        "native": results[first]["untouched_ce"],
        "static": ce("static_calibrator"),
        "heads": ce("fdaa"),
        "wall_s": max(result["wall_s"] for result in results.values()),
    }


def describe_study(config: FDAAStudyConfig) -> dict[str, list[dict[str, Any]]]:
    """What the results were made of: `about` the study's config (no local paths), date and versions; `adapters` by digest."""
    below = config.model.adapter
    left_out = {"ray": True, "tracking": True, "model": {"adapter", "geometry", "chat_template"}}
    about = {
        "study": config.name,
        **made_with(),
        "routers_sha256": None if below is None else read_metadata(below)["sha256"],
        "config": config.model_dump(mode="json", exclude=left_out),
    }
    adapters = [
        {"run": name, "method": found["method"], "seed": found["seed"], "sha256": found["sha256"]}
        for name in config.fdaa.runs
        for found in find_adapters(config, name)
    ]
    return {"about": [about], "adapters": adapters}

"""The verb on a small finished training: records, tables, the page and MLflow's summary numbers."""

import json
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("ray")
pytest.importorskip("mlflow")

from aarlib import identities  # noqa: E402
from aarlib.fdaa.attach import attach_fdaa  # noqa: E402
from aarlib.fdaa.config import FDAAConfig, StaticCalibratorConfig  # noqa: E402
from aarlib.moe.loading import load_model  # noqa: E402
from aarlib.runtime.mlflow_store import client_of  # noqa: E402
from aarlib.training.adapter import save_adapter  # noqa: E402
from pipelines import study  # noqa: E402
from tests.runtime.conversations import save_model  # noqa: E402

pytestmark = pytest.mark.ray
BLOCKS = ("runs", "domains", "masks", "layers", "paper")
SMALL = """
name = "small"
[model]
name = "{folder}/model"
dtype = "float32"
[fdaa]
runs = ["trained"]
window = 24
development_windows = 4
test_windows = 6
held_out = 0.3
test = 0.4
[fdaa.domains.texts]
text = ["{folder}/texts.jsonl"]
[ray]
storage = "{folder}/runs"
num_actors = 1
"""


def write_training(folder: Path) -> None:
    """A finished run directory of `train` with a head and a table, random ones."""
    rows = [{"text": f"Document {i} tells of {i * i} boats that wait in a row. " * 3} for i in range(60)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_model(folder / "model")
    model, _ = load_model(str(folder / "model"))
    methods = {"fdaa": FDAAConfig(layers=(1, 2)), "static": StaticCalibratorConfig(layers=(1, 2))}
    trained = folder / "runs" / "trained"
    for label, method in methods.items():
        handle = attach_fdaa(model, method)
        identities.randomise_head(handle)
        save_adapter(handle, trained / f"{label}-seed0" / "adapter")
        handle.detach()
        result = {"held_out_ce": 5.0, "untouched_ce": 5.1, "tokens": 96, "wall_s": 1.0}
        (trained / f"{label}-seed0" / "result.json").write_text(json.dumps(result))
        (trained / f"{label}-seed0" / "rows.jsonl").write_text(
            json.dumps({"step": 0, "row_ids": ["texts.jsonl:1+0"]}) + "\n"
        )
    values = {
        "name": "trained",
        "model": {"name": str(folder / "model")},
        "data": {"domains": {"texts": {"text": [str(folder / "texts.jsonl")]}}, "held_out": 0.3, "test": 0.4},
        "method": {
            "fdaa": {"name": "fdaa", "layers": [1, 2]},
            "static": {"name": "static_calibrator", "layers": [1, 2]},
        },
    }
    (trained / "config.json").write_text(json.dumps(values))


def test_a_study_writes_records_tables_metrics_and_a_page_and_is_taken_up_again(tmp_path, local_ray, capsys):
    write_training(tmp_path)
    config, page = tmp_path / "small.toml", tmp_path / "page.md"
    config.write_text(SMALL.format(folder=tmp_path))
    page.write_text("\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in BLOCKS))
    (tmp_path / "results").mkdir()
    assert study.main([str(config), "--dry-run"]) == 0
    assert "trained: 2 adapters" in capsys.readouterr().out and not (tmp_path / "runs" / "small").exists()

    assert study.main([str(config), f"--page={page}"]) == 0
    folder = tmp_path / "runs" / "small"
    records = pd.read_parquet(folder / "records.parquet")
    assert set(records["layers"]) == {"1", "2", "all"} and {"fdaa", "static", "native"} <= set(records["arm"])
    found = json.loads((folder / "tables.json").read_text())
    (everywhere,) = (row for row in found["domains"] if row["layers"] == "all")
    assert f"{everywhere['vs_native/mean']:+.4f} [" in page.read_text()
    stored = json.loads((tmp_path / "results" / "page.json").read_text())
    assert stored["runs"] == found["runs"] and {row["split"]: row["windows"] for row in stored["windows"]} == {
        "development": 4,
        "test": 6,
    }
    [about] = stored["about"]
    assert about["study"] == "small" and about["config"]["fdaa"]["window"] == 24 and about["torch"] and about["date"]
    for row in stored["adapters"]:
        label = {"fdaa": "fdaa", "static_calibrator": "static"}[row["method"]]
        metadata = json.loads((tmp_path / f"runs/trained/{label}-seed0/adapter/adapter.json").read_text())
        assert row["sha256"] == metadata["sha256"]
    assert len(stored["adapters"]) == 2
    client = client_of(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("aarlib").experiment_id])
    assert run.info.status == "FINISHED"
    for name in ("native_ce", "vs_native/mean", "vs_strongest/low", "vs_permuted/high"):
        assert run.data.metrics[f"fdaa/trained/texts/layers_all/{name}"] == pytest.approx(everywhere[name])
    assert abs(everywhere["vs_native/mean"]) > 1e-3

    parts = {path: path.stat().st_mtime_ns for path in folder.rglob("parts/*.parquet")}
    assert study.main([str(config)]) == 0
    assert parts == {path: path.stat().st_mtime_ns for path in folder.rglob("parts/*.parquet")} and len(parts) == 2

"""The verb: shipped configs meet their models' geometry, and a whole small run on generated text, taken up again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("ray")
pytest.importorskip("mlflow")

from aarlib.runtime.audit import RECORD_COLUMNS  # noqa: E402
from aarlib.runtime.mlflow_store import client_of  # noqa: E402
from aarlib.studies.audit_markdown import frame_of  # noqa: E402
from pipelines import audit  # noqa: E402
from tests.conftest import RAY_ENVIRONMENT  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
SMALL = """
name = "small"
[model]
name = "nano"
dtype = "float32"
[audit]
layers = [3, 7]
seeds = [0]
window = 24
horizons = ["full"]
development = 3
locked = 5
isolation = "batched"
noise_samples = 1
windows_per_unit = {windows_per_unit}
predictors = false
[audit.domains.text]
source = "{text}"
joined = true
[ray]
storage = "{folder}"
num_actors = 1
"""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("olmoe0924_audit.toml", "olmoe: layers [3, 7, 11, 15] of 16, 20 actions at top-8"),
        ("deepseek_v2_lite_audit.toml", "deepseek_v2: layers [26] of 27, 16 actions at top-6"),
        ("nano_audit.toml", "olmoe: layers [1, 3, 5, 7] of 8, 12 actions at top-4"),
    ],
)
def test_a_shipped_config_dry_runs_on_its_geometry(name, shown, capsys):
    assert audit.main([str(CONFIGS / name), "--dry-run"]) == 0
    assert shown in capsys.readouterr().out
    assert audit.main([str(CONFIGS / name), "--audit.layers=[0, 40]", "--dry-run"]) == 2
    assert "has no router" in capsys.readouterr().err


def small_config(folder: Path, windows_per_unit: int = 8) -> Path:
    rows = [{"text": f"Number {n}: the map shows {n + 2} ships and a long road to the market. " * 3} for n in range(30)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {"text": folder / "text.jsonl", "folder": folder / "runs", "windows_per_unit": windows_per_unit}
    (folder / "small.toml").write_text(SMALL.format(**values))
    return folder / "small.toml"


@pytest.mark.ray
def test_a_run_writes_records_tables_figures_metrics_and_a_page_and_is_taken_up_again(tmp_path, local_ray, capsys):
    config, page = small_config(tmp_path), tmp_path / "page.md"
    page.write_text("Before\n<!-- table: headroom_full --> old <!-- end -->\nafter\n")
    (tmp_path / "results").mkdir()
    assert audit.main([str(config), f"--page={page}"]) == 0
    folder = tmp_path / "runs" / "small"
    records = pd.read_parquet(folder / "records.parquet")
    assert list(records.columns) == [*RECORD_COLUMNS, "unit"] and len(records) == 2 * (3 + 5)
    found = json.loads((folder / "tables.json").read_text())
    assert found == json.loads((tmp_path / "results" / "page.json").read_text())
    assert "| structured oracle | -" in page.read_text() and " old " not in page.read_text()
    for place in (folder, tmp_path):
        assert [path.name for path in (place / "figures").iterdir()] == ["audit_full.png"]
    assert found["about"].keys() == {"date", "aarlib", "torch", "transformers", "config"}
    client = client_of(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("aarlib").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["audit.layers"] == "[3, 7]"
    measures = frame_of(found, "measures").set_index(["measure", "layer", "seed"])["value"]
    logged = run.data.metrics["audit/text/full/structured_oracle"]
    assert logged == measures["structured_oracle", "pooled", "all"] < 0
    assert run.data.metrics["audit/noise_floor/full"] < 1e-5

    parts = {path: path.stat().st_mtime_ns for path in folder.rglob("parts/*.parquet")}
    assert audit.main([str(config)]) == 0
    assert parts == {path: path.stat().st_mtime_ns for path in folder.rglob("parts/*.parquet")} and len(parts) == 1
    assert "16 records, 1 figures" in capsys.readouterr().out


def stored(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("units/parts/[!.]*.parquet")}


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_driver_is_taken_up_where_it_was(tmp_path, local_ray):
    config, folder = small_config(tmp_path, windows_per_unit=1), tmp_path / "runs" / "small"
    address = local_ray.get_runtime_context().gcs_address
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "pipelines.audit", str(config)],
            env={**os.environ, **RAY_ENVIRONMENT, "RAY_ADDRESS": address}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        while not stored(folder):
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()
            time.sleep(0.01)
    finally:
        driver.kill()
    assert driver.wait() == -9
    before = stored(folder)
    assert 1 <= len(before) < 8 and not (folder / "records.parquet").exists()
    assert "audit: 1/8, " in (tmp_path / "driver.log").read_text()

    assert audit.main([str(config)]) == 0
    after = stored(folder)
    assert len(after) == 8 and before.items() <= after.items()
    assert audit.main([str(config), f"--ray.storage={tmp_path / 'whole'}"]) == 0
    frames = (pd.read_parquet(place / "small" / "records.parquet") for place in (tmp_path / "runs", tmp_path / "whole"))
    pd.testing.assert_frame_equal(*frames, check_exact=True)

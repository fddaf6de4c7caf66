"""The verb: shipped configs meet their models' geometry, and a whole small run on generated text, taken up again."""

import json
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("ray")
pytest.importorskip("mlflow")

from aarlib.runtime import tracking  # noqa: E402
from aarlib.runtime.audit import RECORD_COLUMNS  # noqa: E402
from aarlib.studies.audit_markdown import frame_of  # noqa: E402
from pipelines import audit  # noqa: E402

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
windows_per_unit = 8
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
    ],
)
def test_a_papers_model_dry_runs_on_its_geometry(name, shown, capsys):
    assert audit.main([str(CONFIGS / name), "--dry-run"]) == 0
    assert shown in capsys.readouterr().out
    assert audit.main([str(CONFIGS / name), "--audit.layers=[0, 40]", "--dry-run"]) == 2
    assert "has no router" in capsys.readouterr().err


@pytest.mark.ray
def test_a_run_writes_records_tables_figures_metrics_and_a_page_and_is_taken_up_again(tmp_path, local_ray, capsys):
    rows = [{"text": f"Number {n}: the map shows {n + 2} ships and a long road to the market. " * 3} for n in range(30)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config, page = tmp_path / "small.toml", tmp_path / "page.md"
    config.write_text(SMALL.format(text=tmp_path / "text.jsonl", folder=tmp_path / "runs"))
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
    client = tracking._client(f"sqlite:///{tmp_path}/runs/mlflow.db")
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

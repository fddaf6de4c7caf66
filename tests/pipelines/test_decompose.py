"""The verb: shipped configs, what dies before a model is loaded, and a whole small run on generated text, taken up again."""

import json
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("ray")
pytest.importorskip("mlflow")

from aarlib.runtime.lens import COLUMNS  # noqa: E402
from aarlib.runtime.lens_config import LensRunConfig  # noqa: E402
from aarlib.runtime.lens_pieces import causal_pieces, choosing_units, measured_documents  # noqa: E402
from aarlib.runtime.mlflow_store import client_of  # noqa: E402
from aarlib.studies.lens_matrices import COLUMNS as MATRIX_COLUMNS  # noqa: E402
from pipelines import decompose  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
SHIPPED = sorted(path.name for path in CONFIGS.glob("*lens*.toml"))

SMALL = """
name = "small"
[model]
name = "nano"
[lens]
documents_per_unit = 4
causal_source = "text"
causal_documents = 4
ablated_experts = 2
ioi_prompts = 6
[lens.sources.text]
source = "{text}"
documents = 12
length = 16
[ray]
storage = "{folder}"
"""


def test_the_papers_models_are_shipped():
    assert [
        *("deepseek_v2_lite_lens.toml", "mixtral_lens.toml", "nano_lens.toml", "nano_lens_aar.toml"),
        *("olmoe_lens.toml", "qwen3_30b_lens.toml"),
    ] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_dry_runs(name, capsys):
    assert decompose.main([str(CONFIGS / name), "--dry-run"]) == 0
    assert LensRunConfig.from_toml(CONFIGS / name).name == Path(name).stem
    shown = capsys.readouterr().out
    assert {"deepseek": "64 experts, top-6", "mixtral_": "8 experts, top-2", "qwen3_30": "128 experts, top-8"}.get(
        name[:8], "experts"
    ) in shown


def test_what_is_taken_away_is_chosen_and_measured_on_other_documents():
    units = [
        {
            "id": f"c4-{number:04d}",
            "source": "c4",
            "pieces": [{"document": d, "number": 4 * number + i} for i, d in enumerate(u)],
        }
        for number, u in enumerate(["abcd", "efab", "cdef", "abcd"])
    ]
    assert measured_documents(units, "c4") == {"e", "f"}
    assert choosing_units(units, "c4") == {"c4-0000", "c4-0003"}
    assert [piece["document"] for piece in causal_pieces(units, "c4", 3)] == ["e", "f", "e"]
    with pytest.raises(ValueError, match="lens.sources.c4: no documents to choose on apart from those to measure on"):
        causal_pieces(units[:1], "c4", 3)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lens")
    texts = [
        f"Number {n}: the old map of the harbour shows {n + 2} ships and a long road to the market." * 2
        for n in range(7)
    ]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    path = folder / "small.toml"
    path.write_text(SMALL.format(text=folder / "text.jsonl", folder=folder / "runs"))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--lens.receivers=[3, 9]", "lens.receivers: layers [9] have no router; layers that have one: 0, 1, 2"),
        ("--lens.sources.text.length=900", "lens.sources.text.length = 900 is more than the model's context of 512"),
        ("--lens.causal_source=books", "causal_source = 'books' is none of the sources: text"),
        ('--lens.levels=["head"]', "levels must hold 'layer'"),
        ('--lens.levels=["layer"]', "causal_source needs the level 'expert'"),
        ("--lens.documents_pre_unit=4", "unknown key 'lens.documents_pre_unit'; did you mean 'documents_per_unit'?"),
    ],
)
def test_a_wrong_config_dies_before_anything_is_loaded(config, override, message, capsys):
    try:
        code = decompose.main([str(config), override, "--dry-run"])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_a_run_writes_records_tables_figures_and_a_page_and_is_taken_up_again(config, local_ray, caplog):
    page = config.parent / "page.md"
    page.write_text("<!-- table small kinds source=text -->\n<!-- end -->\n")
    (config.parent / "results").mkdir()
    assert decompose.main([str(config), f"--page={page}"]) == 0
    folder = config.parent / "runs" / "small"
    records, taken = (pd.read_parquet(folder / f"{name}.parquet") for name in ("influence", "causal"))
    assert list(records.columns) == list(COLUMNS)
    layers = records[(records["record"] == "moments") & (records["level"] == "layer")]
    assert sorted(layers["document"].unique()) == list(range(12))
    assert layers.groupby("document")["chunk"].first().tolist() == [0.0] * 7 + [1.0] * 5
    assert set(taken["record"]) == {
        *("ablation", "coexistence", "activation", "attention"),
        *("ioi_heads", "ioi_maps", "ioi_pairs", "logit_difference"),
    }
    results = json.loads((folder / "tables.json").read_text())
    assert results["run"]["closure error"] < 1e-4 and results["run"]["text further chunks"] == 5
    assert "| receiver | measure | value |" in page.read_text()
    assert {path.name for path in (folder / "figures").iterdir()} >= {"sender_maps.svg", "removal.png", "ioi_maps.png"}
    matrices = pd.read_parquet(folder / "matrices.parquet")
    assert list(matrices.columns) == list(MATRIX_COLUMNS) and set(matrices["level"]) == {"layer", "head", "expert"}
    assert (matrices["low"] < matrices["high"]).mean() > 0.5
    check_logged(config.parent / "runs" / "mlflow.db", results)

    written = parts_of(folder)
    assert decompose.main([str(config)]) == 0
    assert parts_of(folder) == written
    gone = [sorted(folder.glob(f"{name}/parts/*.parquet"))[1] for name in ("influence", "causal")]
    for path in gone:
        path.unlink()
    assert decompose.main([str(config)]) == 0
    again = parts_of(folder)
    assert {path for path in written if again[path] != written[path]} == set(gone) and len(again) == len(written) > 4
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "influence.parquet"), records)
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "causal.parquet"), taken)
    now = json.loads((folder / "tables.json").read_text())
    assert now["run"].pop("date") >= results["run"].pop("date") and now == results
    assert "2 of 3 already finished" in caplog.text, "round one"


def parts_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("parts/*.parquet")}


def check_logged(database, results):
    """One finished MLflow run: the config's parameters, and the numbers of the tables."""
    client = client_of(f"sqlite:///{database}")
    (run,) = client.search_runs([client.get_experiment_by_name("aarlib").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["lens.documents_per_unit"] == "4"
    logged = run.data.metrics
    assert logged["lens/closure_error"] == pytest.approx(results["run"]["closure error"])
    for row in results["tables"]["kinds"]:
        if row["measure"] == "moe / attn":
            name = f"lens/text/moe_over_attn/receiver_{row['receiver']}"
            assert logged[name] == pytest.approx(row["value"], rel=1e-5)
    pooled = {row["level"]: row["value"] for row in results["tables"]["aarv"] if row["receiver"] == "pooled"}
    assert set(pooled) == {"layer", "head", "expert"}
    for level, expected in pooled.items():
        assert logged[f"lens/text/variance_aarv_spearman/{level}"] == pytest.approx(expected, rel=1e-5)

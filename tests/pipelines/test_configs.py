"""Every shipped config is valid, and the papers' models have the trainable counts that the papers' shapes give."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from aarlib.runtime.fdaa_config import FDAAStudyConfig
from aarlib.training.config import RunConfig
from pipelines import train
from pipelines.command_line import resolve_paths

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "pipelines" / "configs"
RUNS = sorted(path.name for path in CONFIGS.glob("*.toml") if "[method." in path.read_text())


def load(name: str) -> RunConfig:
    return resolve_paths(RunConfig.from_toml(CONFIGS / name), CONFIGS)


@pytest.mark.parametrize("name", RUNS)
def test_a_shipped_config_is_valid_and_named_like_its_file(name: str):
    assert load(name).name == Path(name).stem


def test_the_papers_models_are_among_them():
    assert {"olmoe_tulu3.toml", "olmoe_tulu3_one_gpu.toml", "qwen15_moe_tulu3.toml", "qwen36_moe_tulu3.toml"} <= set(
        RUNS
    )


def test_one_gpu_and_four_take_the_same_optimizer_steps():
    four, one = load("olmoe_tulu3.toml"), load("olmoe_tulu3_one_gpu.toml")
    assert (four.optim, four.data, four.method, four.seeds) == (one.optim, one.data, one.method, one.seeds)
    assert (four.ray.num_workers, one.ray.num_workers) == (4, 1)


@pytest.mark.parametrize("path", sorted((CONFIGS / "geometry").glob("*.json")), ids=lambda path: path.stem)
def test_a_geometry_is_a_transformers_config_of_its_type(path: Path):
    values = json.loads(path.read_text())
    config = AutoConfig.from_pretrained(path)
    assert config.model_type == values["model_type"]
    assert {key: getattr(config, key) for key in values if "num_" in key or "size" in key} == {
        key: value for key, value in values.items() if "num_" in key or "size" in key
    }


def test_the_aar_layers_of_qwen36_are_full_attention_layers():
    config = AutoConfig.from_pretrained(CONFIGS / "geometry" / "qwen36_35b_a3b.json")
    assert [config.layer_types[layer] for layer in (23, 27, 31)] == ["full_attention"] * 3
    assert config.layer_types.count("full_attention") == 10


OLMOE = {"router_sft": 2_097_152, "aar_t20": 3_032_576, "aar20": 3_959_936, "aar40": 3_986_816}
QWEN15_ROUTERS = 24 * 60 * 2048
QWEN15_AAR = 4 * 60 * (40 + (2048 + 40) + 21 + (2048 + 21))
QWEN36_ROUTERS = 40 * 256 * 2048
QWEN36_AAR = 3 * 256 * (40 + (2048 + 40) + 21 + (2048 + 21))
"""Layers x experts x (A of both views and G of both views)."""


def assert_counted(counts: dict[str, int], shown: str) -> None:
    for label, count in counts.items():
        assert re.search(rf"\b{label}\b.*\b{count:,}\b", shown), shown


@pytest.mark.slow
def test_the_dry_run_is_a_command_that_prints_the_trainable_counts():
    command = [sys.executable, "-m", "pipelines.train", str(CONFIGS / "olmoe_tulu3.toml"), "--dry-run"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert_counted(OLMOE, result.stdout)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("olmoe_tulu3_one_gpu.toml", OLMOE),
        ("qwen15_moe_tulu3.toml", {"router_sft": QWEN15_ROUTERS, "aar40": QWEN15_ROUTERS + QWEN15_AAR}),
        ("qwen36_moe_tulu3.toml", {"router_sft": QWEN36_ROUTERS, "aar40": QWEN36_ROUTERS + QWEN36_AAR}),
    ],
)
def test_the_dry_run_prints_the_trainable_counts(name: str, counts: dict[str, int], capsys):
    assert train.main([str(CONFIGS / name), "--dry-run"]) == 0
    assert_counted(counts, capsys.readouterr().out)


HEAD_OF_ONE = 2 * 64 * 2048 + 64 * 8 + 32 + 128 * 299 + 128 + 128 + 1
"""Both projections, embeddings of 64 experts and of one layer, the two linear maps: 301,217."""


@pytest.mark.parametrize(
    ("name", "head", "static"),
    [
        ("olmoe0924_fdaa_wikitext.toml", 301_313, 4 * 64),
        ("olmoe0924_fdaa_mixed.toml", 301_217, 64),
        ("deepseek_v2_lite_fdaa.toml", HEAD_OF_ONE, 64),
    ],
)
def test_the_dry_run_prints_the_counts_of_heads(name: str, head: int, static: int, capsys):
    assert train.main([str(CONFIGS / name), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for label, count in (("fdaa", head), ("static", static)):
        assert re.search(rf"\b{label}\b.*\b{count:,}\b", shown), shown


def test_every_run_of_the_papers_has_a_study_of_its_name_on_files_that_it_does_not_read():
    studies = [FDAAStudyConfig.from_toml(path) for path in CONFIGS.glob("*_fdaa*study.toml") if "nano" not in path.name]
    assert {run for study in studies for run in study.fdaa.runs} == {
        name.removesuffix(".toml") for name in RUNS if "fdaa" in name and "nano" not in name
    }
    for study in studies:
        [run] = study.fdaa.runs
        read = {pattern for domain in load(f"{run}.toml").data.domains.values() for pattern in domain.text}
        assert all(not domain.trained_on and not read & set(domain.text) for domain in study.fdaa.domains.values())
        assert study.model.name == load(f"{run}.toml").model.name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--data.train=['nowhere/*.jsonl']"], "'nowhere/*.jsonl' names no"),
        (["--data.train=['nano:sft']"], "is not of the form nano:<split>:<number of rows>"),
        (["--data.sequence_length=1024"], "data.sequence_length = 1024 is more than the model's context of 512"),
        (["--model.name=pipelines"], "model.name = 'pipelines': "),
    ],
)
def test_a_dry_run_dies_where_training_would(overrides: list[str], message: str, tmp_path: Path, capsys):
    assert train.main([str(CONFIGS / "nano_smoke.toml"), f"--ray.storage={tmp_path}", "--dry-run", *overrides]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_it_could_not_check(capsys):
    assert train.main([str(CONFIGS / "qwen15_moe_tulu3.toml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "chat template not checked: it comes with the tokenizer of Qwen/" in shown and "data not there yet" in shown

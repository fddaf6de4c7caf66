"""The paired evaluation of heads and controls: each arm against the whole patched model, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from aarlib import identities  # noqa: E402
from aarlib.data.chat import collate  # noqa: E402
from aarlib.fdaa.attach import attach_fdaa  # noqa: E402
from aarlib.fdaa.config import FDAAConfig, FixedConfig, StaticCalibratorConfig  # noqa: E402
from aarlib.moe.loading import load_model  # noqa: E402
from aarlib.runtime.fdaa_config import FDAAStudyConfig  # noqa: E402
from aarlib.runtime.fdaa_study import Evaluator, find_adapters  # noqa: E402
from aarlib.training.adapter import load_adapter, save_adapter  # noqa: E402
from aarlib.training.objectives import next_token_ce  # noqa: E402
from tests.runtime.conversations import save_model  # noqa: E402

LAYERS = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    save_model(folder / "model")
    model, _ = load_model(str(folder / "model"))
    for name, config in (("head", FDAAConfig(layers=LAYERS)), ("table", StaticCalibratorConfig(layers=LAYERS))):
        handle = attach_fdaa(model, config)
        identities.randomise_head(handle)
        save_adapter(handle, folder / name)
        handle.detach()
    rows = [
        {"text": f"Document {i} tells of {i * i} boats that wait in a row for the {i}th time. " * 3} for i in range(60)
    ]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def study(folder: Path, **changes: Any) -> FDAAStudyConfig:
    values = {
        "name": "study",
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "fdaa": {
            "runs": ["run"], "domains": {"texts": {"text": [str(folder / "texts.jsonl")]}},
            "window": 24, "development_windows": 4, "test_windows": 6, "batch_size": 4, "test": 0.4, "held_out": 0.3,
        },
        "ray": {"storage": str(folder / "runs")},
    }  # fmt: skip
    return FDAAStudyConfig.from_mapping(values).updated(changes)


def run_values(folder: Path) -> dict[str, Any]:
    domains = {"texts": {"text": [str(folder / "t*.jsonl")]}, "articles": {"text": ["nano:ledger:20"]}}
    return {
        "name": "seen",
        "data": {"domains": domains, "held_out": 0.3, "test": 0.4},
        "method": {"fdaa": {"name": "fdaa", "layers": [1]}},
    }


@pytest.fixture(scope="module")
def evaluator(folder: Path) -> Evaluator:
    config = study(folder)
    return Evaluator(config.model.model_dump(mode="json"), config.fdaa.model_dump(mode="json"), gpus=0)


@pytest.fixture(scope="module")
def records(folder: Path, evaluator: Evaluator) -> pd.DataFrame:
    adapters = [
        {"path": str(folder / "head"), "method": "fdaa", "seed": 5, "layers": list(LAYERS)},
        {"path": str(folder / "table"), "method": "static_calibrator", "seed": 5, "layers": list(LAYERS)},
    ]
    return evaluator({"id": "u", "run": "run", "domain": "texts", "split": "test", "adapters": adapters})


def test_every_arm_sees_the_same_windows_at_each_layer_and_at_all(records: pd.DataFrame) -> None:
    counts = records.groupby(["layers", "arm"])["window"].agg(["nunique", "size"])
    assert set(counts.index.get_level_values("layers")) == {"1", "2", "all"}
    assert len(counts) == 3 * 10 and (counts == 6).all(axis=None)
    assert set(records["num_targets"]) == {23}


def test_arms_equal_the_whole_patched_model(folder: Path, evaluator: Evaluator, records: pd.DataFrame) -> None:
    model, tokenizer = load_model(str(folder / "model"))
    rows = evaluator._of_domain("texts").test
    batch = collate(rows, tokenizer.pad_token_id)

    def ce(arm: str, layers: str) -> torch.Tensor:
        found = records[(records["arm"] == arm) & (records["layers"] == layers)].set_index("window")["ce_sum"]
        return torch.tensor(found.loc[[row.row_id for row in rows]].to_numpy(), dtype=torch.float32)

    with torch.no_grad():
        stock = next_token_ce(model, batch).ce_sum
        torch.testing.assert_close(ce("native", "1"), stock, atol=1e-3, rtol=0)
        for arm, load in (
            ("fdaa", lambda: load_adapter(model, folder / "head")),
            ("static", lambda: load_adapter(model, folder / "table")),
            ("temperature_2.0", lambda: attach_fdaa(model, FixedConfig(layers=LAYERS, tau=2.0))),
        ):
            handle = load()
            for layers, acting in (("1", (1,)), ("all", LAYERS)):
                handle.acting = acting
                expected = next_token_ce(model, batch).ce_sum
                assert (expected - stock).abs().max() > 1e-2
                torch.testing.assert_close(ce(arm, layers), expected, atol=1e-3, rtol=0)
            handle.detach()
    arms = ("fdaa", "permuted", "no_outputs", "no_hidden", "router_and_id", "uniform")
    values = [ce(arm, "1") for arm in arms]
    assert all(float((a - b).abs().max()) > 1e-3 for i, a in enumerate(values) for b in values[:i])


def test_what_cannot_be_evaluated_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="fdaa.runs: .*/runs/run is no run directory; run `python -m pipelines.train`"):
        find_adapters(study(folder), "run")
    with pytest.raises(ValueError, match="its test documents fill .* windows of 24 tokens, 5000 are wanted"):
        config = study(folder, **{"fdaa.test_windows": 5000})
        Evaluator(config.model.model_dump(mode="json"), config.fdaa.model_dump(mode="json"), gpus=0)._of_domain("texts")
    trained = {"config.json": json.dumps(run_values(folder)), "fdaa-seed0/x": ""}
    for name, text in trained.items():
        (folder / "runs" / "seen" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "runs" / "seen" / name).write_text(text)
    with pytest.raises(ValueError, match="texts: trained_on = false, but seen was trained on .*texts.jsonl"):
        find_adapters(study(folder, **{"fdaa.domains.texts.trained_on": False}), "seen")
    more = {"text": ["nano:ledger:30"], "trained_on": False}
    with pytest.raises(ValueError, match="more: trained_on = false, but seen was trained on 'nano:ledger:30'"):
        find_adapters(study(folder, **{"fdaa.domains": {"more": more}}), "seen")
    elsewhere = {"fdaa.domains.texts.text": [str(folder / "model" / ".." / "texts.js*")]}
    with pytest.raises(ValueError, match="texts: trained_on = false, but seen was trained on .*texts.jsonl"):
        find_adapters(study(folder, **{"fdaa.domains.texts.trained_on": False}, **elsewhere), "seen")
    with pytest.raises(
        ValueError, match="texts.documents = 'headings', but seen .*texts.jsonl' with 'whole', which splits"
    ):
        find_adapters(study(folder, **{"fdaa.domains.texts.documents": "headings"}), "seen")
    with pytest.raises(ValueError, match="fdaa.test = 0.1, but seen was trained with data.test = 0.4; use the same"):
        find_adapters(study(folder, **{"fdaa.test": 0.1}), "seen")
    with pytest.raises(ValueError, match="seen has no adapter of fdaa-seed0 yet; finish its training first"):
        find_adapters(study(folder), "seen")
    with pytest.raises(ValueError, match="each once"):
        study(folder, **{"fdaa.runs": ["a", "a"]})

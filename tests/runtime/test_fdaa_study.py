"""The paired evaluation of heads and controls: each arm against the whole patched model, and what is refused."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from aarlib import identities  # noqa: E402
from aarlib.audit.head import AggregationHead  # noqa: E402
from aarlib.data.chat import collate  # noqa: E402
from aarlib.fdaa.attach import attach_fdaa  # noqa: E402
from aarlib.fdaa.config import FDAAConfig, FixedConfig, StaticCalibratorConfig  # noqa: E402
from aarlib.fdaa.controls import window_permutations  # noqa: E402
from aarlib.moe.dispatch import RouterOutput  # noqa: E402
from aarlib.moe.loading import load_model  # noqa: E402
from aarlib.moe.record import intervene, record  # noqa: E402
from aarlib.runtime.fdaa_config import FDAAStudyConfig  # noqa: E402
from aarlib.runtime.fdaa_runs import find_adapters  # noqa: E402
from aarlib.runtime.fdaa_study import Evaluator  # noqa: E402
from aarlib.training.adapter import load_adapter, read_metadata, save_adapter  # noqa: E402
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
    return make(config, folder)


def make(config: FDAAStudyConfig, folder: Path) -> Evaluator:
    return Evaluator(config.model.model_dump(mode="json"), config.fdaa.model_dump(mode="json"), 0, storage=str(folder))


@pytest.fixture(scope="module")
def records(folder: Path, evaluator: Evaluator) -> pd.DataFrame:
    common = {"seed": 5, "layers": list(LAYERS)}
    adapters = [
        {"path": path, "method": method, "sha256": read_metadata(folder / path)["sha256"], **common}
        for path, method in (("head", "fdaa"), ("table", "static_calibrator"))
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


class Recorded(NamedTuple):
    """At layer 1 of the stock model, one row a token."""

    weights: torch.Tensor
    ids: torch.Tensor
    hidden: torch.Tensor
    outputs: torch.Tensor


def recorded(model: Any, batch: dict[str, torch.Tensor]) -> Recorded:
    seen = []

    def keep(output: RouterOutput, hidden: torch.Tensor) -> RouterOutput:
        seen.append(hidden)
        return output

    with torch.no_grad(), intervene(model, {1: keep}), record(model, [1], dispatch=True, expert_outputs=True) as found:
        next_token_ce(model, batch)
    weights, ids = (part.flatten(0, 1) for part in found.dispatch[1])
    return Recorded(weights, ids, seen[0], found.expert_outputs[1].flatten(0, 1))


def scores_without(folder: Path, found: Recorded, *projections: str) -> torch.Tensor:
    """Of the saved head, with projections of zeros in place of the named ones."""
    tensors = load_file(folder / "head" / "adapter.safetensors")
    layers, experts = tensors["head.layer_embedding.weight"].shape[0], tensors["head.expert_embedding.weight"].shape[0]
    head = AggregationHead(found.hidden.shape[-1], experts, LAYERS)
    assert layers == len(LAYERS)
    head.load_state_dict({name.removeprefix("head."): tensor for name, tensor in tensors.items()})
    with torch.no_grad():
        for name in projections:
            getattr(head, name).weight.zero_()
        return head(found.hidden, found.outputs, found.weights, found.ids, 1)


def moved(scores: torch.Tensor, weights: torch.Tensor, row_ids: list[str], length: int) -> torch.Tensor:
    """Position t of a window gets the scores of position permutation[t], its strongest expert those of the strongest there."""
    result = torch.zeros_like(scores)
    for row, row_id in enumerate(row_ids):
        [permutation] = window_permutations([row_id], [length], length).tolist()
        for position in range(length):
            here, there = row * length + position, row * length + permutation[position]
            ours, theirs = (sorted(range(3), key=lambda j, t=t: -float(weights[t, j])) for t in (here, there))
            for slot, source in zip(ours, theirs, strict=True):
                result[here, slot] = scores[there, source]
    return result


def test_every_arm_is_its_formula_applied_to_the_recorded_dispatch(
    folder: Path, evaluator: Evaluator, records: pd.DataFrame
) -> None:
    """w' written out for each arm, put in place of the router's weights at layer 1: the same CE of every window."""
    model, tokenizer = load_model(str(folder / "model"))
    rows = evaluator._of_domain("texts").test
    batch, row_ids, length = collate(rows, tokenizer.pad_token_id), [row.row_id for row in rows], len(rows[0].input_ids)
    found = recorded(model, batch)
    mass = found.weights.sum(-1, keepdim=True)
    p = found.weights / mass
    table = load_file(folder / "table" / "adapter.safetensors")["head.table"][0]
    scores = scores_without(folder, found)
    expected = {
        "native": p,
        "uniform": torch.full_like(p, 1 / 3),
        "temperature_0.5": p**2 / (p**2).sum(-1, keepdim=True),
        "temperature_2.0": p.sqrt() / p.sqrt().sum(-1, keepdim=True),
        "static": (p.log() + table[found.ids]).softmax(-1),
        "fdaa": (p.log() + scores).softmax(-1),
        "permuted": (p.log() + moved(scores, found.weights, row_ids, length)).softmax(-1),
        "no_outputs": (p.log() + scores_without(folder, found, "project_outputs")).softmax(-1),
        "no_hidden": (p.log() + scores_without(folder, found, "project_hidden")).softmax(-1),
        "router_and_id": (p.log() + scores_without(folder, found, "project_hidden", "project_outputs")).softmax(-1),
    }
    at_1 = records[records["layers"] == "1"]
    assert set(at_1["arm"]) == set(expected)
    values = []
    for arm, q in expected.items():
        ce = at_1[at_1["arm"] == arm].set_index("window").loc[row_ids, "ce_sum"].to_numpy()
        with torch.no_grad(), intervene(model, {1: lambda out, _, q=q: out._replace(weights=mass * q)}):
            values.append(next_token_ce(model, batch).ce_sum)
        torch.testing.assert_close(torch.tensor(ce).float(), values[-1], atol=1e-3, rtol=0)
    assert all(float((a - b).abs().max()) > 1e-2 for i, a in enumerate(values) for b in values[:i])


def test_what_cannot_be_evaluated_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="fdaa.runs: .*/runs/run is no run directory; run `python -m pipelines.train`"):
        find_adapters(study(folder), "run")
    with pytest.raises(ValueError, match="its test documents fill .* windows of 24 tokens, 5000 are wanted"):
        config = study(folder, **{"fdaa.test_windows": 5000})
        make(config, folder)._of_domain("texts")
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

"""FDAA through the trainer's own loop in one process: micro-batches, loss terms, and the prefix that a population shares."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from aarlib.data.chat import collate  # noqa: E402
from aarlib.fdaa.attach import attach_fdaa  # noqa: E402
from aarlib.fdaa.config import FDAAConfig  # noqa: E402
from aarlib.moe.loading import load_model  # noqa: E402
from aarlib.training.config import RunConfig  # noqa: E402
from tests.runtime.conversations import save_model  # noqa: E402
from tests.runtime.text_process import epoch_rows, process, windows_of  # noqa: E402
from tests.training.test_aggregation import plain_loss  # noqa: E402

LAYERS, UNIT, BATCH, EPOCHS = (1, 2), 2, 8, 2
WEIGHTS = {"kl_weight": 0.3, "score_weight": 0.2}


class Trained(NamedTuple):
    folder: Path
    configs: dict[str, RunConfig]
    before: dict[str, dict[str, list[dict[str, torch.Tensor]]]]
    """By config, run and step: the parameters before it."""

    def adapter(self, name: str, run: str = "head-seed0") -> dict[str, torch.Tensor]:
        return load_file(self.folder / "runs" / name / run / "adapter" / "adapter.safetensors")

    def lines(self, name: str, file: str, run: str = "head-seed0") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs" / name / run / file).read_text().splitlines()]

    def result(self, name: str, run: str = "head-seed0") -> dict[str, Any]:
        return json.loads((self.folder / "runs" / name / run / "result.json").read_text())


def config(folder: Path, name: str, **changes: Any) -> RunConfig:
    values = {
        "name": name,
        "model": {"name": str(folder / "model"), "dtype": "float32", "experts_implementation": "eager"},
        "data": {
            "domains": {"one": {"text": [str(folder / "one.jsonl")]}},
            "held_out": 0.2, "test": 0.2, "sequence_length": 24, "unit_rows": UNIT, "order_seed": 0,
        },
        "method": {"head": {"name": "fdaa", "layers": LAYERS, **WEIGHTS}},
        "optim": {
            "learning_rate": 1e-2, "global_batch": BATCH, "micro_batch": 4, "epochs": EPOCHS, "warmup_ratio": 0.0, "log_every": 1,
        },
        "ray": {"storage": str(folder / "runs"), "num_workers": 1, "checkpoint_every": 1000},
    }  # fmt: skip
    return RunConfig.from_mapping(values).updated(changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("text")
    save_model(folder / "model")
    rows = [{"text": f"Document {i} tells of {i * i} boats in a row, and of {7 * i} more. " * 3} for i in range(20)]
    (folder / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    population = {"optim.population": True, "optim.prefix_cache_gib": 0.01, "seeds": [0, 1]}
    configs = {
        "ones": config(folder, "ones", **{"optim.micro_batch": 1}),
        "fours": config(folder, "fours"),
        "population": config(folder, "population", **population),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn: Callable[..., Any] = mp.spawn
    values = [settings.model_dump(mode="json") for settings in configs.values()]
    spawn(process, args=(port, values, str(folder / "found.pt")), nprocs=1)
    return Trained(folder, configs, torch.load(folder / "found.pt"))


def largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)


def test_units_and_so_the_head_do_not_depend_on_the_micro_batch(trained: Trained) -> None:
    """Every global batch holds units of both layers; a micro-batch of 4 is cut where they end."""
    start = trained.before["ones"]["head-seed0"][0]
    assert largest(trained.adapter("ones"), start) > 1e-2
    assert largest(trained.adapter("ones"), trained.adapter("fours")) < 1e-5
    assert trained.lines("ones", "rows.jsonl") == trained.lines("fours", "rows.jsonl")


def test_logged_terms_are_those_of_whole_forwards(trained: Trained) -> None:
    """In the last step: each unit at its layer, logits of the whole patched model, the penalties from their definitions."""
    settings = trained.configs["fours"]
    model, tokenizer = load_model(settings.model.name, dtype="float32")
    handle = attach_fdaa(model, FDAAConfig(layers=LAYERS, **WEIGHTS))
    rows = epoch_rows(settings, windows_of(settings), EPOCHS - 1)
    batch = rows[len(rows) - (len(rows) % BATCH or BATCH) :]
    logged = trained.lines("fours", "metrics.jsonl")[-1]
    assert trained.lines("fours", "rows.jsonl")[-1]["row_ids"] == [row.row_id for row in batch]
    before = trained.before["fours"]["head-seed0"][-1]
    with torch.no_grad():
        for name, parameter in handle.module.named_parameters():
            parameter.copy_(before[name])
    sums: dict[str, float] = {}
    acted = set()
    for first in range(0, len(batch), UNIT):
        unit = batch[first : first + UNIT]
        assert len({row.unit for row in unit}) == 1
        acted.add(layer := LAYERS[unit[0].unit % 2])
        with torch.no_grad():
            terms = plain_loss(model, handle, collate(unit, tokenizer.pad_token_id), layer)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in terms.items()}
    assert acted == set(LAYERS)
    count = sum(row.num_targets for row in batch)
    for name, value in sums.items():
        assert value / count > 1e-3, name
        assert logged[f"train/{name}"] == pytest.approx(value / count, rel=1e-5), name


def test_a_population_runs_each_prefix_once_and_later_epochs_read_it(trained: Trained) -> None:
    settings = trained.configs["population"]
    units = len(epoch_rows(settings, windows_of(settings), 0)) // UNIT
    for seed in (0, 1):
        counts = trained.result("population", f"head-seed{seed}")["prefix_micro_batches"]
        assert counts == {"run": units, "cached": units * (EPOCHS - 1)}
    assert trained.result("fours")["prefix_micro_batches"] == {"run": units * EPOCHS, "cached": 0}
    assert trained.result("ones")["prefix_micro_batches"] == {"run": units * UNIT * EPOCHS, "cached": 0}
    assert largest(trained.adapter("population"), trained.adapter("fours")) < 1e-6
    assert largest(trained.adapter("population"), trained.adapter("population", "head-seed1")) > 1e-2

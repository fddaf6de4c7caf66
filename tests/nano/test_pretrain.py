import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from aarlib.moe.loading import load_model
from aarlib.nano.comparison import compare, comparison_table
from aarlib.nano.config import PretrainConfig
from aarlib.nano.model import Network, build_network
from aarlib.nano.muon import orthogonalise
from aarlib.nano.objective import load_balance
from aarlib.nano.pretrain import checkpoints, pretrain, save_newest
from aarlib.training.adapter import load_adapter
from pipelines.pretrain_nano import main

TINY = {
    "name": "tiny",
    "token_budget": 1500,
    "batch_tokens": 256,
    "phases": [{"until": 0.5, "sequence_length": 64}, {"until": 1.0, "sequence_length": 128}],
    "checkpoint_every": 4,
    "log_every": 1,
    "world": {
        "entities_per_subject": 6,
        "mixture": {"article": 0.3, "questions": 0.2, "sums": 0.2, "problem": 0.2, "story": 0.1},
    },
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_experts": 4, "top_k": 2, "d_expert": 16, "vocab_size": 640,
              "context": 128},
}  # fmt: skip


def _config(storage: Path, **changes) -> PretrainConfig:
    return PretrainConfig.from_mapping({**TINY, "storage": str(storage), **changes})


def _records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    config = _config(tmp_path_factory.mktemp("run"))
    pretrain(config)
    return config


def test_training_lowers_the_loss_and_logs_every_step(finished: PretrainConfig, tmp_path: Path):
    config = _config(tmp_path, token_budget=12_000, checkpoint_every=1000)
    pretrain(config)
    records = _records(config.storage / config.name)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert records[-1]["train/ce"] < records[0]["train/ce"] - 1
    assert records[-1]["progress"] == 1.0 and records[0]["tokens_per_second"] > 0


def test_resuming_gives_the_uninterrupted_run(finished: PretrainConfig, tmp_path: Path):
    whole = finished.storage / finished.name
    source = checkpoints(whole)[0]
    assert int(source.name[-7:]) <= len(_records(whole)) - 3, "the resumed run must have steps left to take"
    run = tmp_path / finished.name
    (run / source.name).parent.mkdir(parents=True)
    for name in (source.name, "tokenizer"):
        (run / name).mkdir()
        for path in (whole / name).iterdir():
            (run / name / path.name).write_bytes(path.read_bytes())
    (run / "metrics.jsonl").write_bytes((whole / "metrics.jsonl").read_bytes())
    pretrain(_config(tmp_path))
    ours, theirs = (load_file(checkpoints(folder)[-1] / "model.safetensors") for folder in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    logs = [_records(folder) for folder in (run, whole)]
    for record in logs[0] + logs[1]:
        del record["tokens_per_second"]
    assert logs[0] == logs[1]


def test_with_aar_from_the_start_everything_is_trained_saved_and_resumed(tmp_path: Path):
    aar = {"layers": [1], "window": 8}
    config = _config(tmp_path, train="all", aar=aar, checkpoint_every=3)
    pretrain(config)
    run = tmp_path / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    start, end = build_network(config, tokenizer), build_network(config, tokenizer)
    end.load(load_file(checkpoints(run)[-1] / "model.safetensors"))
    named = start.named_parameters()
    assert {"aar.0.weight", "aar.1.attention_time", "aar.1.gate_spectrum"} < named.keys()
    assert "model.layers.0.mlp.gate.weight" not in named
    assert all(not torch.equal(value, named[name]) for name, value in end.named_parameters().items())
    _check_saved(run / "model", end, tokenizer)
    whole = load_file(checkpoints(run)[-1] / "model.safetensors")
    shutil.rmtree(checkpoints(run)[-1])
    pretrain(config)
    again = load_file(checkpoints(run)[-1] / "model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    with pytest.raises(ValueError, match=r"the checkpoint is of another network: \['aar"):
        pretrain(_config(tmp_path))


def _check_saved(folder: Path, network: Network, tokenizer) -> None:
    model, _ = load_model(str(folder), dtype="float32")
    inputs = {"input_ids": torch.tensor([tokenizer.encode("The river runs north.")])}
    stock = model(**inputs).logits
    load_adapter(model, folder / "adapter")
    with torch.no_grad():
        for parameter in network.model.parameters():
            parameter.copy_(parameter.bfloat16())
        wanted = network.model(**inputs).logits
        assert torch.allclose(model(**inputs).logits, wanted, atol=1e-5)
    assert (stock - wanted).abs().max() > 1e-2


def _toml(values: dict[str, int]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in values.items())


def test_the_verb_logs_to_mlflow(tmp_path: Path):
    from mlflow.tracking import MlflowClient

    file = tmp_path / "tiny.toml"
    file.write_text(
        f'name = "tiny"\nstorage = "{tmp_path}"\ntoken_budget = 600\nbatch_tokens = 256\nlog_every = 1\n'
        "phases = [{until = 1.0, sequence_length = 64}]\n[world]\nentities_per_subject = 6\n"
        f"mixture = {{article = 0.5, sums = 0.5}}\n[model]\n{_toml(TINY['model'])}"
    )
    assert main(["train", "--config", str(file)]) == 0
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("pretrain_nano")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "tiny" and run.data.params["model.num_experts"] == "4"
    history = client.get_metric_history(run.info.run_id, "train/ce")
    assert [metric.value for metric in history] == [record["train/ce"] for record in _records(tmp_path / "tiny")]


def test_a_wall_clock_ends_the_schedule_with_the_rate_at_zero(tmp_path: Path):
    config = _config(tmp_path, token_budget=10**9, stop_at=(datetime.now(UTC) + timedelta(seconds=6)).isoformat())
    pretrain(config)
    records = _records(tmp_path / "tiny")
    assert records[-1]["progress"] == 1.0 and records[-1]["tokens"] < 10**8
    assert records[-1]["optim/lr"] < 0.2 * config.learning_rate < max(record["optim/lr"] for record in records)


def test_another_seed_gives_another_model(finished: PretrainConfig, tmp_path: Path):
    pretrain(_config(tmp_path, seed=1))
    folders = [finished.storage / "tiny" / "model", tmp_path / "tiny" / "model"]
    same = compare(folders[:1], folders[:1], finished.world, 6)
    assert [tuple(row.difference) for row in same] == [(0.0, 0.0, 0.0)] * 4 and same[0].first > 1
    both = compare(folders, folders[::-1], finished.world, 6)[0]
    assert both.by_seed[0] == pytest.approx(-both.by_seed[1]) and both.by_seed[0] != 0
    assert both.difference.mean == pytest.approx(0, abs=1e-12) and "held-out" in comparison_table([both], ("A", "B"))
    with pytest.raises(ValueError, match="1 folders against 2"):
        compare(folders[:1], folders, finished.world, 6)
    ours, theirs = (
        load_file(checkpoints(folder)[-1] / "model.safetensors")
        for folder in (tmp_path / "tiny", finished.storage / "tiny")
    )
    assert not torch.equal(ours["model.layers.0.mlp.gate.weight"], theirs["model.layers.0.mlp.gate.weight"])


def test_a_checkpoint_of_another_world_is_refused(finished: PretrainConfig):
    world = {**TINY["world"], "seed": 7}
    with pytest.raises(ValueError, match=r"another world: world.seed = 0 there, 7 here"):
        pretrain(_config(finished.storage, world=world))


def test_save_makes_a_plain_folder_and_keeps_the_card(finished: PretrainConfig, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "README.md").write_text("card")
    save_newest(finished, folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and (folder / "README.md").read_text() == "card"
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.bos_token_id]
    saved = load_file(checkpoints(finished.storage / "tiny")[-1] / "model.safetensors")
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"].bfloat16())


def test_bad_settings_are_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(ValueError, match="stop_at = .* has passed"):
        pretrain(_config(tmp_path, stop_at="2020-01-01T00:00:00"))
    with pytest.raises(ValueError, match="real_text is not set"):
        PretrainConfig.from_mapping({})
    with pytest.raises(ValueError, match="exceeds model.context = 128"):
        _config(tmp_path, phases=[{"until": 1.0, "sequence_length": 200}])
    with pytest.raises(ValueError, match="give aar.layers and train = 'all' together"):
        _config(tmp_path, train="all")
    with pytest.raises(ValueError, match=r"aar.layers = \(2,\) with model.num_layers = 2"):
        _config(tmp_path, train="all", aar={"layers": [2], "window": 8})
    with pytest.raises(ValueError, match="holds no gutenberg"):
        pretrain(_config(tmp_path, real_text=str(tmp_path), world={}))


def test_the_verb_names_what_is_wrong(capsys):
    assert main(["train", "--world.registers=['ledgers']"]) == 2
    assert "world.registers" in capsys.readouterr().err
    assert main(["compare", "--against", "nowhere", "else"]) == 2
    assert "1 folders against 2" in capsys.readouterr().err


def test_orthogonalised_updates_have_singular_values_near_one():
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    for batch in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalise(batch))
        assert values.shape == (3, 24) and values.min() > 0.6 and values.max() < 1.3
        alone = torch.stack([orthogonalise(matrix) for matrix in batch])
        assert torch.allclose(orthogonalise(batch), alone, atol=1e-5)


def test_load_balance_is_one_when_even_and_ignores_padding():
    even = torch.eye(4).repeat(8, 1) * 50
    valid = torch.ones(32, dtype=torch.bool)
    loss, share_E = load_balance(even, 1, valid)
    assert torch.allclose(loss, torch.tensor(1.0), atol=1e-5) and torch.allclose(share_E, torch.full((4,), 0.25))
    uneven = even.clone()
    uneven[8:] = torch.tensor([50.0, 0, 0, 0])
    assert load_balance(uneven, 1, valid)[0] > 2
    valid[8:] = False
    assert torch.allclose(load_balance(uneven, 1, valid)[0], torch.tensor(1.0), atol=1e-5)

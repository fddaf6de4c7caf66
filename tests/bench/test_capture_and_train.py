"""The benches of this package at tiny sizes: ways that agree, turns, memory, out of memory, the files they write."""

import json

import pytest
import torch

from aarlib.bench import capture, gpu, train
from aarlib.bench.measure import mid_model
from aarlib.bench.process import OutOfMemory, Turns, extra_peak, ratio, run_job, take_turns
from aarlib.moe.anatomy import active_parameters
from aarlib.moe.loading import load_config
from pipelines import bench

TINY = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "num_hidden_layers": 2,
}
SHAPE = {"heads": 2, "head_dim": 16, "window": 8}


def test_the_ways_of_capture_agree_and_have_their_turns():
    turns = capture.timings(96, 2, True, **SHAPE)
    assert set(turns) >= {"plain", "ours", "eager", "ours, backward", "ours, backward, windows constant"}
    assert all(len(wall) == len(cpu) == 2 for wall, cpu in turns.values())
    row = capture.Row(96, {name: Turns(*values) for name, values in turns.items()}, {})
    assert set(capture.TARGETS) < set(row.ratios()) and all(value > 0 for value in row.ratios().values())


def test_ways_that_differ_are_caught(monkeypatch):
    monkeypatch.setattr(capture, "eager", lambda case: [value * 1.01 for value in capture.ours(case)])
    with pytest.raises(RuntimeError, match="ours and eager attention differ by"):
        capture.check(64, 2, 16, 8)


def test_gradients_of_ours_and_eager_agree():
    case = capture.problem(64, 2, 16, 8)
    gradients = [
        torch.autograd.grad(way(case), case[:3], (case.grad_output, case.grad_windows))
        for way in (capture.ours, capture.eager)
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_plain_way_starts_at_the_same_loss_and_gradients():
    model = mid_model(**TINY)
    ids = train.rows_of(model, 2, 48)
    stepper = train.Stepper(model, train.config_of(model), ids)
    expected = stepper()
    stepper.handle.detach()
    plain = train.plain_model(model)
    loss = plain(ids, ids)["loss"]
    assert abs(float(loss.detach()) - expected) < 1e-5
    loss.backward()
    assert all(parameter.grad is not None for parameter in plain.routers.parameters())


def test_turns_alternate_and_ratios_are_paired():
    order = []
    turns = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert "".join(order) == "ababab" and len(turns["a"].wall) == 2
    assert ratio(Turns([1, 1, 1], [2, 4, 9]), Turns([1, 1, 1], [1, 2, 3])) == 2


def test_extra_peak_sees_what_a_call_takes_and_gives_back():
    peak = extra_peak(lambda: torch.ones(64, 2**20).sum())
    assert 0.24 < peak < 0.30
    assert extra_peak(lambda: torch.ones(2**10)) < 0.02


def test_memory_of_ours_grows_with_the_length_and_of_eager_with_its_square():
    ours, eager = (
        [capture.memory(way, length, 4, 16, 8)["extra_gib"] for length in (1024, 4096)] for way in ("ours", "eager")
    )
    assert ours[1] < 8 * ours[0] + 0.01 and eager[1] > 4 * ours[1]


@pytest.mark.slow
def test_a_job_out_of_memory_is_told_from_one_that_fails():
    settings = {"way": "eager", "length": 8192, **SHAPE}
    assert run_job("aarlib.bench.capture:memory", settings, limit_gib=1.0) == OutOfMemory(1.0)
    with pytest.raises(RuntimeError, match="KeyError"):
        run_job("aarlib.bench.capture:memory", {**settings, "way": "none"}, limit_gib=1.0)


def test_steps_of_the_gpu_script_on_a_small_model():
    config = load_config("olmoe", geometry=bench.OLMOE)
    for name, value in bench.TINY_OLMOE.items():
        setattr(config, name, value)
    device = torch.device("cpu")
    model = gpu.build(config, device, torch.bfloat16)
    stock = model(input_ids=torch.arange(3, 9)[None]).logits
    rows = list(gpu.steps(model, (32,), 64, (1,), 8, gpu.matmul_rate(device, torch.bfloat16, 64), repeats=1))
    assert [row.way for row in rows] == ["routing only", "aar", "plain"]
    assert all(row.batch == 2 and row.seconds and row.rate_share for row in rows)
    assert torch.equal(model(input_ids=torch.arange(3, 9)[None]).logits, stock)
    dense = 2 * (4 * 64 * 64 + 4 * 64 + 8 * 64) + 64 + 128 * 64
    assert active_parameters(model) == dense + 2 * 2 * 3 * 64 * 32


def test_the_gpu_script_refuses_the_large_model_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["gpu"]) == 2
    assert "pass --tiny" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["capture", "train"])
def test_the_verb_writes_numbers_and_a_picture(name, tmp_path, capsys):
    arguments = ["--lengths", "64", "--rounds", "2", "--threads", "1", "--tiny", "--out", str(tmp_path)]
    assert bench.main([name, *arguments, "--memory-limit", "4"]) == 0
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert [row["length"] for row in record["rows"]] == [64] and record["load_average"]
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "extra memory" in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_script_runs_whole_at_a_tiny_size(tmp_path):
    assert bench.main(["gpu", "--tiny", "--lengths", "32", "--rounds", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["dtype"] for row in record["doctor"]} == {"torch.bfloat16", "torch.float32"}
    assert all(row["passed"] for row in record["doctor"] if row["dtype"] == "torch.float32")

"""The benches of this package at tiny sizes: ways that agree, turns, memory, out of memory, the files they write."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from aarlib.bench import capture, gpu, train
from aarlib.bench.plain import PlainAAR
from aarlib.bench.process import OutOfMemory, Turns, extra_peak, ratios, run_job, take_turns
from aarlib.moe.anatomy import active_parameters
from aarlib.moe.loading import load_config
from pipelines import bench
from tests.test_layering import RUNTIME_ONLY

ROOT = Path(__file__).parents[2]
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
    found = capture.timings(96, 2, True, **SHAPE)
    turns = found["turns"]
    assert set(turns) >= {"plain", "ours", "eager", "ours, backward", "ours, backward, windows constant"}
    assert all(len(wall) == len(cpu) == 2 for wall, cpu in turns.values())
    claims = capture.claims_of(96, {name: Turns(*values) for name, values in turns.items()})
    assert set(capture.TARGETS) < {claim.name for claim in claims} and all(claim.value > 0 for claim in claims)
    assert sum(item.what.startswith("gradient of the ") for item in found["equal"]) == 6


def test_ways_that_differ_are_caught(monkeypatch):
    stock = capture.ours
    monkeypatch.setattr(capture, "ours", lambda *args: (stock(*args)[0], stock(*args)[1] * 1.01))
    with pytest.raises(RuntimeError, match="windows, ours and eager: the two ways differ by"):
        capture.check(64, 2, 16, 8)


def test_long_sequences_are_compared_at_their_length(monkeypatch):
    found = capture.timings(1100, 1, False, **SHAPE)
    whole = [name for name, *_ in found["equal"] if "at 1100 tokens" in name]
    assert len(whole) == 5 and all(error <= tolerance for _, error, tolerance in found["equal"])
    case = capture.problem(1100, 2, 16, 8)
    assert capture.last(case)[0, -1].sum() > 1e-3
    stock = capture.ours

    def wrong(change):
        return lambda case, *rest: change(*stock(case, *rest))

    def late(output, windows):
        return output, torch.cat([windows[:, :1060], 1.01 * windows[:, 1060:]], dim=1)

    def leak(output, windows):
        return torch.cat([output[:, :, :-1], output[:, :, -1:] + 1e-3], dim=2), windows

    for change, what in ((late, "windows of the last rows at 1100"), (leak, "output at 1100 tokens, ours and plain")):
        monkeypatch.setattr(capture, "ours", wrong(change))
        with pytest.raises(RuntimeError, match=f"{what}.*: the two ways differ"):
            capture.check_long(case)


def test_a_lost_gradient_is_caught(monkeypatch):
    stock = capture.ours

    def without_windows(case, window_grad=True):
        output, windows = stock(case, window_grad)
        return output, windows.detach() + 0 * output.sum()

    monkeypatch.setattr(capture, "ours", without_windows)
    with pytest.raises(RuntimeError, match="gradient of the query, with the windows' gradient"):
        capture.check(64, 2, 16, 8)


def test_a_plain_way_that_starts_elsewhere_is_caught(monkeypatch):
    checked = train.check(48, 2, **TINY)
    assert len(checked) == 3 and all(item.error <= item.tolerance for item in checked)
    monkeypatch.setattr(train, "plain_model", lambda model: PlainAAR(model, moved(train, model), train.WINDOW))
    with pytest.raises(RuntimeError, match="first loss, ours and the Trainer's: the two ways differ"):
        train.check(48, 2, **TINY)


def moved(bench, model):
    """The tensors of the plain way, the layers' changed."""
    handle = bench.attach_aar(model, bench.config_of(model), seed=0)
    found = {i: {n: p + 1 for n, p in router.named_parameters()} for i, router in handle.routers.items()}
    handle.detach()
    return found


def test_turns_alternate_last_and_ratios_are_paired(monkeypatch):
    monkeypatch.setattr("aarlib.bench.process.TURN_S", 0.05)
    order = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    turns = take_turns({"a": lambda: call("a", 0.01), "b": lambda: call("b", 0.06)}, 2)
    assert re.fullmatch("aabb(a{2,}b){2}", "".join(order)) and len(turns["a"].wall) == 2
    assert 0.01 <= turns["a"].seconds < turns["b"].seconds, "of one call, not of the turn"
    assert ratios([2, 4, 9], [1, 2, 3]) == (2, 2, 3)


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


@pytest.fixture(scope="module")
def small():
    config = load_config("olmoe", geometry=bench.OLMOE)
    for name, value in bench.TINY_OLMOE.items():
        setattr(config, name, value)
    return gpu.build(config, torch.device("cpu"), torch.bfloat16)


def test_steps_of_the_gpu_script_on_a_small_model(small):
    stock = small(input_ids=torch.arange(3, 9)[None]).logits
    rate = gpu.matmul_rate(torch.device("cpu"), torch.bfloat16, 64)
    ids = train.rows_of(small, 2, 32)
    rows = [gpu.measured_step(small, way, ids, (1,), 8, rate, 1) for way in ("routing only", "aar", "plain")]
    assert all(row.batch == 2 and row.turns.seconds > 0 and row.rate_share for row in rows)
    assert torch.equal(small(input_ids=torch.arange(3, 9)[None]).logits, stock)
    names = [claim.name for claim in gpu.claims_of(rows) if claim.target is not None]
    assert names == ["aar / routing only", "share of the matmul rate, aar"]
    dense = 2 * (4 * 64 * 64 + 4 * 64 + 8 * 64) + 64 + 128 * 64
    assert active_parameters(small) == dense + 2 * 2 * 3 * 64 * 32


def test_the_gpu_script_compares_before_it_times_and_gives_the_dtype_back(small, monkeypatch):
    before = {name: value.clone() for name, value in small.state_dict().items()}
    checked = gpu.equal_numbers(small, (1,), 8, length=40)
    assert [item.tolerance for item in checked] == [0.0, 1e-5, train.LOSS_TOLERANCE, train.GRADIENT_TOLERANCE]
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    stock = gpu.cut
    monkeypatch.setattr(gpu, "cut", lambda *args: stock(*args) * 1.1)
    with pytest.raises(RuntimeError, match="windows and eager attention weights in float32: the two ways differ"):
        gpu.equal_numbers(small, (1,), 8, length=40)


def test_a_part_that_no_longer_fits_is_skipped_and_said(small, monkeypatch):
    monkeypatch.setattr(gpu, "build", lambda *_: small)
    plan = gpu.Plan((1,), (32,), 64, 1, 64, budget_s=50.0, window=8)
    parts = list(gpu.run(None, torch.device("cpu"), plan, lambda model, dtype: gpu.Part(f"doctor, {dtype}")))
    assert [(part.name, bool(part.skipped)) for part in parts] == [
        ("equal", False),
        ("routing only, aar, 32 tokens", False),
        ("doctor, torch.bfloat16", False),
        ("plain steps at 32", True),
        ("doctor in float32", True),
    ]
    assert parts[0].equal and "it may take 60 s" in parts[-1].skipped


def test_the_gpu_script_refuses_the_large_model_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["gpu"]) == 2
    assert "pass --tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_the_verb_measures_in_processes_of_its_own(tmp_path, capsys):
    out = tmp_path / "capture.json"
    arguments = ["--lengths", "64", "--rounds", "2", "--threads", "1", "--tiny", "--out", str(out)]
    assert bench.main(["capture", *arguments, "--memory-limit", "4"]) == 0
    record = json.loads(out.read_text())
    assert [row["length"] for row in bench.lengths_in(record)] == [64] and record["load_average"]
    assert (tmp_path / "capture.png").stat().st_size > 10_000
    assert "extra peak of ours" in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_script_runs_whole_at_a_tiny_size_and_needs_only_the_core(tmp_path):
    """In a process where Ray, DeepSpeed, MLflow, lm-eval and the packages of pages cannot be imported."""
    out = tmp_path / "gpu.json"
    arguments = ["gpu", "--tiny", "--lengths", "32", "--rounds", "1", "--out", str(out)]
    absent = (*RUNTIME_ONLY, "matplotlib", "jinja2")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    code += f"from pipelines import bench\nraise SystemExit(bench.main({arguments!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    record = json.loads(out.read_text())
    doctors = [part for part in record["details"].values() if "findings" in part]
    assert {part["dtype"] for part in doctors} == {"torch.bfloat16", "torch.float32"}
    assert all(row["passed"] for row in doctors[1]["findings"]) and not record["skipped"]

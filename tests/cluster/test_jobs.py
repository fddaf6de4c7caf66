"""A head with token authentication takes a submitted training; the Slurm script starts its two nodes and runs one; a lost node
in the middle of a training changes nothing."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.fs as pafs
import pytest
from safetensors.torch import load_file

from tests.object_store import object_store
from tests.runtime.conversations import run_config, save_model, write_conversations

pytestmark = [pytest.mark.ray, pytest.mark.slow]
pytest.importorskip("ray")

from aarlib.runtime.working_copy import WRITER  # noqa: E402

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TRAIN = ["pipelines.train", "pipelines/configs/nano_smoke.toml", "--optim.max_steps=2", '--data.train=["nano:sft:60"]']
START_S, LIMIT_S = 240, 1500
IMPATIENT = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60"}
"""So long a group waits for the lost worker's place before it starts smaller."""


class Head(NamedTuple):
    dashboard: str
    environment: dict[str, str]


def environment(**more: str) -> dict[str, str]:
    """Of a command of its own: no trace of the Ray that other tests use."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept, "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_USAGE_STATS_ENABLED": "0", **more,
    }  # fmt: skip


def free_ports(count: int) -> list[int]:
    found = [socket.socket() for _ in range(count)]
    for one in found:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in found]
    for one in found:
        one.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    port, dashboard, agent = free_ports(3)
    variables = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))
    command = [
        BIN / "ray", "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1", f"--port={port}",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("head") / "head.log"
    with log.open("wb") as file, subprocess.Popen(command, env=variables, stdout=file, stderr=file) as process:
        _wait_for_port(dashboard, process)
        yield Head(f"http://127.0.0.1:{dashboard}", variables)
        process.send_signal(signal.SIGTERM)


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, "the head ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the dashboard did not come up")


def run(command: Sequence[str | Path], variables: dict[str, str], log: Path) -> tuple[int, str]:
    """Exit code and the end of the output; what takes too long is asked to end, and takes its Ray with it."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    return process.returncode, log.read_text()[-3000:]


def submitted(head: Head, variables: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pipelines.submit", f"--address={head.dashboard}", "--", *command]
    return subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.long
def test_a_submitted_training_runs_and_its_log_is_followed(head: Head, tmp_path: Path) -> None:
    variables = {**head.environment, "HF_HOME": str(tmp_path / "hf")}
    storage = f"--ray.storage={tmp_path / 'runs'}"
    result = submitted(head, variables, sys.executable, "-m", *TRAIN, "--ray.num_workers=1", storage)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MiB to upload" in result.stdout and "held-out CE" in result.stdout
    assert result.stdout.rstrip().endswith("job succeeded")
    record = json.loads((tmp_path / "runs" / "nano_smoke" / "aar-seed0" / "result.json").read_text())
    assert record["steps"] == 2


def test_settings_reach_the_job_and_a_failed_job_is_a_failure(head: Head, tmp_path: Path) -> None:
    variables = {**head.environment, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "secret"}
    code = "import os, sys; print(os.environ['HF_HOME'], os.environ['HF_TOKEN'], os.path.isdir('tests')); sys.exit(3)"
    result = submitted(head, variables, sys.executable, "-c", code)
    assert result.returncode == 1
    assert f"{tmp_path / 'hf'} secret False" in result.stdout
    assert result.stdout.rstrip().endswith("job failed")


def test_without_the_token_nothing_is_submitted(head: Head) -> None:
    variables = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))
    result = submitted(head, variables, sys.executable, "-c", "print('ran')")
    assert result.returncode == 2 and "ran\n" not in result.stdout
    assert f"error: {head.dashboard} does not take the job" in result.stderr and "Traceback" not in result.stderr


def test_the_readmes_command_runs(head: Head) -> None:
    command = "ray job submit --working-dir . -- python -m pipelines.train pipelines/configs/"
    assert command in (ROOT / "README.md").read_text()
    variables = {**head.environment, "RAY_API_SERVER_ADDRESS": head.dashboard}
    line = [BIN / "ray", *command.split()[1:-1], "pipelines/configs/nano_smoke.toml", "--dry-run"]
    result = subprocess.run(line, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0 and "trainable" in result.stdout, result.stdout + result.stderr


@pytest.mark.long
def test_the_slurm_script_trains_on_a_head_and_a_worker(tmp_path: Path) -> None:
    """srun and scontrol are stand-ins that run everything here; the script, Ray's two nodes and the training are real."""
    stand_ins = {
        "scontrol": "printf 'node1\\nnode2\\n'",
        "hostname": "echo 127.0.0.1",
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = environment(
        PATH=f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_CPUS_PER_TASK="1",
        AARLIB_RAY_PORT=str(free_ports(1)[0]),
    )
    command = ["bash", "cluster/slurm.sh", "python", "-m", *TRAIN, f"--ray.storage={tmp_path / 'runs'}"]
    code, output = run(command, variables, tmp_path / "slurm.log")
    assert code == 0, output
    record = json.loads((tmp_path / "runs" / "nano_smoke" / "aar-seed0" / "result.json").read_text())
    assert record["steps"] == 2 and record["num_workers"] == 2


@pytest.mark.long
def test_nodes_that_share_nothing_but_a_bucket_train_sweep_and_evaluate(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    data = write_conversations(tmp_path / "rows.jsonl", 64)
    scratch = [tmp_path / "head", tmp_path / "node"]
    with object_store("gs", "runs") as store:
        changes = {"optim.max_steps": 4, "ray.storage": store.uri("runs/ours"), "ray.num_workers": 1}
        changes |= {"evaluate.tasks": ["nano_ioi"], "evaluate.limit": 4, "evaluate.num_actors": 1}
        config = run_config(model, data, tmp_path, "apart", **changes)
        (tmp_path / "config.json").write_text(config.to_json())
        command = [sys.executable, Path(__file__).with_name("apart.py"), tmp_path / "config.json", *scratch]
        code, output = run(command, environment(PYTHONPATH=str(ROOT)), tmp_path / "nodes.log")
        assert code == 0, output
        infos = store.filesystem.get_file_info(pafs.FileSelector("runs/ours", recursive=True))
    stored = {info.path.removeprefix("runs/ours/") for info in infos if info.type == pafs.FileType.File}
    runs = ("apart", "apart-window/trials/00000", "apart-window/trials/00001")
    for name in (f"{run}/aar-seed0/{file}" for run in runs for file in ("result.json", "adapter/adapter.safetensors")):
        there, here = (next(folder.glob(f"*/{name}")) for folder in scratch)
        assert there.read_bytes() == here.read_bytes() and name in stored
    assert {"apart/evaluation/scores.parquet", "apart-window/results.csv"} < stored
    assert not [name for name in stored if "checkpoints" in name or name.endswith(WRITER)]


@pytest.mark.long
def test_a_node_lost_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    """Two raylets with a worker each; the second is killed; the training goes on with the worker that is left."""
    model = save_model(tmp_path / "model")
    data = write_conversations(tmp_path / "rows.jsonl", 64)
    changes = {"ray.min_workers": 1, "ray.max_failures": 3}
    config = run_config(model, data, tmp_path / "runs", "lost", **changes)
    (tmp_path / "config.json").write_text(config.to_json())
    command = [sys.executable, Path(__file__).with_name("two_nodes.py"), tmp_path / "config.json"]
    code, output = run(command, environment(PYTHONPATH=str(ROOT), **IMPATIENT), tmp_path / "nodes.log")
    assert code == 0, output
    lost, whole = (tmp_path / "runs" / name for name in ("lost", "whole"))
    starts = [json.loads(line)["num_workers"] for line in (lost / "starts.jsonl").read_text().splitlines()]
    assert starts[0] == 2 and starts[-1] == 1
    rows = [(folder / "aar-seed0" / "rows.jsonl").read_text() for folder in (lost, whole)]
    assert rows[0] == rows[1] and len(rows[0].splitlines()) == 10
    trained = [load_file(folder / "aar-seed0" / "adapter" / "adapter.safetensors") for folder in (lost, whole)]
    assert max(float((trained[0][name] - trained[1][name]).abs().max()) for name in trained[0]) < 1e-6

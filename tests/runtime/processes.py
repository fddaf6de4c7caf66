"""Drivers in processes of their own, and workers that are killed."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from aarlib.training.config import RunConfig
from tests.conftest import RAY_ENVIRONMENT

TRAIN = "from aarlib.runtime.trainer import train as run"


def start_driver(config: RunConfig, folder: Path, what: str = TRAIN) -> subprocess.Popen[bytes]:
    """`what` imports a function `run` of a config, called in a process of its own with a Ray of its own."""
    path = folder / "config.json"
    path.write_text(config.to_json())
    code = (
        "import sys; from pathlib import Path; from aarlib.training.config import RunConfig; "
        f"{what}; run(RunConfig.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    environment = {**os.environ, **RAY_ENVIRONMENT}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "driver.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment, stdout=log, stderr=log)


def train_workers(driver: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayTrainWorker" in process.name() + "".join(process.cmdline()):
                found.append(process)
    return found


def wait_for(history: Path, count: int, driver: subprocess.Popen[bytes]) -> None:
    while not history.is_file() or len(history.read_text().splitlines()) < count:
        assert driver.poll() is None, "the driver ended before it could be killed"
        time.sleep(0.02)


def kill_a_worker(history: Path, steps: int) -> None:
    """SIGKILL one Train worker of this process's Ray once `history` has as many steps, past the first checkpoint."""
    while not history.is_file() or len(history.read_text().splitlines()) < steps:
        time.sleep(0.02)
    workers = train_workers(psutil.Process())
    workers[-1].kill()
    (history.parent / "killed").write_text(str(workers[-1].pid))

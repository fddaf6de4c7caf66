"""The whole job on the bundled model, in minutes on two CPU cores: train, sweep, evaluate, report.

    python -m pipelines.demo                     a new run directory runs/nano_demo...; an interrupted one is taken up again
    python -m pipelines.demo --ray.storage=DIR   the same, elsewhere

Trains routing-only SFT, AAR^T and AAR with two seeds each, sweeps window and layers, scores every adapter and the
untouched model on lm-eval tasks, and writes one page. Any field of pipelines/configs/nano_demo.toml can be overridden.
"""

import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aarlib.config import write_text_atomically
from aarlib.training.config import RunConfig

CONFIG = Path(__file__).parent / "configs" / "nano_demo.toml"
STAGES = "stages.json"
STUDY = "window_layers"


def main(argv: Sequence[str] | None = None) -> int:
    overrides = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    _quieten()
    try:
        run(next_config(RunConfig.from_toml(CONFIG, overrides)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def next_config(config: RunConfig) -> RunConfig:
    """The config under the first name whose demo is not finished: a free one, or an interrupted one to take up again."""
    from aarlib.runtime import handover
    from aarlib.runtime.run_directory import check_claim, run_directory

    for number in itertools.count(1):
        candidate = config if number == 1 else config.updated({"name": f"{config.name}_{number}"})
        handover.update(candidate.ray.storage, candidate.name)
        if not read_stages(run_directory(candidate)).get("finished", False):
            check_claim(candidate)
            return candidate
    raise AssertionError("itertools.count ends")


def run(config: RunConfig) -> None:
    from aarlib.runtime.process_tree import PeakMemory
    from aarlib.runtime.run_directory import held, run_directory

    folder = run_directory(config)
    print(f"aarlib demo: {len(config.runs())} trainings, run directory {folder}", flush=True)
    with PeakMemory() as peak:
        stages = Stages(folder, peak)
        tasks = stages.run("check", "configuration and tasks, before anything expensive", lambda: check(config))
        stages.run("train", ", ".join(config.method) + " with Ray Train and DeepSpeed", lambda: train(config))
        stages.run("sweep", "window and layers with Ray Tune", lambda: sweep(config))
        stages.run("evaluate", f"every adapter and the untouched model on {tasks}", lambda: evaluate(config))
    with held(config):
        stages.finish()
        conclude(folder, config, sum(stages.wall_s.values()), stages.peak_gib)


class Stages:
    """Runs stages, prints when each starts and ends, and keeps their times across an interruption."""

    def __init__(self, folder: Path, peak: Any):
        self._path, self._peak, self._number = folder / STAGES, peak, 0
        earlier = read_stages(folder)
        self.wall_s: dict[str, float] = earlier.get("wall_s", {})
        self._earlier_gib: float = earlier.get("peak_gib", 0.0)

    @property
    def peak_gib(self) -> float:
        return max(self._peak.gib, self._earlier_gib)

    def run(self, name: str, what: str, action: Callable[[], Any]) -> Any:
        self._number += 1
        print(f"\n[{self._number}/4] {name}: {what}", flush=True)
        begun = time.monotonic()
        result = action()
        elapsed = time.monotonic() - begun
        self.wall_s[name] = round(self.wall_s.get(name, 0.0) + elapsed, 1)
        total = sum(self.wall_s.values())
        print(
            f"[{self._number}/4] {name}: {elapsed:.0f} s, {total:.0f} s in all, peak {self.peak_gib:.1f} GiB",
            flush=True,
        )
        if self._path.parent.is_dir():
            self._store(finished=False)
        return result

    def finish(self) -> None:
        self._store(finished=True)

    def _store(self, finished: bool) -> None:
        stored = {"wall_s": self.wall_s, "peak_gib": self.peak_gib, "finished": finished}
        write_text_atomically(self._path, json.dumps(stored, indent=2))


def read_stages(folder: Path) -> dict[str, Any]:
    path = folder / STAGES
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def check(config: RunConfig) -> str:
    from aarlib.runtime import trainer
    from aarlib.runtime.evaluation import find_tasks
    from aarlib.runtime.sweep import check_sweep
    from tune_spaces.aar_window_layers import STUDY as study

    trainer.check(config)
    check_sweep(config, study, STUDY)
    with tempfile.TemporaryDirectory() as folder:
        return ", ".join(find_tasks(config.evaluate, folder).names)


def train(config: RunConfig) -> None:
    from aarlib.runtime import trainer

    trainer.train(config)


def sweep(config: RunConfig) -> None:
    from aarlib.runtime import sweep
    from tune_spaces.aar_window_layers import STUDY as study

    sweep.sweep(config, study, STUDY)


def evaluate(config: RunConfig) -> None:
    from aarlib.runtime import evaluation
    from aarlib.runtime.cluster import connect
    from aarlib.runtime.run_directory import held

    connect(config.ray)
    with held(config):
        scores = evaluation.evaluate(config).scores
    for problem in evaluation.track(config, scores):
        print(f"MLflow refused: {problem}", file=sys.stderr)


def conclude(folder: Path, config: RunConfig, wall_s: float, peak_gib: float) -> None:
    from aarlib.report.page import write_report
    from aarlib.report.text import duration
    from aarlib.runtime.mlflow_store import tracking_uri

    written = write_report(folder)
    print(f"\n{written.text}\n\n{duration(wall_s)} in all, peak memory of the process tree {peak_gib:.2f} GiB")
    print(f"page:    {written.page}\nsummary: {written.summary}")
    print(f"MLflow:  mlflow ui --backend-store-uri {tracking_uri(config)} --host 127.0.0.1")


def _quieten() -> None:
    """Our own progress lines only: no bars, no banners."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("aarlib").setLevel(logging.INFO)


if __name__ == "__main__":
    raise SystemExit(main())

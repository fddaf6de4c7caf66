"""The evaluate verb refuses before it starts anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from aarlib.runtime.run_directory import claim
from aarlib.training.config import RunConfig
from pipelines import evaluate

pytest.importorskip("ray")

HELP = """
import contextlib, sys
from pipelines import evaluate
with contextlib.suppress(SystemExit):
    evaluate.main(["--help"])
sys.exit(", ".join({"torch", "ray", "lm_eval", "mlflow", "pandas"} & set(sys.modules)) or 0)
"""
CONFIG = str(Path(evaluate.__file__).parent / "configs" / "nano_demo.toml")


def test_help_loads_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", HELP], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_another_config_than_the_run_was_trained_with_is_refused(tmp_path, capsys):
    config = RunConfig.from_toml(CONFIG, [f"ray.storage={tmp_path}"])
    claim(config)
    arguments = [CONFIG, f"--ray.storage={tmp_path}", "--dry-run"]
    assert evaluate.main([*arguments, "--optim.max_steps=7"]) == 2
    assert "exists with another config (optim.max_steps" in capsys.readouterr().err
    assert evaluate.main([*arguments, "--evaluate.limit=7"]) == 2
    assert "holds no adapter" in capsys.readouterr().err


REFUSED = """
import sys
from pipelines import evaluate
codes = [evaluate.main([*sys.argv[1:], *flags]) for flags in ([], ["--dry-run"])]
ray = sys.modules.get("ray")
sys.exit(f"{codes}, Ray started" if codes != [2, 2] or (ray and ray.is_initialized()) else 0)
"""


def test_a_run_without_adapters_is_refused_and_nothing_is_written(tmp_path):
    command = [sys.executable, "-c", REFUSED, CONFIG, f"--ray.storage={tmp_path}"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("holds no adapter; run `python -m pipelines.train`") == 2
    assert not list(tmp_path.iterdir())

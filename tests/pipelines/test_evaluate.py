"""The evaluate verb refuses before it starts anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import evaluate

ray = pytest.importorskip("ray")

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


def test_a_run_without_adapters_is_refused_and_nothing_is_written(tmp_path, capsys):
    for flags in ([], ["--dry-run"]):
        assert evaluate.main([CONFIG, f"--ray.storage={tmp_path}", *flags]) == 2
        assert "holds no adapter; run `python -m pipelines.train`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert not ray.is_initialized()

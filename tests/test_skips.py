"""A skip whose reason is not listed fails the run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import skips
from tests.skips import read_allowed, unexplained

ROOT = Path(__file__).parent.parent


def test_unexplained_keeps_what_no_pattern_matches():
    assert unexplained(["no CUDA device", "later", "data: x"], ["no CUDA device", "data: *"]) == ["later"]
    assert not unexplained(read_allowed(), read_allowed())


def run_pytest(folder: Path, reason: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    pytest.skip({reason!r})\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "-q"]
    return subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_skip_not_on_the_list_fails_the_run(tmp_path: Path):
    allowed = run_pytest(tmp_path, "no CUDA device")
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    refused = run_pytest(tmp_path, "did not feel like it")
    assert refused.returncode == 1
    assert "skip not allowed by tests/skips_allowed.txt: did not feel like it" in refused.stdout


@pytest.mark.parametrize("name", ["pytest_collectreport", "pytest_runtest_logreport", "pytest_sessionfinish"])
def test_this_suite_is_watched(pytestconfig: pytest.Config, name: str):
    installed = [hook.function for hook in getattr(pytestconfig.hook, name).get_hookimpls()]
    assert getattr(skips, name) in installed

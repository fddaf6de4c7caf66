"""Every example runs as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_short_and_has_a_test():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"attach_and_generate.py", "train_routers.py", "record_windows.py"}
    for name in names:
        assert len((EXAMPLES / name).read_text().splitlines()) <= 40


def test_attach_and_generate():
    lines = dict(line.split(":", 1) for line in run("attach_and_generate.py") if ":" in line)
    assert lines["stock"].strip() == lines["disabled"].strip()


def test_train_routers():
    values = {line.split(":")[0]: float(line.split("CE ")[1]) for line in run("train_routers.py")}
    assert values["reloaded"] == values["trained"] < values["untrained"]
    assert values["detached"] > values["trained"]


def test_record_windows():
    rows = run("record_windows.py")[1:]
    assert [int(row.split()[0]) for row in rows] == list(range(8))
    assert all(0 < float(row.split()[1]) < 1 for row in rows)

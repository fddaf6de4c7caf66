"""Every example runs: one as a user would run it, the others in this process, which has the libraries loaded."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(capsys):
    def lines(name):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return lines


def run_alone(name):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_short_and_has_a_test():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "attach_and_generate.py", "train_routers.py", "record_windows.py", "audit_one_token.py", "explain_a_pick.py",
    }  # fmt: skip
    for name in names:
        assert len((EXAMPLES / name).read_text().splitlines()) <= 40


def test_attach_and_generate():
    lines = dict(line.split(":", 1) for line in run_alone("attach_and_generate.py") if ":" in line)
    assert lines["stock"].strip() == lines["disabled"].strip()


def test_train_routers(run):
    values = {line.split(":")[0]: float(line.split("CE ")[1]) for line in run("train_routers.py")}
    assert values["reloaded"] == values["trained"] < values["untrained"]
    assert values["detached"] > values["trained"]


def test_record_windows(run):
    rows = run("record_windows.py")[1:]
    assert [int(row.split()[0]) for row in rows] == list(range(8))
    assert all(0 < float(row.split()[1]) < 1 for row in rows)


def test_audit_one_token(run):
    rows = [line.split() for line in run("audit_one_token.py")[2:]]
    changes = {row[0]: float(row[2]) for row in rows}
    assert changes["native"] == 0 and len(changes) == 12 and list(changes.values()) == sorted(changes.values())
    assert {row[0] for row in rows if len(row) == 4} == {f"vertex_{slot}" for slot in range(4)}


def test_explain_a_pick(run):
    title, total, _, *rows = run("explain_a_pick.py")
    assert float(total.rpartition(" ")[2]) == pytest.approx(float(re.search(r"logit (\S+),", title)[1]), abs=2e-3)
    assert len(rows) == 8
    margins = [float(row.split()[2]) for row in rows]
    assert margins == sorted(margins, reverse=True) and margins[0] > 0

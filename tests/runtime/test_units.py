"""run_units on a real local Ray: restarts, dead actors, failing units, and the same rows for any number of actors."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import ray

from aarlib.runtime.unit_parts import part_path
from aarlib.runtime.units import Resources, UnitsError, run_units

pytestmark = pytest.mark.ray


class Squares:
    """Appends the id of every unit it starts to `log`, then does what the unit says."""

    def __init__(self, log: str, scale: int = 1):
        self._log, self._scale = Path(log), scale

    def __call__(self, unit):
        with self._log.open("a") as log:
            log.write(unit["id"] + "\n")
        if "kill_once" in unit and not Path(unit["kill_once"]).exists():
            Path(unit["kill_once"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail_until" in unit and not Path(unit["fail_until"]).exists():
            raise ValueError("the flag is not there")
        time.sleep(unit.get("sleep", 0))
        values = range(unit["n"])
        return pd.DataFrame(
            {"value": [self._scale * value**2 for value in values], "text": [f"v{value}" for value in values]}
        )


class Unloadable:
    def __init__(self):
        raise ValueError("adapter belongs to another base")

    def __call__(self, unit):
        raise AssertionError("never constructed")


def numbered(count, **extra):
    return [{"id": f"unit {number}/x", "n": number + 1, **extra} for number in range(count)]


def started(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_one_actor_gives_the_rows_of_three_and_says_how_far_it_is(local_ray, tmp_path, caplog):
    settings = {"log": str(tmp_path / "log")}
    with caplog.at_level("INFO", logger="aarlib"):
        one = run_units(numbered(7, sleep=0.1), Squares, tmp_path / "one", settings=settings, label="squares")
    lines = [message for message in caplog.messages if message.startswith("squares: ")]
    assert lines[0] == "squares: 0 of 7 already finished"
    found = [re.fullmatch(r"squares: (\d)/7, \d+ s, about (\d+) s left \(unit (\d)/x\)", line) for line in lines[1:]]
    assert [(match[1], match[3]) for match in found if match] == [(str(n + 1), str(n)) for n in range(7)]
    assert found[-1] and found[-1][2] == "0"
    three = run_units(numbered(7, sleep=0.1), Squares, tmp_path / "three", settings=settings, num_actors=3)
    pd.testing.assert_frame_equal(one, three, check_exact=True)
    assert list(one["unit"].unique()) == [unit["id"] for unit in numbered(7)]
    assert len(one) == sum(range(1, 8))


def test_a_killed_actor_costs_one_unit_one_repetition(local_ray, tmp_path):
    units = numbered(5)
    units[2]["kill_once"] = str(tmp_path / "flag")
    frame = run_units(units, Squares, tmp_path / "out", settings={"log": str(tmp_path / "log")}, num_actors=2)
    assert list(frame["unit"].unique()) == [unit["id"] for unit in units]
    assert sorted(started(tmp_path / "log")) == sorted([unit["id"] for unit in units] + [units[2]["id"]])


def test_a_unit_that_always_kills_its_actor_is_given_up_and_named(local_ray, tmp_path):
    units = numbered(3)
    units[0]["kill"] = True
    with pytest.raises(UnitsError, match=r"1 of 3 units failed.*'unit 0/x': its actor died 2 times"):
        run_units(units, Squares, tmp_path / "out", settings={"log": str(tmp_path / "log")}, max_deaths=1)
    assert started(tmp_path / "log").count(units[0]["id"]) == 2
    assert all(part_path(tmp_path / "out", unit["id"]).is_file() for unit in units[1:])


def test_a_failing_unit_names_itself_and_only_it_is_repeated(local_ray, tmp_path):
    flag, log = tmp_path / "flag", tmp_path / "log"
    units = numbered(4)
    units[1]["fail_until"] = str(flag)
    with pytest.raises(UnitsError, match=r"1 of 4 units failed.*'unit 1/x': ValueError: the flag is not there"):
        run_units(units, Squares, tmp_path / "out", settings={"log": str(log)}, num_actors=2)
    assert len(started(log)) == 4
    flag.touch()
    frame = run_units(units, Squares, tmp_path / "out", settings={"log": str(log)}, num_actors=2)
    assert started(log)[4:] == [units[1]["id"]]
    assert len(frame) == sum(unit["n"] for unit in units)


def test_an_error_while_loading_arrives_as_itself(local_ray, tmp_path):
    with pytest.raises(ValueError, match="adapter belongs to another base"):
        run_units(numbered(2), Unloadable, tmp_path / "out")


DRIVER = """
import sys, ray
from aarlib.runtime.units import run_units
from tests.runtime.test_units import Squares, numbered
address, out, log = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
run_units(numbered(6, sleep=1.0), Squares, out, settings={"log": log}, num_actors=1)
"""


def test_a_killed_driver_repeats_no_finished_unit(local_ray, tmp_path):
    out, log, units = tmp_path / "out", tmp_path / "log", numbered(6, sleep=1.0)
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address, str(out), str(log)])
    try:
        while len(list(out.glob("parts/[!.]*.parquet"))) < 2:
            assert driver.poll() is None
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.wait()
    time.sleep(1.5)
    finished = {unit["id"] for unit in units if part_path(out, unit["id"]).is_file()}
    before = started(log)
    assert 2 <= len(finished) < 6
    frame = run_units(units, Squares, out, settings={"log": str(log)}, num_actors=2)
    assert set(started(log)[len(before) :]) == {unit["id"] for unit in units} - finished
    assert list(frame["unit"].unique()) == [unit["id"] for unit in units]


def test_a_folder_of_other_work_is_refused(local_ray, tmp_path):
    settings = {"log": str(tmp_path / "log")}
    run_units(numbered(2), Squares, tmp_path / "out", settings=settings)
    with pytest.raises(ValueError, match=r"setting scale = None, now 3.*Choose another folder"):
        run_units(numbered(2), Squares, tmp_path / "out", settings=settings | {"scale": 3})
    with pytest.raises(ValueError, match=r"1 new units \(unit 2/x\)"):
        run_units(numbered(3), Squares, tmp_path / "out", settings=settings)
    changed = numbered(2)
    changed[0]["n"] = 9
    with pytest.raises(ValueError, match=r"1 changed units \(unit 0/x\)"):
        run_units(changed, Squares, tmp_path / "out", settings=settings)
    assert len(started(tmp_path / "log")) == 2


def test_bad_units_are_refused_before_any_actor(tmp_path):
    with pytest.raises(ValueError, match="more than once"):
        run_units([{"id": "a"}, {"id": "a"}], Squares, tmp_path)
    with pytest.raises(ValueError, match="non-empty string"):
        run_units([{"n": 1}], Squares, tmp_path)
    with pytest.raises(ValueError, match="JSON-able"):
        run_units([{"id": "a", "n": object()}], Squares, tmp_path)

    class Local(Squares):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        run_units(numbered(1), Local, tmp_path)


def test_an_actor_larger_than_the_cluster_is_refused(local_ray, tmp_path):
    with pytest.raises(ValueError, match=r"one actor needs 3 GPU and the cluster has 0"):
        run_units(numbered(1), Squares, tmp_path, settings={"log": ""}, resources=Resources(gpus=3))


def test_long_ids_give_short_distinct_names(tmp_path):
    long = "x" * 400
    names = {part_path(tmp_path, long + end).name for end in ("a", "b")}
    assert len(names) == 2 and max(map(len, names)) < 120

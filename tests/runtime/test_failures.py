"""Which failure of a worker ends a training at once, and what its user is told."""

import subprocess
import sys

import pytest
import ray.train
from ray.exceptions import RayTaskError

from aarlib.runtime.failures import FailAtOnce, reason


def in_ray(error: Exception) -> RayTaskError:
    """As Ray gives an error of one of its processes."""
    return RayTaskError("train_worker", "Traceback", error)


def test_bad_input_of_one_worker_ends_the_training():
    lost = RuntimeError("Connection closed by peer")
    with pytest.raises(ValueError, match="^row 7 has no messages$"):
        FailAtOnce().after_exception(None, {0: lost, 1: in_ray(ValueError("row 7 has no messages"))})


def test_a_lost_worker_or_a_special_value_error_is_left_to_ray():
    """json.JSONDecodeError is a ValueError: a torn file of a dying node, not bad input."""
    torn = type("JSONDecodeError", (ValueError,), {})("Expecting value")
    FailAtOnce().after_exception(None, {0: RuntimeError("Connection closed by peer"), 1: torn})


def test_the_reason_is_the_value_error_behind_the_failure_or_the_failure():
    bad = ray.train.WorkerGroupError("1 of 2 workers failed", {1: in_ray(ValueError("row 7 has no messages"))})
    found = reason(bad)
    assert type(found) is ValueError and str(found) == "row 7 has no messages"
    lost = ray.train.WorkerGroupError("1 of 2 workers failed", {0: RuntimeError("Connection closed by peer")})
    assert reason(lost) is lost


def test_ray_trains_controller_does_not_load_pytorch_for_it():
    """The controller only waits: importing the package there delayed every start by seconds."""
    script = "import sys, aarlib.runtime.failures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

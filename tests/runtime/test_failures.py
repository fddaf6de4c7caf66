"""Which failure of a worker ends a training at once, and what its user is told."""

import json
import subprocess
import sys

import pytest

ray = pytest.importorskip("ray")

from ray.exceptions import RayTaskError  # noqa: E402
from ray.train import ControllerError, WorkerGroupError  # noqa: E402

from aarlib.runtime.failures import FailAtOnce, reason  # noqa: E402

LOST = RuntimeError("Connection closed by peer")
BAD = ValueError("row 7 has no messages")


def in_ray(error: Exception) -> RayTaskError:
    """As Ray gives an error of one of its processes."""
    return RayTaskError("train_worker", "Traceback", error)


@pytest.mark.parametrize("bad", [BAD, in_ray(BAD)])
def test_bad_input_of_one_worker_ends_the_training(bad):
    with pytest.raises(ValueError, match="^row 7 has no messages$"):
        FailAtOnce().after_exception(None, {0: LOST, 1: bad})


@pytest.mark.parametrize("error", [LOST, json.JSONDecodeError("Expecting value", "", 0)])
def test_a_lost_worker_or_a_torn_file_is_left_to_ray(error):
    """A JSONDecodeError is a ValueError too, but of a file that a dying node was writing: the group is started again."""
    assert FailAtOnce().after_exception(None, {0: error}) is None
    with pytest.raises(ValueError, match="^row 7 has no messages$"):
        FailAtOnce().after_exception(None, {0: error, 1: BAD})


@pytest.mark.parametrize(
    "failure",
    [
        ControllerError(BAD),
        ControllerError(in_ray(BAD)),
        WorkerGroupError("1 of 2 workers failed", {0: LOST, 1: in_ray(BAD)}),
    ],
)
def test_the_reason_is_the_value_error_behind_the_failure(failure):
    found = reason(failure)
    assert type(found) is ValueError and str(found) == "row 7 has no messages"


@pytest.mark.parametrize("failure", [ControllerError(LOST), WorkerGroupError("1 of 2 workers failed", {0: LOST})])
def test_another_failure_is_its_own_reason(failure):
    assert reason(failure) is failure


def test_ray_trains_controller_does_not_load_pytorch_for_it():
    """The controller only waits: importing the package there delayed every start by seconds."""
    assert FailAtOnce.__module__ == "aarlib.runtime.failures"
    script = "import sys, aarlib.runtime.failures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

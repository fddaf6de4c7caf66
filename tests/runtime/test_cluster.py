"""A worker group that no cluster of these nodes can ever hold is refused; one that fits is not. A local Ray finds itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

from aarlib.runtime.cluster import check_fits  # noqa: E402
from aarlib.training.config import RayConfig  # noqa: E402

SMALL, LARGE = {"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}


def ray_config(**values: object) -> RayConfig:
    return RayConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("nodes", "values"),
    [
        ([SMALL], {"num_workers": 4}),
        ([SMALL, SMALL], {"num_workers": 4, "cpus_per_worker": 2}),
        ([SMALL, LARGE], {"num_workers": 2, "use_gpu": True, "cpus_per_worker": 4}),
        ([SMALL], {"num_workers": 64, "min_workers": 2}),
    ],
)
def test_a_group_that_fits(nodes: list[dict[str, float]], values: dict[str, object]) -> None:
    check_fits(ray_config(**values), nodes)


@pytest.mark.parametrize(
    ("nodes", "values", "message"),
    [
        ([SMALL], {"num_workers": 64}, "ray.num_workers = 64 needs 64 CPU, the cluster has 4"),
        (
            [SMALL, SMALL],
            {"num_workers": 1, "cpus_per_worker": 6},
            "ray.cpus_per_worker = 6: no node has 6 CPU for one",
        ),
        ([SMALL], {"num_workers": 1, "use_gpu": True}, "needs 1 GPU, the cluster has 0"),
        ([SMALL, LARGE], {"num_workers": 1, "use_gpu": True, "cpus_per_worker": 9}, "no node has 9 CPU and 1 GPU"),
        (
            [{"CPU": 16.0}, {"CPU": 1.0, "GPU": 4.0}],
            {"num_workers": 2, "use_gpu": True, "cpus_per_worker": 2},
            "no node has 2 CPU and 1 GPU",
        ),
        ([], {"num_workers": 1}, "needs 1 CPU, the cluster has 0"),
    ],
)
def test_a_group_that_would_wait_for_ever(
    nodes: list[dict[str, float]], values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_fits(ray_config(**values), nodes)


OWN_STATE = """
import ray
from ray.util.state import get_actor
from aarlib.runtime.cluster import connect
from aarlib.training.config import RayConfig

@ray.remote(num_cpus=0)
class Actor:
    def state(self):
        return get_actor(ray.get_runtime_context().get_actor_id()).state

connect(RayConfig())
print("actor:", ray.get(Actor.remote().state.remote()))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_actors_of_a_local_ray_ask_their_own_dashboard_and_not_a_cluster_long_gone() -> None:
    """Where a killed `ray start` left its address, which is where Ray looks first."""
    with tempfile.TemporaryDirectory(
        dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # sockets allow short paths only
        gone = Path(folder, "ray", "ray_current_cluster")
        gone.parent.mkdir()
        gone.write_text("127.0.0.1:9")
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        ran = subprocess.run([sys.executable, "-c", OWN_STATE], env=environment, capture_output=True, text=True)
    assert "actor: ALIVE" in ran.stdout, ran.stderr[-2000:]

"""Threads, executed shape annotations, the session's Ray, the shared data folder; the hooks that watch skips."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's switch for a single node on loopback
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # reports are paced by it

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas  # noqa: F401  (before the hook, as the next: modules imported below a hooked one are compiled anew)
import pytest
import transformers.masking_utils
import transformers.modeling_utils  # noqa: F401
from jaxtyping import install_import_hook

import aarlib.audit.config  # noqa: F401  (before the hook: beartype refuses Self on methods)
import aarlib.lens.config  # noqa: F401  (before the hook: beartype refuses Self on methods)
import aarlib.training.config  # noqa: F401
from tests.skips import pytest_collectreport, pytest_runtest_logreport, pytest_sessionfinish  # noqa: F401  (pytest calls them)

install_import_hook(
    [f"aarlib.{name}" for name in ("moe", "aar", "audit", "fdaa", "lens", "training", "data")], "beartype.beartype"
)

ROOT = Path(__file__).parent.parent
RAY_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests with Ray share one process: they wait more than they compute. pytest-xdist reads the mark before `modifyitems`."""
    if item.get_closest_marker("ray"):
        item.add_marker(pytest.mark.xdist_group("ray"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data: $AARLIB_DATA, else ../shared/data beside the repository."""
    folder = (ROOT / os.environ.get("AARLIB_DATA", "../shared/data")).resolve()
    if not folder.is_dir():
        pytest.skip("no shared data: AARLIB_DATA names no folder")
    return folder


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Ray of 8 CPUs for the session, on loopback, with the dashboard: without it Tune leaks placement groups."""
    ray = pytest.importorskip("ray")
    from aarlib.runtime.cluster import start_local

    start_local(num_cpus=8, runtime_env={"env_vars": RAY_ENVIRONMENT})
    yield ray
    ray.shutdown()

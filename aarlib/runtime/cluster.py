"""Connecting to Ray, and what is asked of it."""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ray

from aarlib.training.config import RayConfig

logger = logging.getLogger("aarlib")

ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""report() waits for a health check (2 s by default); start-ups may be slow on a busy machine."""

DASHBOARD_VARIABLE = "RAY_API_SERVER_ADDRESS"


class HasAddress(Protocol):
    @property
    def address(self) -> str | None: ...


def connect(config: HasAddress) -> None:
    """Join the cluster at `ray.address` (or RAY_ADDRESS); without one, start a local Ray on loopback. Idempotent.

    The dashboard is on: without it Tune cannot give back the resources of finished trials.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        return
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        ray.init(address=address, log_to_driver=True)
        return
    start_local()


def start_local(**settings: Any) -> None:
    """A Ray of this process's own on loopback, which ends with it; `settings` are more of ray.init's.

    Its actors ask its dashboard which others live. They are told where it is: Ray itself looks where the last `ray start` of this
    machine left an address, which may be another cluster's or that of one long gone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = os.environ.get(DASHBOARD_VARIABLE)
    os.environ[DASHBOARD_VARIABLE] = f"http://127.0.0.1:{port}"
    try:
        ray.init(
            address="local",
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=port,
            _node_ip_address="127.0.0.1",
            log_to_driver=True,
            **settings,
        )
    finally:
        os.environ.pop(DASHBOARD_VARIABLE)
        if before is not None:
            os.environ[DASHBOARD_VARIABLE] = before


def needed(config: RayConfig) -> dict[str, float]:
    """Resources of one worker group, of the smallest where it is elastic."""
    workers = config.min_workers or config.num_workers
    resources = {"CPU": config.cpus_per_worker * workers}
    return {**resources, "GPU": float(workers)} if config.use_gpu else resources


def check_resources(config: RayConfig) -> None:
    """A ValueError where the cluster is too small for the worker group, which would otherwise wait for ever."""
    check_fits(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])


def check_fits(config: RayConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """The same for nodes with these resources: the group must fit into all of them, one worker into a single one."""
    for name, amount in needed(config).items():
        total = sum(node.get(name, 0) for node in nodes)
        if amount > total:
            raise ValueError(
                f"ray.num_workers = {config.num_workers} needs {amount:g} {name}, the cluster has {total:g}; "
                "lower ray.num_workers (or ray.cpus_per_worker), or use a larger cluster"
            )
    worker = {"CPU": config.cpus_per_worker, **({"GPU": 1.0} if config.use_gpu else {})}
    if not any(all(node.get(name, 0) >= amount for name, amount in worker.items()) for node in nodes):
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in worker.items())
        found = ", ".join(" and ".join(f"{node.get(name, 0):g} {name}" for name in worker) for node in nodes)
        raise ValueError(
            f"ray.cpus_per_worker = {config.cpus_per_worker:g}: no node has {wanted} for one worker (nodes: {found}); "
            "lower it, or use larger nodes"
        )


def concurrent_groups(config: RayConfig) -> int:
    """Worker groups that fit side by side."""
    available = ray.cluster_resources()
    return max(1, int(min(available.get(name, 0) // amount for name, amount in needed(config).items())))


def worker_environment(config: RayConfig) -> dict[str, Any]:
    """runtime_env of the workers."""
    variables = {"OMP_NUM_THREADS": str(config.threads_per_worker), "TOKENIZERS_PARALLELISM": "false"}
    if not config.use_gpu:
        variables["DS_ACCELERATOR"] = "cpu"
    return {"env_vars": variables}

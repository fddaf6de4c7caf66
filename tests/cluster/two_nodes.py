"""A head and a second raylet on this machine: `lost` loses the second in the middle, `whole` is the same training undisturbed.

Run as a process of its own by test_jobs.py: the cluster must not be the one other tests use.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from aarlib.runtime.trainer import train
from aarlib.training.config import RunConfig


def main() -> None:
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=True)
    history = Path(config.ray.storage) / config.name / "aar-seed0" / "rows.jsonl"
    threading.Thread(target=lose, args=(cluster, second, history), daemon=True).start()
    train(config)
    alive = [node for node in ray.nodes() if node["Alive"]]
    assert len(alive) == 1, alive
    train(config.updated({"name": "whole", "ray.num_workers": 1}))
    ray.shutdown()
    cluster.shutdown()


def lose(cluster: Any, node: Any, history: Path) -> None:
    """Kill the raylet and its processes past the first checkpoint (every 3 steps), before the second is due."""
    while not history.is_file() or len(history.read_text().splitlines()) < 5:
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    main()

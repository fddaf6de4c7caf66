"""A head without CPUs and a node that sees none of its folders: train, sweep and evaluate through an object store.

Run as a process of its own by test_jobs.py. The node is a second raylet on this machine with another folder for working copies.
"""

import os
import sys
from pathlib import Path

import ray
from ray import tune
from ray.cluster_utils import Cluster

from aarlib.runtime.evaluation import evaluate
from aarlib.runtime.run_directory import held
from aarlib.runtime.storage import SCRATCH
from aarlib.runtime.sweep import sweep
from aarlib.runtime.trainer import train
from aarlib.runtime.tune_study import Study
from aarlib.training.config import RunConfig


def main() -> None:
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    os.environ[SCRATCH] = sys.argv[2]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=2, env_vars={SCRATCH: sys.argv[3]})
    ray.init(address=cluster.address, log_to_driver=True)
    train(config)
    study = Study(space={"method.aar.window": tune.grid_search([2, 8])}, fixed={"ray.num_workers": 1})
    trials = sweep(config, study, "window").sweep.trials
    assert trials["status"].tolist() == ["finished", "finished"], trials
    with held(config):
        scores = evaluate(config).scores
    assert set(scores["adapter"]) == {"untouched", "aar-seed0"}, scores
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()

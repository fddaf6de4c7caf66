"""FDAA: how strong the two penalties (the paper gives no lambda), and which layer. Layers fit the bundled nano model."""

from ray import tune

from aarlib.runtime.tune_study import Study

STUDY = Study(
    space={
        "method.fdaa.kl_weight": tune.grid_search([0.0, 0.01, 0.1]),
        "method.fdaa.score_weight": tune.grid_search([0.0, 1e-4]),
        "method.fdaa.layers": tune.grid_search([(3,), (7,)]),
    },
    fixed={"ray.num_workers": 1, "optim.max_steps": 60},
)

"""AAR: how long a window, and which layers (AAR paper, section 4.4). Layer subsets fit the bundled nano model of 8 layers."""

from ray import tune

from aarlib.runtime.tune_study import Study

STUDY = Study(
    space={
        "method.aar.window": tune.grid_search([8, 32]),
        "method.aar.layers": tune.grid_search([(4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7)]),
    },
    fixed={"ray.num_workers": 1, "optim.max_steps": 12},
)

"""AAR: which views of the window, and how the trained part starts (AAR paper, sections 3.2 and 4.4); two seeds each."""

from ray import tune

from aarlib.runtime.tune_study import Study

STUDY = Study(
    space={
        "method.aar.views": tune.grid_search([("time",), ("spectrum",), ("time", "spectrum")]),
        "method.aar.init": tune.grid_search(["default", "closed"]),
    },
    fixed={"ray.num_workers": 1, "optim.max_steps": 12},
    seeds=(0, 1),
)

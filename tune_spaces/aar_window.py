"""AAR: how long a window (AAR paper, section 4.4), by Optuna with early stopping: 12 trials, an hour at most."""

from ray import tune

from aarlib.runtime.tune_study import Study, asha, optuna

STUDY = Study(
    space={"method.aar.window": tune.randint(4, 65)},
    fixed={"ray.num_workers": 1, "ray.checkpoint_every": 4, "optim.max_steps": 12},
    num_samples=12,
    scheduler=asha(grace_steps=4),
    search=optuna(),
    time_budget_s=3600,
)

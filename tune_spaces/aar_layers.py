"""AAR: which layers (AAR paper, section 4.4). Runs of neighbouring layers: from a start layer to the last, and shorter ones."""

from typing import Any

from ray import tune

from aarlib.runtime.tune_study import Study, asha


def contiguous(layers: tuple[int, ...]) -> dict[str, Any]:
    """From every second start to the end, and each quarter and half of the layers that have attention weights."""
    size = len(layers)
    to_the_end = [layers[start:] for start in range(0, size, 2)]
    parts = [
        layers[start : start + length]
        for length in {max(1, size // 4), max(1, size // 2)}
        for start in range(0, size, length)
    ]
    return {"method.aar.layers": tune.grid_search(list(dict.fromkeys(to_the_end + parts)))}


STUDY = Study(
    space_from_layers=contiguous,
    fixed={"ray.num_workers": 1, "ray.checkpoint_every": 4, "optim.max_steps": 12},
    scheduler=asha(grace_steps=4),
    time_budget_s=3600,
)

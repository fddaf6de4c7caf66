"""What a sweep is told: the config paths it varies, its budget, its scheduler and searcher, and the config of each trial."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ray.tune.search.sample import Domain

from aarlib.runtime.plan import plan
from aarlib.training.config import RunConfig

REORDERING = ("optim.epochs", "optim.global_batch", "optim.max_steps")


@dataclass(frozen=True)
class Study:
    """A search space over config paths, and its budget."""

    space: Mapping[str, Any] = field(default_factory=dict)
    """Dotted config path -> Tune search space (`tune.grid_search`, `tune.choice`, ...). Methods it does not name are left out."""
    space_from_layers: Callable[[tuple[int, ...]], Mapping[str, Any]] | None = None
    """Makes more of the space from the layers at which AAR can be attached to the config's model."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Dotted config path -> value of every trial: the budget (`optim.max_steps`), workers a trial (`ray.num_workers`)."""
    seeds: tuple[int, ...] | None = None
    """Seeds of every trial; None: the config's first. The score is the mean over them."""
    num_samples: int = 1
    """Draws; each repeats the whole grid."""
    scheduler: Callable[[], Any] | None = None
    """Makes a Tune scheduler, such as `asha(...)`; workers report step, train/ce and held_out/ce at every checkpoint."""
    search: Callable[[], Any] | None = None
    """Makes a Tune searcher, such as `optuna(...)`."""
    time_budget_s: float | None = None

    def record(self) -> dict[str, Any]:
        """What identifies the study: a sweep is taken up again by the same one only."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.loads(json.dumps(values, default=_description, sort_keys=True))


def asha(grace_steps: int, reduction_factor: int = 3) -> Callable[[], Any]:
    """Asynchronous successive halving on held-out CE: of every `reduction_factor` trials at a rung the best goes on."""
    from ray.tune.schedulers import ASHAScheduler

    never = 1 << 30
    return partial(
        ASHAScheduler, time_attr="step", grace_period=grace_steps, reduction_factor=reduction_factor, max_t=never
    )


def optuna(seed: int = 0) -> Callable[[], Any]:
    """Optuna's tree-structured Parzen estimator."""
    from ray.tune.search.optuna import OptunaSearch

    return partial(OptunaSearch, seed=seed)


def _description(value: Any) -> str:
    """Of a search-space domain, a scheduler or a searcher: what it is and what it may give, without addresses."""
    if isinstance(value, partial):
        return f"{value.func.__name__}({value.keywords})"
    if isinstance(value, Domain):
        return f"{type(value).__name__} {value.domain_str} by {type(value.get_sampler()).__name__}"
    return getattr(value, "__qualname__", type(value).__qualname__)


def resolved(study: Study, config: RunConfig) -> Study:
    """The study with the space that it has for this config's model."""
    if study.space_from_layers is None:
        return study
    layers = plan(config).attention_layers
    return replace(study, space={**study.space, **study.space_from_layers(layers)}, space_from_layers=None)


def check_space(config: RunConfig, study: Study, name: str) -> None:
    """Every listed value of every path as a trial's config, one draw where it is drawn from. A ValueError names the path."""
    values = {path: _values(domain) for path, domain in study.space.items()}
    if not values:
        raise ValueError(f"the study {name!r} varies nothing; give its space at least one config path")
    first = {path: listed[0] for path, listed in values.items()}
    for path, listed in values.items():
        for value in listed:
            try:
                trial_config(config, study, {**first, path: value}, f"{config.name}-{name}")
            except ValueError as error:
                raise ValueError(f"the study {name!r} with {path} = {value!r}: {error}") from None


def _values(domain: Any) -> list[Any]:
    if isinstance(domain, Mapping):
        return list(domain["grid_search"]) if "grid_search" in domain else [domain]
    categories = getattr(domain, "categories", None)
    if categories is not None:
        return list(categories)
    return [domain.sample() if hasattr(domain, "sample") else domain]


def trial_config(config: RunConfig, study: Study, params: Mapping[str, Any], name: str) -> RunConfig:
    """The config of one trial: the study's fixed values, then `params`; only the methods that the study varies."""
    varied = {path.split(".")[1] for path in study.space if path.startswith("method.")}
    unknown = varied - set(config.method)
    if unknown:
        raise ValueError(
            f"the study varies method {sorted(unknown)}, which the config has not; it has {sorted(config.method)}"
        )
    methods = {label: method for label, method in config.method.items() if not varied or label in varied}
    restricted = config.model_copy(update={"method": methods, "seeds": study.seeds or config.seeds[:1]})
    reporting = {"ray.evaluate_at_checkpoints": True} if study.scheduler or study.search else {}
    return restricted.updated({**reporting, **study.fixed, **params, "name": name})


def leaves_rows_alone(path: str) -> bool:
    """Whether trials that differ in `path` train on the same rows in the same order."""
    return path.startswith(("method.", "optim.")) and path not in REORDERING

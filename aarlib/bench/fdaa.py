"""`bench fdaa`: what the frozen prefix, its cache and a population of heads save, on `mid`.

The head acts at the last layer; a call is the forward and backward of one training step (the optimizer of 0.3M parameters is left
out).
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aarlib.bench.claims import Equal, Part, apart, equal, peaks
from aarlib.bench.measure import measure, mid_model
from aarlib.bench.process import run_job
from aarlib.fdaa.attach import AggregationHandle
from aarlib.fdaa.config import FDAAConfig
from aarlib.training.aggregation import PREFIX, AggregationMethod, penalties
from aarlib.training.objectives import next_token_ce
from aarlib.training.prefix import FrozenPrefix, ResidualCache

LAYER = 7
TARGETS = {
    "tokens/s of the first pass / full backward": 1.5,
    "tokens/s of a cached pass / full backward": 4.0,
    "cost of eight heads on one pass / one head": 2.8,
}
"""At least; at least; at most."""
TOLERANCE = 1e-5


class Settings(NamedTuple):
    rows: int = 4
    length: int = 256
    num_heads: int = 1
    shape: Mapping[str, int] = {}
    """Changes to `mid`."""


class Case(NamedTuple):
    model: Any
    methods: list[AggregationMethod]
    handles: list[AggregationHandle]
    batch: dict[str, Tensor]


def run(settings: Settings, threads: int = 1, repeats: int = 5) -> Iterator[Part]:
    """Every claim, each variant in a process of its own; equal gradients are asserted first."""
    small = settings._replace(rows=min(settings.rows, 2), length=min(settings.length, 64), num_heads=2)
    checked = run_job("aarlib.bench.fdaa:check", small._asdict(), threads)
    yield Part("equal", [Equal(*item) for item in checked])
    values, eight = settings._asdict(), settings._replace(num_heads=8)._asdict()
    found = {
        name: measure(f"aarlib.bench.fdaa:{name}", values, threads, repeats)
        for name in ("full_backward", "first_pass", "cached_pass")
    }
    found["eight_heads"] = measure("aarlib.bench.fdaa:first_pass", eight, threads, repeats)
    tokens = settings.rows * settings.length
    claims = [
        apart(label, found[above], found[below], target=TARGETS[label], at_least=at_least)
        for label, above, below, at_least in (
            ("tokens/s of the first pass / full backward", "full_backward", "first_pass", True),
            ("tokens/s of a cached pass / full backward", "full_backward", "cached_pass", True),
            ("cost of eight heads on one pass / one head", "eight_heads", "first_pass", False),
        )
    ]
    details = {
        name: {**item._asdict(), "tokens_per_second": tokens / item.median_s, "tokens": tokens}
        for name, item in found.items()
    }
    yield Part("passes", claims=[*claims, *peaks(found)], details=details)


def check(**settings: Any) -> list[Equal]:
    """Every way and every head gives the gradients of a full backward of that head alone (1e-5 of the largest)."""
    case = make(Settings(**settings))
    expected = [
        _gradients(case, index, lambda index=index: full_step(case, index)) for index in range(len(case.handles))
    ]
    checked = []
    with tempfile.TemporaryDirectory() as folder:
        frozen = FrozenPrefix(case.handles[0].anatomy, LAYER, ResidualCache(Path(folder), 1 << 30))
        for name in ("first pass", "stored", "cached"):
            prefix = frozen if name != "first pass" else FrozenPrefix(case.handles[0].anatomy, LAYER)
            for index, theirs in enumerate(expected):
                ours = _gradients(case, index, lambda prefix=prefix: prefix_step(case, prefix))
                what = f"gradients of head {index}, {name} and full backward"
                worst = [equal(what, *pair, TOLERANCE) for pair in zip(ours, theirs, strict=True)]
                checked.append(max(worst, key=lambda item: item.error))
        assert frozen.num_cached >= 1
    return checked


def full_backward(**settings: Any) -> Callable[[], None]:
    """The plain way: a graph through the whole model."""
    case = make(Settings(**settings))
    return lambda: full_step(case)


def first_pass(**settings: Any) -> Callable[[], None]:
    """The prefix without a graph, once for all heads; then each head, the last layer's sum and the loss."""
    case = make(Settings(**settings))
    frozen = FrozenPrefix(case.handles[0].anatomy, LAYER)
    return lambda: prefix_step(case, frozen)


def cached_pass(**settings: Any) -> Callable[[], None]:
    """As a later epoch: the residual stream comes from disk."""
    case = make(Settings(**settings))
    folder = Path(tempfile.mkdtemp())
    frozen = FrozenPrefix(case.handles[0].anatomy, LAYER, ResidualCache(folder, 1 << 30))
    prefix_step(case, frozen)
    return lambda: prefix_step(case, frozen)


def make(settings: Settings) -> Case:
    model = mid_model(**dict(settings.shape))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (settings.rows, settings.length), generator=generator)
    methods = [AggregationMethod(FDAAConfig(layers=(LAYER,)), seed) for seed in range(settings.num_heads)]
    handles = []
    for method in methods:
        handles.append(method.attach(model))
        with torch.no_grad():
            handles[-1].head.score.weight.normal_(std=0.1, generator=generator)
        handles[-1].enabled = False
    return Case(model, methods, handles, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})


def full_step(case: Case, index: int = 0) -> None:
    handle, config = case.handles[index], case.methods[index].config
    handle.enabled = True
    embeddings = case.model.get_input_embeddings()(case.batch["input_ids"]).requires_grad_()
    with handle.scoring() as scored:
        ce_sum_B, _ = next_token_ce(case.model, {**case.batch, "inputs_embeds": embeddings})
    kl_sum, square_sum = penalties(scored[LAYER], case.batch["labels"])
    (ce_sum_B.sum() + config.kl_weight * kl_sum + config.score_weight * square_sum).backward()
    handle.enabled = False


def prefix_step(case: Case, frozen: FrozenPrefix) -> None:
    row_ids = [str(row) for row in range(len(case.batch["input_ids"]))]
    batch = {**case.batch, PREFIX: frozen(case.batch, LAYER, row_ids)}
    for method, handle in zip(case.methods, case.handles, strict=True):
        handle.enabled = True
        torch.stack([term.sum for term in method.loss(case.model, batch, 0).values()]).sum().backward()
        handle.enabled = False


def _gradients(case: Case, index: int, step: Callable[[], None]) -> list[Tensor]:
    case.handles[index].module.zero_grad()
    step()
    found = [parameter.grad for _, parameter in case.handles[index].trainable()]
    if any(gradient is None for gradient in found) or not any(bool((g != 0).any()) for g in found if g is not None):
        raise RuntimeError(f"head {index} has no gradient; the comparison would show nothing")
    return [gradient.clone() for gradient in found if gradient is not None]

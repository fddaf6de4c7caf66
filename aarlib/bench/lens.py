"""Bench of the lens on `mid`: what decompositions add to a plain forward, and against hooks and loops. Equal numbers first."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aarlib.bench.claims import Claim, Equal, Part, apart, peaks, within
from aarlib.bench.lens_loops import Variances, looped, looped_layers
from aarlib.bench.measure import Measurement, measure, mid_model
from aarlib.bench.process import run_job
from aarlib.lens.influence import all_neuron_sums, expert_sums, head_sums, layer_sums
from aarlib.lens.neurons import NeuronConstants
from aarlib.lens.projection import Projection
from aarlib.lens.scores import read
from aarlib.moe.anatomy import anatomy

LENGTH, BATCH = 32, 32
BY_LAYER, FINER = "by layer for all receivers", "heads, experts and neurons"
TARGETS = {
    f"{BY_LAYER}, added / decoder forward": 0.6,
    f"{FINER}, added / decoder forward": 2.5,
    "loops / folded": 5.0,
    "peak": 3.0,
}
"""At most; at most; at least; GiB of a process at most: 0.5 of weights, and the captures and products of 32 documents."""
TOLERANCE = 1e-4
CHECKED_LAYERS = 4
"""Receivers of the model on which the two ways are compared; its width is that of the model that is timed."""
LEVELS = ("layer", "head", "expert", "neuron")


class Settings(NamedTuple):
    documents: int = 256
    looped_documents: int = 32
    """Loops and folded both run on these."""
    shape: Mapping[str, int] = {}
    """Changes to `mid`."""


def batches(documents: int, vocab_size: int = 8192) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(1, vocab_size, (documents, LENGTH), generator=generator).split(BATCH))


def run(settings: Settings, threads: int = 1, repeats: int = 5) -> Iterator[Part]:
    """Added time over plain time; loops against folded without the forward, which both need. Equal numbers first.

    Ours runs the decoder and no output layer, so what it adds is counted from a plain forward of the decoder; beside it, the same
    over a plain forward of the whole model.
    """
    shape = {**settings.shape, "num_hidden_layers": CHECKED_LAYERS}
    yield Part("equal", [Equal(*item) for item in run_job("aarlib.bench.lens:check", {"shape": shape}, threads)])
    variants = {
        "decoder forward": ("plain_decoder", settings.documents),
        "whole forward": ("plain", settings.documents),
        BY_LAYER: ("by_layer", settings.documents),
        FINER: ("finer", settings.documents),
        "decoder forward, few": ("plain_decoder", settings.looped_documents),
        "whole forward, few": ("plain", settings.looped_documents),
        "folded, few": ("finer", settings.looped_documents),
        "loops, few": ("loops", settings.looped_documents),
    }
    found = {
        name: measure(
            f"aarlib.bench.lens:{variant}", {"documents": count, "shape": dict(settings.shape)}, threads, repeats
        )
        for name, (variant, count) in variants.items()
    }
    claims = [_added(name, found[name], found["decoder forward"]) for name in (BY_LAYER, FINER)]
    claims += [
        _beside(name, found[name], found["decoder forward"], found["whole forward"]) for name in (BY_LAYER, FINER)
    ]
    claims.append(
        _faster(found["loops, few"], found["folded, few"], found["whole forward, few"], found["decoder forward, few"])
    )
    held = [
        claim._replace(target=TARGETS["peak"]) for claim in peaks({name: found[name] for name in (BY_LAYER, FINER)})
    ]
    details = {name: item._asdict() for name, item in found.items()}
    yield Part("decompositions", claims=[*claims, *held, *peaks({"loops": found["loops, few"]})], details=details)


def _added(name: str, ours: Measurement, decoder: Measurement) -> Claim:
    """(ours - decoder) / decoder; ours holds a forward of the decoder."""
    name = f"{name}, added / decoder forward"
    found = apart(name, ours, decoder, target=TARGETS[name])
    cpu = None if found.cpu is None else found.cpu - 1
    return found._replace(value=found.value - 1, low=found.low - 1, high=found.high - 1, cpu=cpu)


def _beside(name: str, ours: Measurement, decoder: Measurement, whole: Measurement) -> Claim:
    """(ours - decoder) / whole: the added time against a forward that ends with logits."""
    added, plain = ours.median_s - decoder.median_s, whole.median_s
    low, high = (ours.min_s - decoder.median_s) / whole.max_s, (ours.max_s - decoder.median_s) / whole.min_s
    cpu = (ours.cpu_s - decoder.cpu_s) / whole.cpu_s
    return Claim(f"{name}, added / whole forward", added / plain, low, high, cpu)


def _faster(loops: Measurement, folded: Measurement, whole: Measurement, decoder: Measurement) -> Claim:
    """(loops - whole) / (folded - decoder), at the medians: each way without the forward that it holds; from the extremes of each
    way over the median forwards."""
    loop, ours = loops.median_s - whole.median_s, folded.median_s - decoder.median_s
    value = loop / ours
    low = (loops.min_s - whole.median_s) / (folded.max_s - decoder.median_s)
    high = (loops.max_s - whole.median_s) / (folded.min_s - decoder.median_s)
    cpu = (loops.cpu_s - whole.cpu_s) / (folded.cpu_s - decoder.cpu_s)
    return Claim("loops / folded", value, low, high, cpu, target=TARGETS["loops / folded"], at_least=True)


class _Case(NamedTuple):
    model: Any
    rows: list[Tensor]


def _case(documents: int, shape: Mapping[str, int]) -> _Case:
    model = mid_model(**shape)
    return _Case(model, batches(documents, model.config.vocab_size))


def plain(documents: int, shape: Mapping[str, int]) -> Callable[[], None]:
    model, rows = _case(documents, shape)

    def run() -> None:
        with torch.no_grad():
            for ids in rows:
                model(input_ids=ids, use_cache=False)

    return run


def plain_decoder(documents: int, shape: Mapping[str, int]) -> Callable[[], None]:
    """Without the output layer, as `read` runs it."""
    model, rows = _case(documents, shape)

    def run() -> None:
        with torch.no_grad():
            for ids in rows:
                model.get_decoder()(input_ids=ids, use_cache=False)

    return run


def by_layer(documents: int, shape: Mapping[str, int]) -> Callable[[], None]:
    model, rows = _case(documents, shape)
    projection = Projection(anatomy(model))

    def run() -> None:
        for ids in rows:
            layer_sums(read(model, projection, ids))

    return run


def finer(documents: int, shape: Mapping[str, int]) -> Callable[[], None]:
    """Constants and folded matrices are made once for a model, in the warm-up."""
    model, rows = _case(documents, shape)
    projection = Projection(anatomy(model))
    constants = NeuronConstants(projection)

    def run() -> None:
        for ids in rows:
            reading = read(model, projection, ids)
            head_sums(reading)
            expert_sums(reading)
            all_neuron_sums(reading, constants)

    return run


def loops(documents: int, shape: Mapping[str, int]) -> Callable[[], None]:
    model, rows = _case(documents, shape)

    def run() -> None:
        for ids in rows:
            looped(model, ids)

    return run


def folded(model: Any, ids: Tensor) -> Variances:
    projection = Projection(anatomy(model))
    reading = read(model, projection, ids)
    sums = (layer_sums(reading), head_sums(reading), expert_sums(reading), all_neuron_sums(reading))
    return {name: item.all[:, index, :, 0].sum(0) for item in sums for index, name in enumerate(item.senders)}


def check(shape: Mapping[str, int]) -> list[Equal]:
    """As the job that `run` starts with."""
    model, rows = _case(2, shape)
    return equal_numbers(model, rows[0])


def equal_numbers(model: Any, ids: Tensor) -> list[Equal]:
    """Variance sums of all components at all receivers, folded against looped, of the largest of their level and receiver."""
    expected, found = looped(model, ids) | looped_layers(model, ids), folded(model, ids)
    if set(expected) != set(found):
        raise RuntimeError(f"components differ: {sorted(set(expected) ^ set(found))[:3]}")
    checked = []
    for level in LEVELS:
        names = [name for name in expected if level_of(name) == level]
        ours, theirs = (torch.stack([side[name] for name in names]) for side in (found, expected))
        if not torch.equal(ours.isnan(), theirs.isnan()):
            raise RuntimeError(f"variances by {level}: other senders reach the receivers")
        for receiver in range(theirs.shape[1]):
            one, other = ours[:, receiver].nan_to_num(0.0), theirs[:, receiver].nan_to_num(0.0)
            if float(other.max()) > 0:
                error = float((one - other).abs().max() / other.max())
                checked.append(within(f"variances by {level} at receiver {receiver}", error, TOLERANCE))
    return checked


def level_of(name: str) -> str:
    pieces = name.split(".")
    return pieces[-2] if len(pieces) > 2 else "layer"

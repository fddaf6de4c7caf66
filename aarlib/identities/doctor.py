"""The identities run on one model of the user's: its dtype, its device, its adapter. Each gives a finding as soon as it is done.

float32: the tolerances of the tests, max|a - b| / max(1, max|b|). 16-bit: rounding moves a token across a top-k boundary now and
then, which no small maximum survives, so the error is the relative norm |a - b| / |b|, and its bound is stated below or is twice
what the stock model itself shows in the same comparison, whichever is larger.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.identities import routing
from aarlib.identities.routing import Inputs, error, relative_norm
from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family

STOCK_FACTOR = 2.0


class Bound(NamedTuple):
    float32: float
    half: float
    """bfloat16 and float16."""


class Finding(NamedTuple):
    name: str
    error: float
    bound: float
    stock: float | None
    """The same comparison without attention-aware routers, where there is one and the dtype rounds."""
    note: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


class Patient(NamedTuple):
    model: Any
    attach: Callable[[Any], RoutingHandle]
    inputs: Inputs
    window: int
    half: bool
    family: Family | None

    @property
    def measure(self) -> Callable[[Tensor, Tensor], float]:
        return relative_norm if self.half else error


class Outcome(NamedTuple):
    error: float
    stock: float | None = None
    note: str = ""


class Identity(NamedTuple):
    name: str
    bound: Bound
    run: Callable[[Patient], Outcome]


def examine(
    model: Any,
    attach: Callable[[Any], RoutingHandle] | None = None,
    window: int = 20,
    length: int = 48,
    seed: int = 0,
    family: Family | None = None,
) -> Iterator[Finding]:
    """Run every identity on `model`, which carries no handle and is left as it was. `attach` puts on the routers to be examined
    (default: attention-aware ones, randomised at O(1), on the last half of the layers that allow them). `family`: a row of your
    own, for a model whose family is not in the table."""
    dtype = model.get_input_embeddings().weight.dtype
    patient = Patient(
        model,
        attach or (lambda stock: routing.default_attach(stock, window=window, family=family)),
        random_inputs(model, length, seed),
        window,
        dtype in (torch.bfloat16, torch.float16),
        family,
    )
    for identity in IDENTITIES:
        start = time.perf_counter()
        outcome = identity.run(patient)
        bound = identity.bound.half if patient.half else identity.bound.float32
        if patient.half and outcome.stock is not None:
            bound = max(bound, STOCK_FACTOR * outcome.stock)
        seconds = time.perf_counter() - start
        yield Finding(identity.name, outcome.error, bound, outcome.stock, outcome.note, seconds)


def random_inputs(model: Any, length: int, seed: int) -> Inputs:
    """Two rows of random tokens, the second left-padded by a quarter."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, : length // 4] = 0
    device = model.get_input_embeddings().weight.device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _attached(patient: Patient, run: Callable[[RoutingHandle], float]) -> float:
    handle = patient.attach(patient.model)
    try:
        return run(handle)
    finally:
        handle.detach()


def _both(patient: Patient, run: Callable[[], float]) -> Outcome:
    """Patched, and in 16-bit the stock model beside it."""
    stock = run() if patient.half else None
    return Outcome(_attached(patient, lambda _: run()), stock)


def _disabled(patient: Patient) -> Outcome:
    return Outcome(routing.disabled_is_stock(patient.model, patient.attach, patient.inputs))


def _bites(patient: Patient) -> Outcome:
    """The error is 0 where the routers change the model's logits, infinite where they change nothing."""
    handle = patient.attach(patient.model)
    bite = routing.bite(patient.model, handle, patient.inputs)
    handle.detach()
    note = f"{bite.picks_changed:.0%} of picks change, logits move by {bite.logits_moved:.2g}"
    return Outcome(0.0 if bite.logits_moved > 1e-2 else float("inf"), None, note)


def _selection(patient: Patient) -> Outcome:
    return Outcome(routing.selection_against_gate(patient.model, patient.inputs, patient.family))


def _expert_sum(patient: Patient) -> Outcome:
    return Outcome(routing.expert_sum_against_block(patient.model, patient.inputs, patient.family, patient.measure))


def _windows(patient: Patient) -> Outcome:
    arguments = (patient.model, patient.window, patient.inputs, patient.family, patient.measure)
    return Outcome(routing.windows_against_eager(*arguments))


def _logits(patient: Patient) -> Outcome:
    stock = None
    if patient.half:
        stock = routing.stock_against_eager(patient.model, patient.inputs, patient.measure)

    def run(handle: RoutingHandle) -> float:
        return routing.logits_against_eager(patient.model, handle, patient.inputs, patient.measure)

    return Outcome(_attached(patient, run), stock)


def _gradients(patient: Patient) -> Outcome:
    def run(handle: RoutingHandle) -> float:
        return routing.gradients_against_eager(patient.model, handle, patient.inputs, patient.measure)

    stock = None
    if patient.half:
        plain = attach_aar(patient.model, RouterSFTConfig(), family=patient.family)
        stock = run(plain)
        plain.detach()
    return Outcome(_attached(patient, run), stock)


def _decode(patient: Patient) -> Outcome:
    chunk = max(1, patient.inputs["input_ids"].shape[1] // 5)
    return _both(
        patient,
        lambda: routing.prefill_against_decode(patient.model, patient.inputs, chunk, patient.measure),
    )


def _batch(patient: Patient) -> Outcome:
    return _both(patient, lambda: routing.batch_against_single(patient.model, patient.inputs, patient.measure))


def _packed(patient: Patient) -> Outcome:
    if any(layer.linear_attention is not None for layer in anatomy(patient.model, patient.family).layers):
        return Outcome(0.0, None, "not run: linear attention, for which packing is refused")
    ids = patient.inputs["input_ids"][:1]
    third = ids.shape[1] // 3
    lengths = [third, third // 2, ids.shape[1] - third - third // 2]
    return _both(
        patient,
        lambda: routing.packed_against_single(patient.model, ids, lengths, patient.family, patient.measure),
    )


IDENTITIES: tuple[Identity, ...] = (
    Identity("disabled and detached == stock model", Bound(0.0, 0.0), _disabled),
    Identity("the routers change the model", Bound(0.0, 0.0), _bites),
    Identity("selection == the model's own gate", Bound(0.0, 0.0), _selection),
    Identity("sum of weighted expert outputs == experts", Bound(1e-6, 2e-2), _expert_sum),
    Identity("windows == eager attention weights", Bound(1e-5, 5e-2), _windows),
    Identity("logits == with eager attention", Bound(1e-5, 1e-1), _logits),
    Identity("gradients == with eager attention", Bound(1e-5, 2e-1), _gradients),
    Identity("prefill == chunks through the KV cache", Bound(1e-5, 1e-1), _decode),
    Identity("left-padded batch == row by row", Bound(1e-5, 1e-1), _batch),
    Identity("packed documents == each alone", Bound(1e-5, 1e-1), _packed),
)


def aware_attach(layers: tuple[int, ...], window: int, seed: int = 0) -> Callable[[Any], RoutingHandle]:
    """Attention-aware routers on chosen layers, randomised at O(1)."""

    def attach(model: Any) -> RoutingHandle:
        handle = attach_aar(model, AARConfig(layers=layers, window=window), seed=seed)
        routing.randomise(handle, seed)
        return handle

    return attach


def header() -> str:
    return f"{'identity':<44} {'error':>9} {'bound':>9} {'stock':>9}  result"


def line(finding: Finding) -> str:
    stock = "" if finding.stock is None else f"{finding.stock:.1e}"
    verdict = "ok" if finding.passed else "FAILED"
    note = f"  ({finding.note})" if finding.note else ""
    return f"{finding.name:<44} {finding.error:>9.1e} {finding.bound:>9.1e} {stock:>9}  {verdict} {finding.seconds:.1f} s{note}"

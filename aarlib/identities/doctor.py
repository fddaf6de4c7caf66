"""The identities run on one model of the user's: its dtype, its device, its adapter. Each gives a finding as soon as it is done.

float32: the tolerances of the tests, max|a - b| / max(1, max|b|). 16-bit: rounding moves a token across a top-k boundary now and
then, which no small maximum survives, so the error is the relative norm |a - b| / |b|, and its bound is stated in `checks` or is
twice what the stock model itself shows in the same comparison, whichever is larger.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.aar.config import AARConfig
from aarlib.identities import routing
from aarlib.identities.checks import IDENTITIES, Patient
from aarlib.identities.routing import Inputs
from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family

LENGTH, MOST_LENGTH = 48, 700
"""Tokens of a row: unless told, and at most to get past a sliding range."""
STOCK_FACTOR = 2.0


class Finding(NamedTuple):
    name: str
    error: float
    bound: float
    stock: float | None
    """The same comparison without attention-aware routers, where there is one and the dtype rounds."""
    note: str
    seconds: float
    applies: bool
    """False where the model has nothing to examine; the note says why, and it passes."""

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def examine(
    model: Any,
    attach: Callable[[Any], RoutingHandle] | None = None,
    window: int = 20,
    length: int | None = None,
    seed: int = 0,
    family: Family | None = None,
) -> Iterator[Finding]:
    """Run every identity on `model`, which carries no handle and is left as it was. `attach` puts on the routers to be examined
    (default: attention-aware ones, randomised at O(1), on the last half of the layers that allow them). `length`: tokens of a row
    (default: `examined_length`). `family`: a row of your own, for a model whose family is not in the table."""
    dtype = model.get_input_embeddings().weight.dtype
    patient = Patient(
        model,
        attach or (lambda stock: routing.default_attach(stock, window=window, family=family)),
        random_inputs(model, examined_length(model, family) if length is None else length, seed),
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
        yield Finding(identity.name, outcome.error, bound, outcome.stock, outcome.note, seconds, outcome.applies)


def examined_length(model: Any, family: Family | None = None) -> int:
    """48, or more where that takes both rows, the padded one too, past a sliding range of up to 512 tokens."""
    reach = anatomy(model, family).sliding_range or 0
    needed = 4 * (reach + 16) // 3
    return needed if LENGTH < needed <= MOST_LENGTH else LENGTH


def random_inputs(model: Any, length: int, seed: int) -> Inputs:
    """Two rows of random tokens, the second left-padded by a quarter."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, : length // 4] = 0
    device = model.get_input_embeddings().weight.device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


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
    verdict = "--" if not finding.applies else "ok" if finding.passed else "FAILED"
    note = f"  ({finding.note})" if finding.note else ""
    return f"{finding.name:<44} {finding.error:>9.1e} {finding.bound:>9.1e} {stock:>9}  {verdict} {finding.seconds:.1f} s{note}"

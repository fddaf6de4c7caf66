"""The parts of one run on a GPU with the core alone: OLMoE-1B-7B from its config with random weights; steps of three ways.

Share of the measured matmul rate: FLOPs are 2 a parameter and token for the forward and as many for the input gradients, over
the active parameters (the embeddings' look-up not counted), divided by the step's time and the rate of one large matmul in the
same dtype. Runs on a CPU as well, at small sizes. It has not been run on a GPU.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aarlib.aar.attach import attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.bench.claims import Claim, Equal, Part, paired, within
from aarlib.bench.plain import PlainAAR, cut
from aarlib.bench.process import GIB, Turns
from aarlib.bench.train import GRADIENT_TOLERANCE, LEARNING_RATE, LOSS_TOLERANCE, Stepper, rows_of
from aarlib.moe.anatomy import active_parameters
from aarlib.moe.loading import freeze
from aarlib.moe.record import record

AAR_TARGET = 1.10
"""AAR step over routing-only step."""
RATE_TARGET = 0.35
"""Share of the measured matmul rate."""


class StepRow(NamedTuple):
    way: str
    length: int
    batch: int
    turns: Turns
    """Empty: out of memory."""
    tokens_per_second: float | None
    peak_gib: float | None
    rate_share: float | None


def build(config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """The frozen model of a transformers config, with random weights drawn on the device."""
    config.dtype = dtype
    torch.manual_seed(seed)
    with torch.device(device), default_dtype(dtype):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    freeze(model)
    model.set_experts_implementation("grouped_mm")
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square matmul, median of 10."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, 10, device).seconds


def seconds_of(call: Callable[[], Any], repeats: int, device: torch.device) -> Turns:
    """Of each call, after two warm-ups."""
    turns = Turns([], [])
    for index in range(repeats + 2):
        synchronise(device)
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        synchronise(device)
        if index >= 2:
            turns.wall.append(time.perf_counter() - wall)
            turns.cpu.append(time.process_time() - cpu)
    return turns


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def equal_numbers(model: Any, layers: tuple[int, ...], window: int, length: int = 128) -> list[Equal]:
    """Before anything is timed: disabled is stock, bit for bit, in the model's dtype; in float32, windows against eager attention
    weights, first loss and router gradients against the plain way's. The model's dtype is given back."""
    dtype, device = model.get_input_embeddings().weight.dtype, model.get_input_embeddings().weight.device
    ids = rows_of(model, 1, length).to(device)
    config = AARConfig(layers=layers, window=window)
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False).logits
        handle = attach_aar(model, config, seed=0)
        moved = float((model(input_ids=ids, use_cache=False).logits - stock).abs().max())
        handle.enabled = False
        disabled = float((model(input_ids=ids, use_cache=False).logits - stock).abs().max())
    handle.detach()
    if not moved > 0:
        raise RuntimeError("attention-aware routers change no logit; the comparison would show nothing")
    checked = [within(f"disabled and stock logits in {dtype}", disabled, 0.0)]
    try:
        return checked + _against_eager(model.to(torch.float32), config, ids)
    finally:
        model.to(dtype)


def _against_eager(model: Any, config: AARConfig, ids: Tensor) -> list[Equal]:
    stepper = Stepper(model, config, ids)
    loss, found = stepper.gradients()
    stepper.handle.detach()
    worst = _windows_apart(model, config, ids)
    with plain_trainee(model, config) as trainee:
        first = trainee(ids, ids)["loss"]
        first.backward()
        expected = {name: p.grad for name, p in trainee.routers.named_parameters() if p.grad is not None}
    if set(expected) != set(found):
        raise RuntimeError(f"other parameters are trained: {sorted(set(expected) ^ set(found))[:3]}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    apart = max(float((found[name] - gradient).abs().max()) for name, gradient in expected.items()) / largest
    return [
        within("windows and eager attention weights in float32", worst, 1e-5),
        within("first loss, ours and plain, in float32", abs(float(first.detach()) - loss), LOSS_TOLERANCE),
        within("router gradients in float32, of the largest", apart, GRADIENT_TOLERANCE),
    ]


def _windows_apart(model: Any, config: AARConfig, ids: Tensor) -> float:
    """Largest difference of the stock model's windows and its eager attention weights."""
    stock = model.config._attn_implementation
    with torch.no_grad():
        with record(model, layers=config.layers, windows=config.window) as seen:
            model(input_ids=ids, use_cache=False)
        model.set_attn_implementation("eager")
        weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        model.set_attn_implementation(stock)
    return max(float((seen.windows[i] - cut(weights[i], config.window)).abs().max()) for i in config.layers)


def measured_step(
    model: Any, way: str, ids: Tensor, layers: tuple[int, ...], window: int, rate: float, repeats: int = 5
) -> StepRow:
    """Turns of one way; a way that runs out of memory gives a row that says so."""
    device, (batch, length) = ids.device, ids.shape
    with way_of(model, way, layers, window, ids) as step:
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            turns = seconds_of(step, repeats, device)
        except torch.cuda.OutOfMemoryError:
            return StepRow(way, length, batch, Turns([], []), None, None, None)
        peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    speed = batch * length / turns.seconds
    return StepRow(way, length, batch, turns, speed, peak, speed * 4 * active_parameters(model) / rate)


def claims_of(rows: Sequence[StepRow]) -> list[Claim]:
    """Of the rows of one length."""
    if not rows:
        return []
    turns = {row.way: row.turns for row in rows if row.turns.wall}
    at = f"{rows[0].batch} x {rows[0].length} tokens"
    found = []
    if {"aar", "routing only"} <= set(turns):
        found.append(paired("aar / routing only", turns["aar"], turns["routing only"], target=AAR_TARGET, at=at))
    if {"aar", "plain"} <= set(turns):
        found.append(paired("plain way / aar", turns["plain"], turns["aar"], at=at))
    for row in rows:
        if row.turns.wall and row.tokens_per_second and row.rate_share:
            seconds, share = row.turns.seconds, row.rate_share
            low, high = (share * seconds / end for end in (max(row.turns.wall), min(row.turns.wall)))
            target = RATE_TARGET if row.way == "aar" else None
            name = f"share of the matmul rate, {row.way}"
            found.append(Claim(name, share, low, high, target=target, at_least=True, at=at))
        if row.peak_gib is not None:
            found.append(Claim(f"peak, {row.way}", row.peak_gib, row.peak_gib, row.peak_gib, at=at, unit="GiB"))
    return found


class Plan(NamedTuple):
    layers: tuple[int, ...]
    lengths: Sequence[int]
    tokens: int
    """Of a step."""
    repeats: int
    matmul_size: int
    budget_s: float
    window: int = 40


class Planned(NamedTuple):
    name: str
    needs_s: float
    """A guess on the safe side; with less than that left of the budget it is skipped."""
    run: Callable[[], Part]


def run(config: Any, device: torch.device, plan: Plan, doctor: Callable[[Any, torch.dtype], Part]) -> Iterator[Part]:
    """What matters most comes first. RuntimeError, before anything is timed, where numbers are not equal."""
    start = time.monotonic()
    model = build(config, device, torch.bfloat16)
    yield Part("equal", equal_numbers(model, plan.layers, plan.window))
    rate = matmul_rate(device, torch.bfloat16, plan.matmul_size)
    rows: dict[int, list[StepRow]] = {length: [] for length in plan.lengths}

    def steps(length: int, ways: Sequence[str]) -> Part:
        ids, before = rows_of(model, max(1, plan.tokens // length), length).to(device), len(rows[length])
        known = claims_of(rows[length])
        for way in ways:
            rows[length].append(measured_step(model, way, ids, plan.layers, plan.window, rate, plan.repeats))
            if device.type == "cuda":
                torch.cuda.empty_cache()
        taken = [row._asdict() | {"turns": row.turns._asdict()} for row in rows[length][before:]]
        claims = [claim for claim in claims_of(rows[length]) if claim not in known]
        return Part(
            f"{', '.join(ways)}, {length} tokens", claims=claims, details={"matmul_flops": rate, "steps": taken}
        )

    parts = [
        *(Planned(f"steps at {n}", 40, lambda n=n: steps(n, ("routing only", "aar"))) for n in rows),
        Planned("doctor in bfloat16", 40, lambda: doctor(model, torch.bfloat16)),
        *(Planned(f"plain steps at {n}", 60, lambda n=n: steps(n, ("plain",))) for n in rows),
        Planned("doctor in float32", 60, lambda: doctor(model, torch.float32)),
    ]
    for part in parts:
        left = plan.budget_s - (time.monotonic() - start)
        why = f"{left:.0f} s of {plan.budget_s:g} s are left, it may take {part.needs_s:g} s"
        yield part.run() if left >= part.needs_s else Part(part.name, skipped=why)


@contextmanager
def way_of(model: Any, way: str, layers: tuple[int, ...], window: int, ids: Tensor) -> Iterator[Callable[[], Any]]:
    """A step of one way; the model is stock again afterwards."""
    config = AARConfig(layers=layers, window=window)
    if way != "plain":
        stepper = Stepper(model, RouterSFTConfig() if way == "routing only" else config, ids)
        try:
            yield stepper
        finally:
            stepper.handle.detach()
        return
    with plain_trainee(model, config) as trainee:
        optimizer = torch.optim.AdamW(trainee.routers.parameters(), lr=LEARNING_RATE)

        def step() -> None:
            trainee(ids, ids)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step


@contextmanager
def plain_trainee(model: Any, config: AARConfig) -> Iterator[PlainAAR]:
    """From the values that attach_aar gives; eager attention until it is left."""
    handle = attach_aar(model, config, seed=0)
    tensors = {index: dict(router.named_parameters()) for index, router in handle.routers.items()}
    handle.detach()
    stock = model.config._attn_implementation
    trainee = PlainAAR(model, tensors, config.window)
    try:
        yield trainee
    finally:
        trainee.detach()
        model.set_attn_implementation(stock)

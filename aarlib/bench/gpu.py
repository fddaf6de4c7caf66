"""One run on a GPU with the core alone: OLMoE-1B-7B from its config with random weights; routing-only, AAR and plain steps.

Share of the measured matmul rate: FLOPs are 2 a parameter and token for the forward and as many for the input gradients, over
the active parameters (the embeddings' look-up not counted), divided by the step's time and the rate of one large matmul in the
same dtype. Runs on a CPU as well, at small sizes. It has not been run on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aarlib.aar.attach import attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.bench.plain import PlainAAR
from aarlib.bench.train import LEARNING_RATE, Stepper
from aarlib.moe.anatomy import active_parameters
from aarlib.moe.loading import freeze

AAR_TARGET = 1.10
"""AAR step over routing-only step."""
RATE_TARGET = 0.35
"""Share of the measured matmul rate."""


class StepRow(NamedTuple):
    way: str
    length: int
    batch: int
    seconds: float | None
    """None: out of memory."""
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
    return 2 * size**3 / seconds_of(lambda: left @ right, 10, device)


def seconds_of(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median, after two warm-ups."""
    times = []
    for index in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        if index >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def steps(
    model: Any,
    lengths: Sequence[int],
    tokens: int,
    layers: tuple[int, ...],
    window: int,
    rate: float,
    repeats: int = 5,
) -> Iterator[StepRow]:
    """Every way at every length, `tokens` tokens a step; an out-of-memory way gives a row that says so."""
    device = model.get_input_embeddings().weight.device
    flops_per_token = 4 * active_parameters(model)
    for length in lengths:
        batch = max(1, tokens // length)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(device)
        for way in ("routing only", "aar", "plain"):
            with way_of(model, way, layers, window, ids) as step:
                try:
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(device)
                    seconds = seconds_of(step, repeats, device)
                except torch.cuda.OutOfMemoryError:
                    yield StepRow(way, length, batch, None, None, None, None)
                    continue
                peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
            speed = batch * length / seconds
            yield StepRow(way, length, batch, seconds, speed, peak, speed * flops_per_token / rate)


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
    handle = attach_aar(model, config, seed=0)
    tensors = {index: dict(router.named_parameters()) for index, router in handle.routers.items()}
    handle.detach()
    stock = model.config._attn_implementation
    trainee = PlainAAR(model, tensors, window)
    optimizer = torch.optim.AdamW(trainee.routers.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        trainee(ids, ids)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        yield step
    finally:
        trainee.detach()
        model.set_attn_implementation(stock)

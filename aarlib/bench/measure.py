"""Time a variant in a process of its own: threads fixed, one warm-up, then the median of 5 with minimum and maximum.

A variant is an importable function "package.module:function" that takes JSON-able settings, prepares (not timed) and
returns the call to be timed.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from aarlib.bench.process import GIB, local, peak_gib, run_job

REPEATS = 5


class Measurement(NamedTuple):
    median_s: float
    min_s: float
    max_s: float
    peak_gib: float
    """Largest resident set of the process; on a GPU, of its allocated memory."""
    cpu_s: float = float("nan")
    """Median processor time of the process, which other work on the machine disturbs less than the wall clock."""


def measure(variant: str, settings: Mapping[str, Any], threads: int = 1, repeats: int = REPEATS) -> Measurement:
    """Run `variant` in a new process with `threads` threads; a failure there is a RuntimeError with its last lines."""
    request = {"variant": variant, "settings": dict(settings), "repeats": repeats}
    found = run_job("aarlib.bench.measure:measured", request, threads)
    return Measurement(**found)


def measured(variant: str, settings: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """The measurement in this process, as the job that `measure` runs."""
    return _timed(local(variant, settings), repeats)._asdict()


def mid_model(seed: int = 0, **changes: Any) -> OlmoeForCausalLM:
    """`mid`, the bench model: random OLMoE, d_model 1024, 16 heads of 64, 8 layers, 16 experts top-4, d_ff 512, vocab 8192."""
    shape = {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    torch.manual_seed(seed)
    config = OlmoeConfig(**shape, attn_implementation="sdpa")  # pyright: ignore[reportCallIssue]
    model = OlmoeForCausalLM(config)
    model.requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    return model.eval()


def _timed(call: Callable[[], Any], repeats: int) -> Measurement:
    call()
    cuda = torch.cuda.is_available()
    seconds, processor = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_cpu)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else peak_gib()
    return Measurement(statistics.median(seconds), min(seconds), max(seconds), peak, statistics.median(processor))

"""Time a variant in a process of its own: threads fixed, one warm-up, then the median of 5 with minimum and maximum.

A variant is an importable function "package.module:function" that takes JSON-able settings, prepares (not timed) and
returns the call to be timed.
"""

import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

REPEATS = 5


class Measurement(NamedTuple):
    median_s: float
    min_s: float
    max_s: float
    peak_gib: float
    """Largest resident set of the process; on a GPU, of its allocated memory."""
    cpu_s: float = float("nan")
    """Median processor time of the process, which other work on the machine disturbs less than the wall clock."""


def measure(
    variant: str, settings: Mapping[str, Any], threads: int = 1, repeats: int = REPEATS, timeout_s: float = 3600
) -> Measurement:
    """Run `variant` in a new process with `threads` threads; a failure there is a RuntimeError with its last lines."""
    request = json.dumps({"variant": variant, "settings": dict(settings), "threads": threads, "repeats": repeats})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "aarlib.bench.measure"]
    result = subprocess.run(
        command, input=request, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{variant} failed: {result.stderr[-2000:]}")
    return Measurement(**json.loads(result.stdout.splitlines()[-1]))


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
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measurement(
        statistics.median(seconds), min(seconds), max(seconds), peak / 2**30, statistics.median(processor)
    )


def _main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    module, _, name = request["variant"].partition(":")
    prepare = getattr(importlib.import_module(module), name)
    measurement = _timed(prepare(**request["settings"]), request["repeats"])
    sys.stdout.write(f"\n{json.dumps(measurement._asdict())}\n")


if __name__ == "__main__":
    _main()

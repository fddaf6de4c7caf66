"""Measure in a process of its own, or several ways side by side in one: on a shared machine only turns taken together compare.

A job is an importable function "package.module:function" from JSON-able settings to something JSON-able.
"""

import ctypes
import gc
import importlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
TURN_S = 0.25
"""Least length of a turn: a call of a few milliseconds alone is mostly what the machine does beside it."""
NO_MEMORY = ("can't allocate memory", "out of memory")


class Turns(NamedTuple):
    """Seconds of each turn: of the wall clock, and of the CPU, which other processes of the machine disturb less."""

    wall: list[float]
    cpu: list[float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.wall)


class OutOfMemory(NamedTuple):
    limit_gib: float


def take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Turns]:
    """Two warm-ups each, then `rounds` rounds in which every call has its turn: the mean of as many calls as fill TURN_S."""
    turns, repeats = {name: Turns([], []) for name in calls}, dict.fromkeys(calls, 1)
    for name, call in calls.items():
        call()
        wall = time.perf_counter()
        call()
        repeats[name] = max(1, math.ceil(TURN_S / (time.perf_counter() - wall)))
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats[name]):
                call()
            turns[name].cpu.append((time.process_time() - cpu) / repeats[name])
            turns[name].wall.append((time.perf_counter() - wall) / repeats[name])
    return turns


class Spread(NamedTuple):
    median: float
    low: float
    high: float


def ratios(ours: Sequence[float], plain: Sequence[float]) -> Spread:
    """Of ours / plain, turn by turn."""
    values = [a / b for a, b in zip(ours, plain, strict=True)]
    return Spread(statistics.median(values), min(values), max(values))


def extra_peak(call: Callable[[], Any]) -> float:
    """GiB of resident memory that `call` takes at its peak, beside what is in use before (Linux with glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free stays resident otherwise, and would not be counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_kib("VmRSS")
    call()
    return (_status_kib("VmHWM") - before) * 1024 / GIB


def peak_gib() -> float:
    """Largest resident set so far (Linux); unlike ru_maxrss without what the process held before it became this program."""
    return _status_kib("VmHWM") * 1024 / GIB


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_job(job: str, settings: Mapping[str, Any], threads: int = 1, limit_gib: float | None = None) -> Any:
    """What the job returns, from a new process with `threads` threads that may hold `limit_gib`, else OutOfMemory.

    RuntimeError where it fails.
    """
    request = json.dumps({"job": job, "settings": dict(settings), "threads": threads, "limit_gib": limit_gib})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "aarlib.bench.process"]
    result = subprocess.run(command, input=request, capture_output=True, text=True, env=environment, check=False)
    if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
    if limit_gib is not None and (any(text in result.stderr for text in NO_MEMORY) or "MemoryError" in result.stderr):
        return OutOfMemory(limit_gib)
    raise RuntimeError(f"{job} failed: {result.stderr[-2000:]}")


def local(job: str, settings: Mapping[str, Any]) -> Any:
    """The job in this process."""
    module, _, name = job.partition(":")
    return getattr(importlib.import_module(module), name)(**settings)


def free_gib() -> float:
    """Memory that a process may take now without pushing others out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / GIB
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _main() -> None:
    import torch

    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    if request["limit_gib"] is not None:
        limit = int(request["limit_gib"] * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    result = local(request["job"], request["settings"])
    sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    _main()

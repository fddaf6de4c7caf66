"""Memory of this process and everything below it, sampled by a thread."""

import threading
from types import TracebackType
from typing import Self

import psutil


def tree_memory_gib() -> float:
    """Proportional set size of this process and its descendants (pages shared by n processes count 1/n); else resident."""
    process = psutil.Process()
    return sum(_memory(member) for member in [process, *process.children(recursive=True)]) / 2**30


class PeakMemory:
    """`with PeakMemory() as peak: ...; peak.gib` is the largest sample so far."""

    def __init__(self, interval_s: float = 3.0):
        self.gib = 0.0
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self.gib = max(self.gib, tree_memory_gib())


def _memory(process: psutil.Process) -> int:
    """0 for a process that ended meanwhile or belongs to somebody else."""
    try:
        information = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return getattr(information, "pss", information.rss)

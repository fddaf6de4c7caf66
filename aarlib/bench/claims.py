"""What a bench says: numbers that were equal before anything was timed, then ratios, with the target where there is one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from aarlib.bench.measure import Measurement
from aarlib.bench.process import Turns, ratios


class Equal(NamedTuple):
    what: str
    error: float
    tolerance: float


class Claim(NamedTuple):
    name: str
    value: float
    """Median."""
    low: float
    high: float
    """The least and the most: over paired turns, or of turns in separate processes, the extremes of their quotient."""
    cpu: float | None = None
    """The same ratio of processor times."""
    target: float | None = None
    at_least: bool = False
    at: str = ""
    """Size that it holds for, where a bench has several."""
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def line(self) -> str:
        cpu = "" if self.cpu is None else f", of processor times {self.cpu:.2f}"
        goal = "" if self.target is None else f"; target {'>=' if self.at_least else '<='} {self.target:g}"
        verdict = {None: "", True: ": met", False: ": MISSED"}[self.met]
        at = f"{self.at}, " if self.at else ""
        return f"{at}{self.name}: {self.value:.2f} {self.unit} [{self.low:.2f}, {self.high:.2f}]{cpu}{goal}{verdict}"


class Part(NamedTuple):
    """One step of a bench: as soon as it is there it is printed and stored."""

    name: str
    equal: list[Equal] = []
    claims: list[Claim] = []
    details: Mapping[str, Any] = {}
    """JSON-able: turns, peaks, rows."""
    skipped: str = ""
    """Why it was not run."""


def equal(what: str, found: Tensor, expected: Tensor, tolerance: float) -> Equal:
    """max|a - b| / max(1, max|b|); RuntimeError where it is above the tolerance: nothing may be timed then."""
    worst = float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max().clamp_min(1.0))
    return within(what, worst, tolerance)


def within(what: str, error: float, tolerance: float) -> Equal:
    if not error <= tolerance:
        raise RuntimeError(
            f"{what}: the two ways differ by {error:.1e} (tolerance {tolerance:.0e}); nothing is timed, for it would "
            "compare different things"
        )
    return Equal(what, error, tolerance)


def paired(name: str, ours: Turns, theirs: Turns, **fields: Any) -> Claim:
    """ours / theirs, turn by turn."""
    wall, cpu = ratios(ours.wall, theirs.wall), ratios(ours.cpu, theirs.cpu)
    return Claim(name, wall.median, wall.low, wall.high, cpu.median, **fields)


def apart(name: str, above: Measurement, below: Measurement, scale: float = 1.0, **fields: Any) -> Claim:
    """scale * above / below, of turns in processes of their own."""
    low, high = scale * above.min_s / below.max_s, scale * above.max_s / below.min_s
    return Claim(name, scale * above.median_s / below.median_s, low, high, scale * above.cpu_s / below.cpu_s, **fields)


def peaks(measured: Mapping[str, Measurement]) -> list[Claim]:
    """Largest resident set of each process."""
    return [Claim(f"peak of {name}", m.peak_gib, m.peak_gib, m.peak_gib, unit="GiB") for name, m in measured.items()]

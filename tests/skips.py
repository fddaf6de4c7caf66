"""Which skips a run may contain: a silent skip is a defect, so any other reason fails the run."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path


def read_allowed() -> list[str]:
    """Patterns (`*` matches anything), one a line; # starts a comment."""
    lines = Path(__file__).with_name("skips_allowed.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def unexplained(reasons: Iterable[str], allowed: Iterable[str]) -> list[str]:
    patterns = list(allowed)
    return sorted(reason for reason in reasons if not any(fnmatchcase(reason, pattern) for pattern in patterns))

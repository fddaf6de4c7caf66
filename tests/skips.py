"""Which skips a run may contain: a silent skip is a defect, so any other reason fails the run."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

skip_reasons: set[str] = set()


def read_allowed() -> list[str]:
    """Patterns (`*` matches anything), one a line; # starts a comment."""
    lines = Path(__file__).with_name("skips_allowed.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def unexplained(reasons: Iterable[str], allowed: Iterable[str]) -> list[str]:
    patterns = list(allowed)
    return sorted(reason for reason in reasons if not any(fnmatchcase(reason, pattern) for pattern in patterns))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _collect_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _collect_skip(report)


def _collect_skip(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        skip_reasons.add(report.longrepr[2].removeprefix("Skipped: "))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # the process that started the workers sees every report
    if bad := unexplained(skip_reasons, read_allowed()):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        for reason in bad:
            reporter.write_line(f"\nskip not allowed by tests/skips_allowed.txt: {reason}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

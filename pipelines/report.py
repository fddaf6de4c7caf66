"""Rebuild the page of a run directory: report.html, summary.json, and the table in the terminal.

python -m pipelines.report runs/nano_demo
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


def main(argv: Sequence[str] | None = None) -> int:
    folder = tyro.cli(
        Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR", help="A folder that train wrote.")],
        prog="python -m pipelines.report",
        description=__doc__,
        args=argv,
    )
    from aarlib.report.page import write_report

    try:
        written = write_report(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written.text}\n\npage:    {written.page}\nsummary: {written.summary}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

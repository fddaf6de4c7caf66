"""Rebuild the page of a run directory: report.html, summary.json, and the table in the terminal.

python -m pipelines.report runs/nano_demo
python -m pipelines.report runs/nano_demo --summary docs/studies/results/demo.json --page README.md
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Arguments:
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR", help="A folder that train wrote.")]
    summary: Path | None = None
    """A JSON file that the summary is written to as well."""
    page: Path | None = None
    """A Markdown page whose blocks <!-- run NAME --> are made again from the files NAME.json beside the summary."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = tyro.cli(Arguments, prog="python -m pipelines.report", description=__doc__, args=argv)
    from aarlib.config import write_text_atomically
    from aarlib.report.page import write_report
    from aarlib.report.readme import filled, named_blocks, read_summaries

    try:
        if arguments.page is not None and arguments.summary is None:
            raise ValueError("--page: name the summary too, beside which the others are: --summary=FILE.json")
        written = write_report(arguments.folder)
        if arguments.summary is not None:
            write_text_atomically(arguments.summary, f"{written.summary.read_text(encoding='utf-8')}\n")
        if arguments.page is not None and arguments.summary is not None:
            text = arguments.page.read_text(encoding="utf-8")
            found = read_summaries(arguments.summary.parent, named_blocks(text))
            write_text_atomically(arguments.page, filled(text, found))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written.text}\n\npage:    {written.page}\nsummary: {arguments.summary or written.summary}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

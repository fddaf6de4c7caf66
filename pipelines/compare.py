"""Run directories side by side: held-out CE, with paired 95% intervals where they hold the same conversations.

python -m pipelines.compare runs/window20 runs/window40
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


def main(argv: Sequence[str] | None = None) -> int:
    folders = tyro.cli(
        Annotated[
            tuple[Path, ...],
            tyro.conf.Positional,
            tyro.conf.arg(
                metavar="RUN_DIR RUN_DIR [RUN_DIR ...]", help="Folders that train wrote; the first is compared with."
            ),
        ],
        prog="python -m pipelines.compare",
        description=__doc__,
        args=argv,
    )
    from aarlib.report.compare import comparison_display, comparison_table
    from aarlib.report.records import read_run
    from aarlib.report.text import as_text

    try:
        if len(folders) < 2:
            raise ValueError(f"{len(folders)} run directories given; name at least two to compare")
        table = comparison_table([read_run(folder) for folder in folders])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_text(comparison_display(table)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Evaluate trained aggregation heads against every control on exactly paired windows, and print FDAA's tables.

Takes the adapters of finished `train` runs of the same storage folder. One unit per (run, domain, split), spread over
ray.num_actors; run again, it repeats nothing. Writes records.parquet and tables.json into the run directory and logs the summary
numbers to MLflow; `--page` also puts the tables, with those of the finished studies named by `--beside`, into a page.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aarlib.config import read_json_object, write_text_atomically
from aarlib.runtime.fdaa_config import FDAAStudyConfig
from pipelines.command_line import parse_verb
from pipelines.unit_verb import run_verb, tracked_run


@dataclass(frozen=True)
class Flags:
    page: Path | None = None
    """A Markdown page whose tables are filled; the results go to results/<its name>.json beside it."""
    beside: tuple[str, ...] = ()
    """Names of finished studies of the same storage folder whose tables join this one's on the page."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_verb(parse_verb(FDAAStudyConfig, __doc__, argv, flags=Flags), describe, run)


def describe(config: FDAAStudyConfig) -> str:
    """What would be evaluated; nothing is written."""
    from aarlib.runtime.fdaa_runs import find_adapters

    fdaa = config.fdaa
    lines = [f"{name}: {len(find_adapters(config, name))} adapters" for name in fdaa.runs]
    windows = f"{fdaa.development_windows} development + {fdaa.test_windows} test windows of {fdaa.window} tokens"
    return "\n".join([*lines, f"{', '.join(fdaa.domains)}: {windows} each"])


def run(config: FDAAStudyConfig, flags: Flags) -> None:
    from aarlib.runtime.fdaa_runs import describe_study, describe_training
    from aarlib.runtime.fdaa_study import study
    from aarlib.runtime.run_directory import run_directory
    from aarlib.studies.fdaa import merged, metrics_of, results
    from aarlib.studies.fdaa_page import filled, paper, tables

    others = [read_json_object(run_directory(config.updated({"name": name})) / "tables.json") for name in flags.beside]
    with tracked_run(config) as (folder, logger):
        records = study(config, folder)
        runs = [describe_training(config, name) for name in config.fdaa.runs]
        found = results(records) | {"runs": runs, **describe_study(config)}
        write_text_atomically(folder / "tables.json", json.dumps(found, indent=1))
        logger.log(metrics_of(found), step=0)
    print("\n\n".join(tables(found).values()))
    if flags.page is not None:
        shown = merged([found, *others])
        page = filled(flags.page.read_text(encoding="utf-8"), {**tables(shown), "paper": paper()})
        stored = flags.page.parent / "results" / f"{flags.page.stem}.json"
        write_text_atomically(stored, json.dumps(shown, indent=1) + "\n")
        write_text_atomically(flags.page, page)
    print(f"run directory: {folder}")


if __name__ == "__main__":
    raise SystemExit(main())

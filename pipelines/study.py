"""Evaluate trained aggregation heads against every control on exactly paired windows, and print FDAA's tables.

Takes the adapters of finished `train` runs of the same storage folder. One unit per (run, domain, split), spread over
ray.num_actors;
run again, it repeats nothing. Writes records.parquet and tables.json into the run directory and logs to MLflow.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence

from aarlib.runtime.fdaa_config import FDAAStudyConfig
from pipelines.command_line import parse_verb


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_verb(FDAAStudyConfig, __doc__, argv)
    config = arguments.config
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("aarlib").setLevel(logging.INFO)
    from aarlib.runtime.units import UnitsError

    try:
        print(describe(config))
        if not arguments.dry_run:
            run(config)
    except (ValueError, UnitsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def describe(config: FDAAStudyConfig) -> str:
    """What would be evaluated; nothing is written."""
    from aarlib.runtime.fdaa_study import find_adapters

    fdaa = config.fdaa
    lines = [f"{name}: {len(find_adapters(config, name))} adapters" for name in fdaa.runs]
    windows = f"{fdaa.development_windows} development + {fdaa.test_windows} test windows of {fdaa.window} tokens"
    return "\n".join([*lines, f"{', '.join(fdaa.domains)}: {windows} each"])


def run(config: FDAAStudyConfig) -> None:
    from aarlib.config import write_text_atomically
    from aarlib.runtime.cluster import connect
    from aarlib.runtime.fdaa_study import describe_training, study
    from aarlib.runtime.run_directory import claim, held
    from aarlib.runtime.tracking import single_run
    from aarlib.studies.fdaa import results
    from aarlib.studies.fdaa_page import tables

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with held(config) as folder:  # pyright: ignore[reportArgumentType]
        claim(config)  # pyright: ignore[reportArgumentType]
        connect(config.ray)  # pyright: ignore[reportArgumentType]
        with single_run(config.tracking, config.ray.storage, folder, config.model_dump(mode="json")):
            records = study(config, folder)
        found = results(records) | {"runs": [describe_training(config, name) for name in config.fdaa.runs]}
        write_text_atomically(folder / "tables.json", json.dumps(found, indent=1))
    print("\n\n".join(tables(found).values()))
    print(f"run directory: {folder}")


if __name__ == "__main__":
    raise SystemExit(main())

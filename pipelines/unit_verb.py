"""What the verbs share that spread units of work over actors: audit, decompose, study."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.command_line import VerbArguments


class Tracked(NamedTuple):
    folder: Path
    """The run directory, held by this process."""
    logger: Any
    """aarlib.runtime.tracking.RunLogger of the command's MLflow run."""


def run_verb(
    arguments: VerbArguments[Any, Any], describe: Callable[[Any], str], run: Callable[[Any, Any], None]
) -> int:
    """Print what would be done, then do it unless it is a dry run; `run` gets the config and the verb's own flags."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("aarlib").setLevel(logging.INFO)
    from aarlib.runtime.units import UnitsError

    try:
        print(describe(arguments.config))
        if not arguments.dry_run:
            run(arguments.config, arguments.extras)
    except (ValueError, UnitsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def tracked_run(config: Any) -> Iterator[Tracked]:
    """The run directory claimed and held, Ray connected, one MLflow run open."""
    from aarlib.runtime.cluster import connect
    from aarlib.runtime.run_directory import claim, held
    from aarlib.runtime.tracking import single_run

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with held(config) as folder:
        claim(config)
        connect(config.ray)
        with single_run(config.tracking, config.ray.storage, folder, config.model_dump(mode="json")) as logger:
            yield Tracked(folder, logger)

"""Search over config values with Ray Tune: a study of tune_spaces on a run config. Taken up again, it keeps finished trials."""

import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path

from aarlib.training.config import RunConfig
from pipelines.command_line import parse_verb


@dataclass(frozen=True)
class Flags:
    space: str
    """A file of tune_spaces, without .py."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_verb(RunConfig, __doc__, argv, flags=Flags)
    config, space = arguments.config, arguments.extras.space
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("aarlib").setLevel(logging.INFO)
    try:
        study = load_study(space)
        from aarlib.report.tables import sweep_table
        from aarlib.report.text import as_text, sweep_display
        from aarlib.runtime.sweep import sweep
        from aarlib.runtime.trainer import check
        from aarlib.runtime.tune_study import check_space, resolved, trial_config

        study = resolved(study, config)
        if arguments.dry_run:
            check(trial_config(config, study, {}, f"{config.name}-{space}"))
            check_space(config, study, space)
            print("\n".join(f"{path}: {domain}" for path, domain in study.space.items()))
            return 0
        result = sweep(config, study, space)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{as_text(sweep_display(sweep_table(result.sweep)))}")
    flags = shlex.join(f"--{path}={value}" for path, value in result.best.items())
    print(f"\nbest: {flags}")
    print(f"run directory: {result.folder}\nMLflow:        {result.tracking.ui_command()}")
    for problem in result.problems:
        print(f"MLflow refused: {problem}", file=sys.stderr)
    return 0


def load_study(space: str):
    """The STUDY of tune_spaces/<space>.py; a ValueError names the files there are."""
    if not space.isidentifier() or util.find_spec(f"tune_spaces.{space}") is None:
        package = import_module("tune_spaces")
        known = sorted(path.stem for folder in package.__path__ for path in Path(folder).glob("[a-z]*.py"))
        raise ValueError(f"--space {space!r} is no file of tune_spaces; there are: {', '.join(known)}")
    return import_module(f"tune_spaces.{space}").STUDY


if __name__ == "__main__":
    raise SystemExit(main())

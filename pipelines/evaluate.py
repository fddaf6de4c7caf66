"""Score the untouched model and every adapter of a run directory on the config's lm-eval tasks.

One unit of work per (adapter, task), spread over evaluate.num_actors; run again, it repeats nothing. Writes
evaluation/scores.parquet and samples.parquet into the run directory and logs to MLflow beside the trainings.
"""

import logging
import sys
import tempfile
from collections.abc import Sequence

from aarlib.runtime.run_directory import held, update
from aarlib.training.config import RunConfig
from pipelines.command_line import parse_verb


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_verb(RunConfig, __doc__, argv)
    config = arguments.config
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("aarlib").setLevel(logging.INFO)
    from aarlib.runtime.units import UnitsError

    try:
        print(describe(config))
        if arguments.dry_run:
            return 0
        from aarlib.runtime.cluster import connect
        from aarlib.runtime.evaluation import evaluate, track

        with held(config) as folder:
            connect(config.ray)
            evaluation = evaluate(config)
    except (ValueError, UnitsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown = evaluation.scores[["adapter", "task", "metric", "filter", "value", "stderr", "num_documents"]]
    print(f"\n{shown.to_string(index=False)}\n\nscores: {folder / 'evaluation' / 'scores.parquet'}")
    for problem in track(config, evaluation.scores):
        print(f"MLflow refused: {problem}", file=sys.stderr)
    return 0


def describe(config: RunConfig) -> str:
    """What would be scored; nothing is written."""
    from aarlib.runtime.evaluation import find_adapters, find_tasks

    update(config)
    adapters = find_adapters(config)
    with tempfile.TemporaryDirectory() as folder:
        source = find_tasks(config.evaluate, folder)
    return f"tasks: {', '.join(source.names)}\nmodels: {', '.join(adapter.name for adapter in adapters)}"


if __name__ == "__main__":
    raise SystemExit(main())

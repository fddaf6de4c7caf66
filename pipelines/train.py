"""Train attention-aware routers, or any other method of the config, on Ray.

Every (method, seed) of the config on the same rows in the same order; prints held-out CE beside the untouched model's. Run again,
it resumes where it stopped.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from aarlib.training.config import RunConfig
from pipelines.command_line import parse_verb


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_verb(RunConfig, __doc__, argv)
    config = arguments.config
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("aarlib").setLevel(logging.INFO)
    try:
        if arguments.dry_run:
            print(describe(config))
            return 0
        from aarlib.report.records import read_run
        from aarlib.report.tables import held_out_table, score_table
        from aarlib.report.text import as_text, held_out_display, score_display
        from aarlib.runtime.trainer import train

        result = train(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = read_run(result.folder)
    table = held_out_table(records)
    print(f"\n{as_text(held_out_display(table))}\n\n{as_text(score_display(table, score_table(records)))}\n")
    print(f"run directory: {result.folder}")
    if skipped := _num_skipped(result.folder):
        print(f"rows skipped:  {skipped} that are no conversation; the first of them in data.json")
    if result.tracking is not None:
        print(f"MLflow:        {result.tracking.ui_command()}")
    for problem in result.problems:
        print(f"MLflow refused: {problem}", file=sys.stderr)
    return 0


def _num_skipped(folder: Path) -> int:
    path = folder / "data.json"
    return json.loads(path.read_text(encoding="utf-8"))["num_skipped"] if path.is_file() else 0


def describe(config: RunConfig) -> str:
    """What the config would train, from the model's geometry alone; what is not on this machine is said to be unchecked."""
    from aarlib.runtime.plan import check_inputs, plan
    from aarlib.runtime.run_directory import check_claim

    check_claim(config)
    planned = plan(config)
    notes = check_inputs(config)
    moe = f"{len(planned.moe_layers)} of them MoE with {planned.num_experts} experts, top {planned.top_k}"
    lines = [f"{planned.model}: {planned.num_layers} layers, {moe}"]
    for method in planned.methods:
        where = f"on layers {', '.join(map(str, method.aar_layers))}" if method.aar_layers else "routers only"
        added = method.num_trainable - method.num_router
        parts = f" = {method.num_router:,} + {added:,}" if added and method.num_router else ""
        lines.append(f"  {method.label:<16}{method.num_trainable:>12,} trainable{parts}, {where}")
    rows = "windows" if config.data.domains else "conversations"
    lines.append(f"  {len(config.runs())} runs of {_steps(config)}, {config.optim.global_batch} {rows} a step")
    ray = config.ray
    lines.append(f"  {ray.num_workers} {'GPU' if ray.use_gpu else 'CPU'} workers, ZeRO {ray.zero_stage}")
    return "\n".join([*lines, *(f"  {note}" for note in notes)])


def _steps(config: RunConfig) -> str:
    from aarlib.runtime.plan import estimated_rows

    try:
        rows = estimated_rows(config)
    except ValueError:
        rows = None
    if rows is None:
        return "a length that only reading the data tells"
    steps = -(-rows // config.optim.global_batch) * config.optim.epochs
    return f"about {min(steps, config.optim.max_steps or steps)} steps"


if __name__ == "__main__":
    raise SystemExit(main())

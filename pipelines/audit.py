"""Audit how a model weighs the experts it has selected: exact losses of fixed-dispatch actions, gradient utilities, predictors.

One unit of work per shard of windows, at all audited layers, spread over ray.num_actors; run again, it repeats nothing. Writes
records.parquet, tables and figures into the run directory and logs to MLflow.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence

from aarlib.runtime.audit_config import AuditRunConfig
from pipelines.command_line import parse_verb


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_verb(AuditRunConfig, __doc__, argv)
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


def describe(config: AuditRunConfig) -> str:
    """What would be audited; nothing is written."""
    from aarlib.runtime.audit import actions_of, check

    parts, audit = check(config), config.audit
    per_domain = len(audit.seeds) * (audit.development + audit.locked)
    return (
        f"{parts.family.model_types[0]}: layers {list(audit.layers)} of {len(parts.layers)}, "
        f"{len(actions_of(parts))} actions at top-{parts.top_k}\n"
        f"{len(audit.domains)} domains ({', '.join(audit.domains)}) x {len(audit.seeds)} seeds x "
        f"({audit.development} development + {audit.locked} locked) windows of {audit.window} tokens = "
        f"{per_domain * len(audit.domains)} windows, {audit.isolation}"
    )


def run(config: AuditRunConfig) -> None:
    from aarlib.config import write_text_atomically
    from aarlib.report.audit_figures import write_figures
    from aarlib.runtime.audit import audit, check, metrics_of
    from aarlib.runtime.cluster import connect
    from aarlib.runtime.run_directory import claim, held
    from aarlib.runtime.tracking import single_run
    from aarlib.studies.audit_page import results, tables

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with held(config) as folder:  # pyright: ignore[reportArgumentType]
        claim(config)  # pyright: ignore[reportArgumentType]
        connect(config.ray)  # pyright: ignore[reportArgumentType]
        with single_run(config.tracking, config.ray.storage, folder, config.model_dump(mode="json")) as logger:
            records = audit(config, folder)
            about = {"config": config.model_dump(mode="json", exclude={"ray", "tracking"})}
            found = results(records, check(config).num_experts, config.audit.predictors, about)
            write_text_atomically(folder / "tables.json", json.dumps(found, indent=0))
            logger.log(metrics_of(found), 0)
        figures = write_figures(found, folder / "figures")
    for name, table in tables(found).items():
        print(f"\n{name}\n{table}")
    print(f"\nrun directory: {folder} ({len(records)} records, {len(figures)} figures)")


if __name__ == "__main__":
    raise SystemExit(main())

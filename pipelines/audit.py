"""Audit how a model weighs the experts it has selected: exact losses of fixed-dispatch actions, gradient utilities, predictors.

One unit of work per shard of windows, at all audited layers, spread over ray.num_actors; run again, it repeats nothing. Writes
records.parquet, tables.json and figures into the run directory and logs to MLflow; `--page` also puts the tables into a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aarlib.runtime.audit_config import AuditRunConfig
from pipelines.command_line import parse_verb
from pipelines.unit_verb import run_verb, tracked_run


@dataclass(frozen=True)
class Flags:
    page: Path | None = None
    """A Markdown page whose tables are filled; results go to results/<its name>.json beside it, figures to figures/."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_verb(parse_verb(AuditRunConfig, __doc__, argv, flags=Flags), describe, run)


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


def run(config: AuditRunConfig, flags: Flags) -> None:
    from aarlib.audit.predictions import predictions
    from aarlib.config import write_text_atomically
    from aarlib.report.audit_figures import write_figures
    from aarlib.runtime.audit import audit, check, metrics_of
    from aarlib.studies.audit_markdown import frame_of, tables
    from aarlib.studies.audit_page import fill, results, to_json
    from aarlib.version import made_with

    with tracked_run(config) as (folder, logger):
        records = audit(config, folder)
        about = {**made_with(), "config": config.model_dump(mode="json", exclude={"ray", "tracking"})}
        predicted = predictions(records, check(config).num_experts) if config.audit.predictors else None
        found = results(records, predicted, about)
        write_text_atomically(folder / "tables.json", to_json(found))
        measures = frame_of(found, "measures")
        logger.log(metrics_of(measures, frame_of(found, "noise")), 0)
        figures = write_figures(measures, frame_of(found, "by_rank"), folder / "figures")
    shown, page = tables(found), flags.page
    if page is not None:
        write_text_atomically(page, fill(page.read_text(encoding="utf-8"), shown))
        write_text_atomically(page.parent / "results" / f"{page.stem}.json", to_json(found))
        write_figures(measures, frame_of(found, "by_rank"), page.parent / "figures")
    for name, table in shown.items():
        print(f"\n{name}\n{table}")
    print(f"\nrun directory: {folder} ({len(records)} records, {len(figures)} figures)")


if __name__ == "__main__":
    raise SystemExit(main())

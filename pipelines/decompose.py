"""Decompose router logits over a corpus: which component made the router decide, and what happens without it.

Two rounds of units, spread over ray.num_actors; run again, they repeat nothing. Writes influence.parquet, causal.parquet,
matrices.parquet (sender x receiver, with intervals), the study's tables and figures into the run directory and logs to MLflow.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aarlib.config import write_text_atomically
from aarlib.runtime.lens_config import LensRunConfig
from pipelines.command_line import parse_verb
from pipelines.unit_verb import run_verb, tracked_run


@dataclass(frozen=True)
class Flags:
    page: Path | None = None
    """A Markdown page whose tables are made again from the results, which are written to results/ beside it."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_verb(parse_verb(LensRunConfig, __doc__, argv, flags=Flags), describe, run)


def describe(config: LensRunConfig) -> str:
    """What would be decomposed; nothing is written."""
    from aarlib.runtime.lens import check

    parts = check(config)
    receivers = config.lens.receivers or parts.moe_layers
    texts = [f"{name}: {source.documents} x {source.length} tokens" for name, source in config.lens.sources.items()]
    return (
        f"{parts.family.model_types[0]}: routers of layers {list(receivers)} ({parts.num_experts} experts, top-{parts.top_k}), "
        f"by {', '.join(config.lens.levels)}\n{'; '.join(texts)}\n"
        f"taken away on: {config.lens.causal_source}; IOI prompts: {config.lens.ioi_prompts}"
    )


def run(config: LensRunConfig, flags: Flags) -> None:
    from aarlib.runtime.lens import influence, write_parquet
    from aarlib.runtime.lens_causal import causal
    from aarlib.runtime.lens_pieces import influence_units
    from aarlib.studies.lens_matrices import matrices

    with tracked_run(config) as (folder, logger):
        units = influence_units(config)
        records = influence(config, units, folder)
        taken = causal(config, units, records, folder)
        write_parquet(records, folder / "influence.parquet")
        write_parquet(taken, folder / "causal.parquet")
        write_parquet(matrices(records), folder / "matrices.parquet")
        results = study(config, units, records, taken, folder)
        logger.log(metrics(results), step=0)
    print(f"{len(records)} + {len(taken)} records, closure error {results['run']['closure error']:.1e}: {folder}")
    if flags.page is not None:
        put_on_page(config.name, results, flags.page)


def study(config: LensRunConfig, units: Any, records: Any, taken: Any, folder: Path) -> dict[str, Any]:
    """Tables and figures of the run directory; made again by every call."""
    from aarlib.report.figures import as_svg
    from aarlib.report.lens_figures import TITLES, figures
    from aarlib.report.lens_page import as_results
    from aarlib.runtime.lens import facts
    from aarlib.runtime.lens_causal import study_tables
    from aarlib.studies.lens_samples import senders_of
    from aarlib.version import made_with

    tables = study_tables(config, units, records, taken)
    results = as_results(tables, facts(config, records))
    results["run"] |= made_with()
    write_text_atomically(folder / "tables.json", json.dumps(results, indent=1))
    source = config.lens.causal_source or next(iter(config.lens.sources))
    (folder / "figures").mkdir(exist_ok=True)
    layers = senders_of(records, source, "layer")
    maps = {name: layers.frame(name) for name in TITLES}
    pairs = taken[taken["record"] == "ioi_pairs"] if len(taken) else None
    for name, figure in figures(maps, tables, source, pairs=pairs).items():
        (folder / "figures" / f"{name}.svg").write_bytes(as_svg(figure))
        figure.savefig(folder / "figures" / f"{name}.png", dpi=110)
    return results


def metrics(results: dict[str, Any]) -> dict[str, float]:
    """What goes to MLflow: closure error, and per source the MoE to attention ratio and the pooled rank correlations."""
    found = {"lens/closure_error": results["run"]["closure error"]}
    for row in results["tables"]["kinds"]:
        if row["measure"] == "moe / attn":
            found[f"lens/{row['source']}/moe_over_attn/receiver_{row['receiver']}"] = row["value"]
    for row in results["tables"]["aarv"]:
        if row["receiver"] == "pooled":
            found[f"lens/{row['source']}/variance_aarv_spearman/{row['level']}"] = row["value"]
    return found


def put_on_page(name: str, results: dict[str, Any], page: Path) -> None:
    """results/lens_<name>.json beside `page`, and the page's tables made again."""
    from aarlib.report.lens_page import read_results, render

    write_text_atomically(page.parent / "results" / f"lens_{name}.json", json.dumps(results, indent=0))
    text = page.read_text(encoding="utf-8")
    write_text_atomically(page, render(text, read_results(page.parent / "results")))


if __name__ == "__main__":
    raise SystemExit(main())

"""Decompose router logits over a corpus: which component made the router decide, and what happens without it.

Two rounds of units, spread over ray.num_actors; run again, they repeat nothing. Writes influence.parquet, causal.parquet, the
study's tables and figures into the run directory and logs to MLflow.
"""

import logging
import os
import sys
from collections.abc import Sequence

from aarlib.runtime.lens_config import LensRunConfig
from pipelines.command_line import parse_verb


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_verb(LensRunConfig, __doc__, argv)
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


def run(config: LensRunConfig) -> None:
    from aarlib.runtime.cluster import connect
    from aarlib.runtime.lens import influence, write_parquet
    from aarlib.runtime.lens_causal import causal
    from aarlib.runtime.run_directory import claim, held
    from aarlib.runtime.tracking import single_run

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with held(config) as folder:  # pyright: ignore[reportArgumentType]
        claim(config)  # pyright: ignore[reportArgumentType]
        connect(config.ray)  # pyright: ignore[reportArgumentType]
        with single_run(config.tracking, config.ray.storage, folder, config.model_dump(mode="json")) as logger:
            records = influence(config, folder)
            taken = causal(config, records, folder)
            write_parquet(records, folder / "influence.parquet")
            write_parquet(taken, folder / "causal.parquet")
            closure = float(records.loc[records["record"] == "closure", "value"].max())
            logger.log({"lens/closure_error": closure, "lens/records": len(records) + len(taken)}, step=0)
            print(f"{len(records)} + {len(taken)} records in {folder}; closure error {closure:.1e}")


if __name__ == "__main__":
    raise SystemExit(main())

"""(method, seed) runs inside the workers: attach, evaluate, train, evaluate, save, prove the base unchanged, detach."""

import json
import logging
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist

from aarlib.config import write_text_atomically
from aarlib.moe.anatomy import anatomy
from aarlib.runtime import checkpoints, held_out
from aarlib.runtime.active import Active, activate, evaluate
from aarlib.runtime.batches import GlobalBatch
from aarlib.runtime.checkpoints import TrainingState, capture
from aarlib.runtime.engine import StepStats, train_step
from aarlib.runtime.population import Pending, PrefixCounts, enable_only, shared_prefix
from aarlib.runtime.routing import RoutingCounts, counting, routing_metrics
from aarlib.runtime.run_directory import append_line
from aarlib.runtime.session import Session, from_all_workers, from_rank_0, peak_gib, save_checkpoint, sum_over_workers
from aarlib.runtime.sharding import check_frozen, frozen_hash, gathered
from aarlib.training.adapter import fingerprint, save_adapter
from aarlib.training.methods import build_method

logger = logging.getLogger("aarlib")

BASE_HASH = "base_sha256"


class Progress(NamedTuple):
    steps: int
    tokens: int
    wall_s: float


class Trained(NamedTuple):
    progress: Progress
    prefix: dict[str, int] | None
    """PrefixCounts summed over the workers, since they started; None for methods without a frozen prefix."""


def train_runs(session: Session, pending: Sequence[Pending]) -> None:
    """Train runs side by side on the same batches to their end, each from its state where given, and write their artefacts.

    Several are aggregation heads that stopped at the same step; result.json of each comes last.
    """
    routers = [layer.router for layer in anatomy(session.model).layers if layer.router is not None]
    handles: list[Any] = []
    actives: list[Active] = []
    try:
        for run, state in pending:
            enable_only(None, handles)
            method = build_method(run.method, run.seed)
            with gathered([parameter for router in routers for parameter in router.parameters()]):
                handles.append(method.attach(session.model))
            actives.append(activate(session, run, method, handles[-1], state))
        before: list[tuple[pd.DataFrame, pd.DataFrame]] = []
        for active in actives:
            enable_only(active.handle, handles)
            before.append(_before(active))
        trained = _train(actives, pending[0].state)
        for active, frames in zip(actives, before, strict=True):
            enable_only(active.handle, handles)
            _after(active, *frames, trained)
            active.engine.destroy()
    finally:
        for handle in handles:
            handle.detach()


def _before(active: Active) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Held-out CE of the untouched model (once per run directory) and of the untrained method."""
    session = active.session
    path = session.folder / "untouched" / held_out.FILE
    if not from_rank_0(session, path.is_file):
        active.handle.enabled = False
        untouched = evaluate(active)
        active.handle.enabled = True
        if session.rank == 0:
            write_text_atomically(path.with_name(BASE_HASH), session.frozen)
        _write(active, untouched, path)
    _check_same_base(session, path.with_name(BASE_HASH))
    untouched = from_rank_0(session, partial(pd.read_parquet, path))
    logger.info("untouched: held-out CE %.4f on %d conversations", held_out.mean_ce(untouched), len(untouched))
    step0_path = active.folder / f"step0_{held_out.FILE}"
    if not from_rank_0(session, step0_path.is_file):
        _write(active, evaluate(active), step0_path)
    step0 = from_rank_0(session, partial(pd.read_parquet, step0_path))
    logger.info("%s: held-out CE %.4f before training", active.run.name, held_out.mean_ce(step0))
    return untouched, step0


def _check_same_base(session: Session, path: Path) -> None:
    stored = from_rank_0(session, partial(path.read_text, encoding="utf-8"))
    if stored != session.frozen:
        raise ValueError(
            f"model.name = {session.config.model.name!r}: the base is not the one this run directory was begun with (sha256 "
            f"{session.frozen[:16]}..., {stored[:16]}... there); use another name, or the old weights"
        )


def _train(actives: Sequence[Active], state: TrainingState | None) -> Trained:
    session, setup = actives[0].session, actives[0].setup
    start, tokens, earlier_s = (0, 0, 0.0) if state is None else (state.step, state.tokens, state.wall_s)
    begun = last_log = time.monotonic()
    tokens_logged = tokens
    handles = [active.handle for active in actives]
    order_seed = session.config.order_seed(actives[0].run.seed)
    with shared_prefix(session, [active.trainee.method for active in actives], handles) as prefix:
        for step, batch in zip(range(start, setup.total_steps), session.batches(order_seed, start), strict=False):
            tokens += batch.num_tokens
            parts = session.share(batch.rows)
            batches = [session.batch(part) for part in parts]
            if prefix is not None:
                batches = [prefix(tensors, part, step) for tensors, part in zip(batches, parts, strict=True)]
            is_logged = step % setup.optim.log_every == 0 or step == setup.total_steps - 1
            for active in actives:
                enable_only(active.handle, handles)
                stats = train_step(active.engine, batches, batch.num_targets, step, active.setup)
                if session.rank == 0:
                    append_line(active.folder / "rows.jsonl", {"step": step, "row_ids": batch.row_ids})
                if is_logged:
                    speed = (tokens - tokens_logged) / (time.monotonic() - last_log)
                    _log_step(active, step, batch, stats, speed, parts[0])
                if (step + 1) % session.config.ray.checkpoint_every == 0 and step + 1 < setup.total_steps:
                    wall_s = earlier_s + time.monotonic() - begun
                    _checkpoint(active, step, batch, stats, Progress(step + 1, tokens, wall_s))
            if is_logged:
                last_log, tokens_logged = time.monotonic(), tokens
    progress = Progress(setup.total_steps, tokens, earlier_s + time.monotonic() - begun)
    return Trained(progress, None if prefix is None else _over_workers(prefix.counts()))


def _over_workers(counts: PrefixCounts) -> dict[str, int]:
    sums = map(sum, zip(*from_all_workers(counts), strict=True))
    return PrefixCounts(*sums)._asdict()


def _checkpoint(active: Active, step: int, batch: GlobalBatch, stats: StepStats, progress: Progress) -> None:
    tensors = capture(active.engine, active.handle.trainable(), active.setup.zero_stage)
    metrics = {"step": step + 1, **_means(active, stats, batch), **_held_out(active, step)}
    save_checkpoint(active.session, TrainingState(active.run.name, *progress, tensors), metrics)


def _log_step(active: Active, step: int, batch: GlobalBatch, stats: StepStats, speed: float, rows: list[Any]) -> None:
    metrics = _means(active, stats, batch)
    metrics |= {
        "optim/grad_norm": stats.grad_norm,
        "optim/learning_rate": stats.learning_rate,
        "speed/tokens_per_s": speed,
        **_routing(active, rows),
    }
    if active.session.rank == 0:
        append_line(active.folder / "metrics.jsonl", {"step": step, **metrics})
        active.logger.log(metrics, step)
    logger.info(
        "%s  step %d/%d  ce %.4f  grad %.3f  lr %.2e  picks changed %.1f%%  %.0f tokens/s",
        active.run.name, step + 1, active.setup.total_steps, metrics.get("train/ce", float("nan")), stats.grad_norm,
        stats.learning_rate, 100 * metrics["routing/picks_changed"], speed,
    )  # fmt: skip


def _held_out(active: Active, step: int) -> dict[str, float]:
    """After step `step`, where the config asks for it at checkpoints."""
    if not active.session.config.ray.evaluate_at_checkpoints:
        return {}
    metrics = {"held_out/ce": held_out.mean_ce(evaluate(active))}
    if active.session.rank == 0:
        append_line(active.folder / "metrics.jsonl", {"step": step, **metrics})
        active.logger.log(metrics, step)
    return metrics


def _means(active: Active, stats: StepStats, batch: GlobalBatch) -> dict[str, float]:
    """Each loss term per target token of the global batch."""
    names = sorted(stats.sums)
    local = torch.tensor([stats.sums[name] for name in names], dtype=torch.float64)
    sums = sum_over_workers(local, active.session.device).tolist()
    return {f"train/{name}": value / batch.num_targets for name, value in zip(names, sums, strict=True)}


def _routing(active: Active, rows: list[Any]) -> dict[str, float]:
    """Routing on one micro-batch of every worker, with the parameters after the step."""
    batch = active.session.batch(rows)
    with torch.no_grad(), counting(active.session.model, batch["attention_mask"]) as counts:
        active.trainee(batch)
        mine = counts()
    totals = RoutingCounts(*(sum_over_workers(part, active.session.device) for part in mine))
    return routing_metrics(totals, anatomy(active.session.model).moe_layers)


def _after(active: Active, untouched: pd.DataFrame, step0: pd.DataFrame, trained: Trained) -> None:
    session, run, progress = active.session, active.run, trained.progress
    scored = evaluate(active)
    _write(active, scored, active.folder / held_out.FILE)
    after = frozen_hash(session.model)
    for value in from_all_workers(after):
        check_frozen(session.frozen, value)
    summary = {
        "label": run.label,
        "seed": run.seed,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "wall_s": round(progress.wall_s, 3),
        "num_trainable": active.handle.num_trainable,
        "untouched_ce": held_out.mean_ce(untouched),
        "step0_ce": held_out.mean_ce(step0),
        "held_out_ce": held_out.mean_ce(scored),
        "num_held_out": len(scored),
        "frozen_sha256_before": session.frozen,
        "frozen_sha256_after": after,
        "peak_gib": [round(value, 3) for value in from_all_workers(peak_gib(session.device))],
        "num_workers": session.world_size,
        "zero_stage": active.setup.zero_stage,
        "prefix_micro_batches": trained.prefix,
        "tracking_problems": active.logger.problems,
    }
    _save(active, summary)
    logger.info(
        "%s: held-out CE %.4f (untouched %.4f), frozen base unchanged, %.1f s",
        run.name, summary["held_out_ce"], summary["untouched_ce"], progress.wall_s,
    )  # fmt: skip


def _save(active: Active, summary: dict[str, Any]) -> None:
    """The adapter, MLflow's last metrics, then result.json. Under ZeRO-3 no more than one tensor of the base is ever whole."""
    base = fingerprint(active.session.model, gathered)
    with gathered([parameter for _, parameter in active.handle.trainable()]):
        if active.session.rank == 0:
            metadata = {
                key: summary[key] for key in ("label", "seed", "steps", "tokens", "held_out_ce", "untouched_ce")
            }
            metadata["model"] = active.session.config.model.model_dump(mode="json")
            metadata["data"] = active.session.config.data.model_dump(mode="json")
            path = active.folder / "adapter"
            save_adapter(active.handle, path, metadata=metadata, overwrite=True, base_fingerprint=base)
    if active.session.rank == 0:
        scores = {"held_out/ce": summary["held_out_ce"], "held_out/ce_step0": summary["step0_ce"]}
        active.logger.log({**scores, "held_out/ce_untouched": summary["untouched_ce"]}, summary["steps"])
        write_text_atomically(active.folder / "result.json", json.dumps(summary, indent=2))
        shutil.rmtree(active.folder / checkpoints.FOLDER, ignore_errors=True)
        active.session.push()
    dist.barrier()


def _write(active: Active, frame: pd.DataFrame, path: Path) -> None:
    if active.session.rank == 0:
        held_out.write_frame(frame, path)
    dist.barrier()

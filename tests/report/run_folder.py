"""A run directory as train, evaluate and a sweep leave it, with numbers that can be worked out by hand."""

import json
from pathlib import Path

import pandas as pd

from aarlib.training.config import RunConfig

NUM_ROWS = 40
GAINS = {("router_sft", 0): 0.10, ("router_sft", 1): 0.20, ("aar", 0): 0.30, ("aar", 1): 0.50}
"""Nats per token by which each model's held-out CE is below the untouched model's, on average."""


def run_config(name: str = "hand") -> RunConfig:
    return RunConfig.from_mapping(
        {
            "name": name,
            "seeds": [0, 1],
            "data": {"train": ["unused <script>"]},
            "method": {"aar": {"name": "aar", "layers": [1, 2], "window": 6}, "router_sft": {"name": "router_sft"}},
        }
    )


def held_out(gain: float, rows: range = range(NUM_ROWS), targets: int = 10) -> pd.DataFrame:
    """Row i has `targets` (odd rows twice as many) targets and gains 0 or twice `gain` per token, alternating by four."""
    counts = [targets * (1 + i % 2) for i in rows]
    ce = [2.0 - gain * (2 if (i // 2) % 2 else 0) for i in rows]
    return pd.DataFrame(
        {
            "row_id": [f"row{i:03d}" for i in rows],
            "ce_sum": [c * n for c, n in zip(ce, counts, strict=True)],
            "num_targets": counts,
        }
    )


def write_run(folder: Path, without: tuple[str, ...] = (), rows: range = range(NUM_ROWS), targets: int = 10) -> Path:
    config = run_config(folder.name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    _write(folder / "untouched" / "held_out.parquet", held_out(0.0, rows, targets))
    for run in config.runs():
        if run.name in without:
            continue
        gain = GAINS[run.label, run.seed]
        _write(folder / run.name / "held_out.parquet", held_out(gain, rows, targets))
        _write(folder / run.name / "step0_held_out.parquet", held_out(-0.05, rows, targets))
        metrics = [
            {
                "step": step,
                "train/ce": 2.0 - gain * step / 4,
                "routing/picks_changed": 0.1 * step,
                **{f"routing/picks_changed/layer_{layer}": 0.05 * layer * step for layer in range(3)},
                **{f"routing/expert_load_max_share/layer_{layer}": 0.2 + 0.01 * layer for layer in range(3)},
            }
            for step in range(5)
        ]
        (folder / run.name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
        result = {
            "num_trainable": 100 if run.label == "router_sft" else 300,
            "wall_s": 10.0 + run.seed,
            "peak_gib": [1.0, 1.25],
            "steps": 5,
            "num_workers": 2,
            "zero_stage": 0,
            "frozen_sha256_before": "ab",
            "frozen_sha256_after": "ab",
        }
        (folder / run.name / "result.json").write_text(json.dumps(result))
    return folder


def write_scores(folder: Path) -> None:
    settings = {"task_version": 1.0, "num_fewshot": 0, "batch_size": 4, "apply_chat_template": False}
    rows = [
        {
            "adapter": adapter,
            "asked": "quiz",
            "task": task,
            "metric": metric,
            "filter": "none",
            "value": value + offset + (0.1 if task == "quiz_easy" else 0.0),
            "stderr": 0.05,
            "higher_is_better": True,
            "num_documents": 80,
            "num_truncated": 0,
            "settings": json.dumps({**settings, "versions": {"lm_eval": "0.4.13"}}),
        }
        for adapter, value in [
            ("untouched", 0.25),
            ("router_sft-seed0", 0.5),
            ("aar-seed0", 0.625),
            ("aar-seed1", 0.75),
        ]
        for task in ("quiz_easy", "quiz")
        for metric, offset in [("acc_norm", 0.2), ("acc", 0.0)]
    ]
    _write(folder / "evaluation" / "scores.parquet", pd.DataFrame(rows))


def write_sweep(folder: Path) -> None:
    trials = [
        {
            "trial": f"0000{i}", "status": status, "held_out_ce": 1.5 + i, "against_untouched": -0.5 + i, "low": -0.6 + i,
            "high": -0.4 + i, "step0_ce": 2.0, "num_trainable": 300, "wall_s": 3.0,
            "method.aar.window": 8 * (i + 1), "method.aar.layers": layers,
        }
        for i, (status, layers) in enumerate([("finished", [1, 2, 3]), ("finished", [0, 2]), ("failed", [1, 2])])
    ]  # fmt: skip
    study = folder.parent / f"{folder.name}-windows"
    study.mkdir()
    (study / "results.json").write_text(json.dumps(trials))


def _write(path: Path, frame: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path, index=False)

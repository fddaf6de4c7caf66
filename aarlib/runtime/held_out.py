"""Held-out CE by conversation, split over the workers: no row lost, none counted twice."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from ray.data import DataIterator
from torch import nn

from aarlib.data.chat import Encoded
from aarlib.runtime.batches import encoded_rows, without_targets

FILE = "held_out.parquet"


def my_rows(shard: DataIterator, rank: int, world_size: int, micro_batch: int) -> list[list[Encoded]]:
    """This worker's rows in micro-batches of similar length; as many micro-batches on every worker (see `evaluate`)."""
    rows: list[Encoded] = []
    total = 0
    for batch in shard.iter_batches(batch_size=1024, batch_format="pyarrow", drop_last=False):
        batch_rows = encoded_rows(batch)
        rows += batch_rows[(rank - total) % world_size :: world_size]
        total += len(batch_rows)
    rows.sort(key=lambda row: (-len(row.input_ids), row.row_id))
    parts = [rows[start : start + micro_batch] for start in range(0, len(rows), micro_batch)]
    largest_share = math.ceil(total / world_size)
    missing = math.ceil(largest_share / micro_batch) - len(parts)
    filler = without_targets(rows[-1])._replace(row_id="") if rows else Encoded("", [0, 0], [False, False], False)
    return parts + [[filler]] * missing


def evaluate(trainee: nn.Module, parts: Sequence[Sequence[Encoded]], collate: Any) -> pd.DataFrame:
    """Columns row_id, ce_sum (float64), num_targets of every held-out row, sorted by row_id; the same on every worker."""
    mine: list[tuple[str, float, int]] = []
    with torch.no_grad():
        for rows in parts:
            result = trainee(collate(rows))
            ce_sums, counts = result["ce_sum_B"].double().tolist(), result["num_targets_B"].tolist()
            mine += [(row.row_id, ce, n) for row, ce, n in zip(rows, ce_sums, counts, strict=True) if row.row_id]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    frame = pd.DataFrame([row for part in everyone for row in part], columns=["row_id", "ce_sum", "num_targets"])
    return frame.sort_values("row_id", ignore_index=True)


def mean_ce(frame: pd.DataFrame) -> float:
    """Nats per target token."""
    return float(np.sum(frame["ce_sum"].to_numpy()) / np.sum(frame["num_targets"].to_numpy()))


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    frame.to_parquet(temporary, index=False)
    temporary.replace(path)

"""From the ordered rows of an epoch to the micro-batches of one worker.

Every worker streams whole global batches (1024 x 512 tokens are 2 MB) and takes its share, so that all know the global count of
targets and a batch's rows do not depend on the number of workers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ray.data import DataIterator

from aarlib.data.chat import Encoded


class GlobalBatch(NamedTuple):
    rows: list[Encoded]

    @property
    def row_ids(self) -> list[str]:
        return [row.row_id for row in self.rows]

    @property
    def num_targets(self) -> int:
        return sum(row.num_targets for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)


def global_batches(shard: DataIterator, global_batch: int, skip: int = 0) -> Iterator[GlobalBatch]:
    """The global batches of one epoch, the first `skip` passed over; the last may be short, no row is dropped."""
    for index, table in enumerate(shard.iter_batches(batch_size=global_batch, batch_format="pyarrow", drop_last=False)):
        if index >= skip:
            yield GlobalBatch(encoded_rows(table))


def encoded_rows(table: Any) -> list[Encoded]:
    columns = [table.column(name).to_pylist() for name in ("row_id", "input_ids", "target_mask")]
    units = table.column("unit").to_pylist() if "unit" in table.column_names else [-1] * len(columns[0])
    return [
        Encoded(row_id, ids, mask, truncated=False, unit=unit)
        for row_id, ids, mask, unit in zip(*columns, units, strict=True)
    ]


def steps_per_epoch(num_rows: int, global_batch: int) -> int:
    return math.ceil(num_rows / global_batch)


def micro_batches(rows: Sequence[Encoded], rank: int, world_size: int, micro_batch: int) -> list[list[Encoded]]:
    """The worker's share of a global batch in lists of at most `micro_batch` rows, as many lists on every worker.

    Rows are dealt in order of length, so workers get equal work and micro-batches little padding. Where rows run out, a
    micro-batch is one row stripped of its targets: it contributes 0 and keeps the workers' collectives in step.
    """
    by_length = sorted(rows, key=lambda row: (-len(row.input_ids), row.row_id))
    mine = by_length[rank::world_size]
    parts = [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)]
    filler = [without_targets(by_length[-1])]
    return parts + [filler] * (num_micro_batches(len(rows), world_size, micro_batch) - len(parts))


def num_micro_batches(num_rows: int, world_size: int, micro_batch: int) -> int:
    return math.ceil(math.ceil(num_rows / world_size) / micro_batch)


def without_targets(row: Encoded) -> Encoded:
    return row._replace(target_mask=[False] * len(row.target_mask))

"""Global batches to micro-batches: every row once, whatever the number of workers; fillers have no targets."""

import pytest

from aarlib.data.chat import Encoded
from aarlib.runtime.batches import GlobalBatch, micro_batches, num_micro_batches, steps_per_epoch


def rows(count: int) -> list[Encoded]:
    lengths = [(7 * index) % 11 + 2 for index in range(count)]
    return [Encoded(f"r{i}", list(range(n)), [j > 0 for j in range(n)], False) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("count", "world_size", "micro_batch", "num_micro"),
    [(16, 1, 4, 4), (16, 2, 2, 4), (13, 3, 2, 3), (13, 4, 2, 2), (1, 2, 2, 1)],
)
def test_every_row_once_and_equally_many_micro_batches(
    count: int, world_size: int, micro_batch: int, num_micro: int
) -> None:
    batch = rows(count)
    parts = [micro_batches(batch, rank, world_size, micro_batch) for rank in range(world_size)]
    assert num_micro == num_micro_batches(count, world_size, micro_batch)
    assert all(len(part) == num_micro for part in parts)
    assert all(1 <= len(micro) <= micro_batch for part in parts for micro in part)
    kept = [row for part in parts for micro in part for row in micro if row.num_targets]
    assert sorted(row.row_id for row in kept) == sorted(row.row_id for row in batch)


def test_a_filler_has_no_targets() -> None:
    parts = micro_batches(rows(5), rank=1, world_size=2, micro_batch=1)
    assert [sum(row.num_targets for row in micro) for micro in parts][-1] == 0


def test_counts() -> None:
    batch = GlobalBatch(rows(3))
    assert batch.num_targets == sum(len(row.input_ids) - 1 for row in batch.rows)
    assert steps_per_epoch(61, 8) == 8

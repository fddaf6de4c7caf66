"""Best-fit packing: several conversations in one row, their attention, positions and windows kept apart.

Packing happens inside a global batch, so that it changes how much padding is computed and nothing else: the rows of a step, its
target count and its gradient are those of the unpacked step.
"""

import bisect
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from aarlib.data.chat import Encoded, collate


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices of total length at most `capacity`: longest first, each into the fullest bin that still holds it."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """(space left, bin), sorted."""
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a row of {length} tokens does not fit a packed row of {capacity}; cut it first")
        place = bisect.bisect_left(free, (length, -1))
        space, number = free.pop(place) if place < len(free) else (capacity, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        bisect.insort(free, (space - length, number))
    return bins


def pack(rows: Sequence[Encoded], sequence_length: int) -> list[Encoded]:
    """`rows` in as few rows of at most `sequence_length` tokens as best fit finds; the same for the same set of rows.

    The first token of a document is no target: nothing before it predicts it.
    """
    rows = sorted(rows, key=lambda row: row.row_id)
    bins = best_fit([len(row.input_ids) for row in rows], sequence_length)
    return [_joined([rows[index] for index in members]) for members in bins]


def collate_packed(
    rows: Sequence[Encoded], pad_token_id: int, multiple: int = 8, sequence_length: int | None = None
) -> dict[str, Int[Tensor, "B S"]]:
    """`collate`, and `position_ids` that restart at 0 at each document and at the padding.

    The model gets the positions and no attention mask (`packed_inputs`); `attention_mask` says which tokens are real.
    """
    batch = collate(rows, pad_token_id, multiple, sequence_length)
    position_ids = torch.zeros_like(batch["input_ids"])
    for index, row in enumerate(rows):
        lengths = row.documents or (len(row.input_ids),)
        lengths = (*lengths, position_ids.shape[1] - sum(lengths))
        position_ids[index] = torch.cat([torch.arange(length) for length in lengths])
    return {**batch, "position_ids": position_ids}


def _joined(rows: Sequence[Encoded]) -> Encoded:
    ids = [token for row in rows for token in row.input_ids]
    mask = [is_target and index > 0 for row in rows for index, is_target in enumerate(row.target_mask)]
    return Encoded(
        "+".join(row.row_id for row in rows),
        ids,
        mask,
        any(row.truncated for row in rows),
        tuple(len(row.input_ids) for row in rows),
    )

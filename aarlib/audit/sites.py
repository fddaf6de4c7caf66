"""Where an audit acts: a token of a document. Documents are the runs of real tokens that padding and packing delimit."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

IGNORED = -100


class Document(NamedTuple):
    """Columns [start, stop) of one row."""

    row: int
    start: int
    stop: int


class Site(NamedTuple):
    """Token `offset` of a document and the targets that its horizon covers."""

    row: int
    position: int
    tokens: Int[Tensor, " N"]
    """The document's tokens, from its first on."""
    offset: int
    num_targets: int
    layers: tuple[int, ...]


class Aligned(NamedTuple):
    """Sites in one batch: prefixes padded on the left so that every site's token is column P, suffixes on the right."""

    input_ids: Int[Tensor, "B S"]
    mask: Int[Tensor, "B S"]
    position_ids: Int[Tensor, "B S"]
    targets: Int[Tensor, "B H"]
    """Next tokens of columns P .. P + H - 1; -100 beyond a site's horizon."""
    prefix: int
    """P."""


def documents(
    input_ids: Int[Tensor, "B S"],
    attention_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    position_ids: Int[Tensor, "B S"] | None = None,
) -> list[Document]:
    """Every document, by row; a document starts where real tokens do and where position_ids restart at 0."""
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if real.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(real.shape)} and input_ids {tuple(input_ids.shape)}; pass one entry a token"
        )
    found = []
    for row in range(input_ids.shape[0]):
        columns = real[row].nonzero()[:, 0].tolist()
        if not columns:
            continue
        start, stop = columns[0], columns[-1] + 1
        if len(columns) != stop - start:
            raise ValueError(
                f"attention_mask[{row}] has a gap: real tokens of a row must be one run; pad left or right"
            )
        starts = [start]
        if position_ids is not None:
            restarts = (position_ids[row, start + 1 : stop] == 0).nonzero()[:, 0].tolist()
            starts += [start + 1 + column for column in restarts]
        edges = [*starts, stop]
        found += [Document(row, first, last) for first, last in zip(edges, edges[1:], strict=False)]
    return found


def sites(
    input_ids: Int[Tensor, "B S"],
    found: Sequence[Document],
    samples: Iterable[tuple[int, int, int]],
    horizon: int | None,
) -> list[Site]:
    """One site for each (row, position) of `samples`, with its layers; in order of first appearance.

    Raises ValueError for a position outside the rows, on padding, or without a target, and for a horizon below 1.
    """
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon = {horizon}: give the number of targets, 1 or more, or None for all")
    layers: dict[tuple[int, int], list[int]] = {}
    for row, position, layer in samples:
        layers.setdefault((int(row), int(position)), []).append(int(layer))
    if not layers:
        raise ValueError("samples is empty; give (row, position, layer) triples")
    return [_site(input_ids, found, *place, horizon, tuple(chosen)) for place, chosen in layers.items()]


def _site(
    input_ids: Tensor, found: Sequence[Document], row: int, position: int, horizon: int | None, layers: tuple[int, ...]
) -> Site:
    shape = tuple(input_ids.shape)
    if not (0 <= row < shape[0] and 0 <= position < shape[1]):
        raise ValueError(f"samples: (row, position) = ({row}, {position}) is outside input_ids {shape}")
    document = next((item for item in found if item.row == row and item.start <= position < item.stop), None)
    if document is None:
        raise ValueError(f"samples: position {position} of row {row} is padding; choose a real token")
    following = document.stop - 1 - position
    if following == 0:
        raise ValueError(
            f"samples: position {position} of row {row} is the last of its document and has no target; choose an earlier one"
        )
    if len(set(layers)) != len(layers):
        raise ValueError(f"samples: a layer occurs twice at row {row}, position {position}; give each triple once")
    num_targets = following if horizon is None else min(horizon, following)
    tokens = input_ids[row, document.start : document.stop]
    return Site(row, position, tokens, position - document.start, num_targets, layers)


def align(batch: Sequence[Site]) -> Aligned:
    prefix, length = max(site.offset for site in batch), max(site.num_targets for site in batch)
    shape = (len(batch), prefix + length)
    input_ids = batch[0].tokens.new_zeros(shape)
    mask, targets = torch.zeros_like(input_ids), input_ids.new_full((len(batch), length), IGNORED)
    for row, site in enumerate(batch):
        start, stop = prefix - site.offset, prefix + site.num_targets
        input_ids[row, start:stop] = site.tokens[: stop - start]
        mask[row, start:stop] = 1
        targets[row, : site.num_targets] = site.tokens[site.offset + 1 : site.offset + 1 + site.num_targets]
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    return Aligned(input_ids, mask, position_ids, targets, prefix)

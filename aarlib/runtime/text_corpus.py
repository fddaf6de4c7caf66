"""Plain text to windows with Ray Data: sources -> documents -> split -> windows -> units of one domain each.

Row i of the global order belongs to unit i div unit_rows, unit u to domain u mod d. An epoch ends when the domain with most
windows has given each of them once; the others start again, in a new order, as often as that takes.
"""

import json
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.dataset import MaterializedDataset
from ray.exceptions import RayTaskError

from aarlib.data.chat import Encoded
from aarlib.data.conversations import file_name
from aarlib.data.corpora import (
    FORMATS,
    TextDocument,
    read_documents,
    separator_id,
    split_of,
    windows,
)
from aarlib.data.sampling import in_fraction, row_hash
from aarlib.data.sources import expand_sources
from aarlib.runtime.corpus import Corpus, by_hash, digest, digest_text, map_blocks, quiet_ray_data
from aarlib.runtime.encoding import tokenizer_of
from aarlib.runtime.failures import user_error
from aarlib.training.config import DataConfig, ModelConfig, TextDomain

logger = logging.getLogger("aarlib")


class Source(NamedTuple):
    domain: int
    """Index of the domain in the config."""
    path: str
    documents: str
    column: str = "text"


def find_texts(data: DataConfig) -> list[Source]:
    """Every file of every domain; a ValueError for a pattern that names nothing. `$NAME` is taken from the environment."""
    sources = [
        Source(index, path, domain.documents, domain.column)
        for index, (name, domain) in enumerate(data.domains.items())
        for path in _paths(name, domain)
    ]
    names = [source.path if source.path.startswith("nano:") else file_name(source.path) for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"data.domains: {twice[0]!r} is named twice; row ids hold the file name, so rename one")
    return sources


def _paths(name: str, domain: TextDomain) -> list[str]:
    bundled = [pattern for pattern in domain.text if pattern.startswith("nano:")]
    for pattern in bundled:
        _parse_register(pattern)
    files = [os.path.expandvars(pattern) for pattern in domain.text if not pattern.startswith("nano:")]
    try:
        return bundled + (expand_sources(files, FORMATS) if files else [])
    except ValueError as error:
        raise ValueError(f"data.domains.{name}: {str(error).removeprefix('data.train: ')}") from None


def documents_of(source: Source) -> Iterator[TextDocument]:
    """The documents of a file, or articles of the bundled world."""
    if not source.path.startswith("nano:"):
        documents: Any = source.documents
        yield from read_documents(source.path, documents, source.column)
        return
    from aarlib.nano.config import WorldConfig
    from aarlib.nano.world import register_texts

    register, count = _parse_register(source.path)
    for index, text in enumerate(register_texts(WorldConfig(), register, count)):
        yield TextDocument(f"nano:{register}:{index}", text)


def build_text_corpus(model: ModelConfig, data: DataConfig) -> Corpus:
    """Windows of every domain; a ValueError before any worker starts where a domain is too small for its splits."""
    sources = [source._asdict() for source in find_texts(data)]
    quiet_ray_data()
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    listed = ray.data.from_items(sources, override_num_blocks=len(sources))
    settings = {"model": model.model_dump(mode="json"), "data": data.model_dump(mode="json")}
    try:
        encoded = map_blocks(listed, read_windows, **settings).materialize()
    except RayTaskError as error:
        raise user_error(error) from error
    counts = np.array([len(ids) for ids in _ids_by_domain(encoded, data)])
    _check_counts(data, counts)
    held_out = by_hash(encoded, "held_out_order", held_out=True)
    if data.max_held_out is not None:
        held_out = held_out.limit(data.max_held_out)
    held_out = held_out.materialize()
    if held_out.count() < 2:
        raise ValueError(
            f"data.held_out = {data.held_out} leaves {held_out.count()} windows to evaluate on; at least 2 are needed: give "
            "more documents, or raise it"
        )
    units = -(-counts.max() // data.unit_rows) * len(counts)
    for name, count in zip(data.domains, counts.tolist(), strict=True):
        passes = units // len(counts) * data.unit_rows / count
        logger.info("%s: %d windows to train on, %.2f passes over them an epoch", name, count, passes)
    num_train = int(units) * data.unit_rows
    targets = num_train * (data.sequence_length - 1)
    digests = map_blocks(encoded, _digests).take_all()
    total = digest_text(sum(int(block["digest"]) for block in digests))
    return Corpus(encoded, held_out, num_train, held_out.count(), targets, 0, digest=total)


def _check_counts(data: DataConfig, counts: Any) -> None:
    for name, count in zip(data.domains, counts.tolist(), strict=True):
        if count == 0:
            raise ValueError(
                f"data.domains.{name}: its training documents fill no window of data.sequence_length = "
                f"{data.sequence_length}; give more text, shorten the windows, or lower data.held_out and data.test"
            )


def read_windows(table: pa.Table, model: dict[str, Any], data: dict[str, Any]) -> pa.Table:
    """The training and development windows of the table's sources; the test split is left out."""
    settings = DataConfig.from_mapping(data)
    tokenizer = tokenizer_of(json.dumps(model, sort_keys=True))
    rows: list[tuple[int, bool, Encoded]] = []
    for source in (Source(**row) for row in table.to_pylist()):
        kept: dict[str, list[TextDocument]] = {"train": [], "development": [], "test": []}
        for document in documents_of(source):
            if in_fraction(document.doc_id, settings.sample, "sample"):
                kept[split_of(document.doc_id, settings.held_out, settings.test)].append(document)
        for split in ("train", "development"):
            found = windows(kept[split], tokenizer, settings.sequence_length, separator_id(tokenizer))
            rows += [(source.domain, split == "development", row) for row in found]
    return pa.table(
        {
            "pattern": pa.array([domain for domain, _, _ in rows], pa.int64()),
            "problem": pa.array([None] * len(rows), pa.string()),
            "row_id": pa.array([row.row_id for _, _, row in rows], pa.string()),
            "input_ids": pa.array([row.input_ids for _, _, row in rows], pa.list_(pa.int32())),
            "target_mask": pa.array([row.target_mask for _, _, row in rows], pa.list_(pa.bool_())),
            "num_targets": pa.array([row.num_targets for _, _, row in rows], pa.int64()),
            "held_out": pa.array([held_out for _, held_out, _ in rows], pa.bool_()),
        }
    )


def ordered_units(corpus: Corpus, data: DataConfig, seed: int, epoch: int) -> MaterializedDataset:
    """The training windows in the order in which (seed, epoch) sees them, with the number of their unit."""
    ids_by_domain = _ids_by_domain(corpus.encoded, data)
    places = unit_order([ids.tolist() for ids in ids_by_domain], data.unit_rows, f"{seed}/{epoch}")
    first_unit = epoch * (corpus.num_train // data.unit_rows)
    placed = map_blocks(
        corpus.encoded, _placed, places=ray.put(places), unit_rows=data.unit_rows, first_unit=first_unit
    )
    return placed.sort("place").materialize()


def unit_order(ids_by_domain: list[list[str]], unit_rows: int, salt: str) -> dict[str, list[int]]:
    """Row id -> the places it takes in the order: unit u is the next `unit_rows` rows of domain u mod d.

    A domain's rows come in the order of a hash of (salt, pass, row id), pass after pass, until the largest domain is through.
    """
    num_domains = len(ids_by_domain)
    units_each = -(-max(len(ids) for ids in ids_by_domain) // unit_rows)
    places: dict[str, list[int]] = {}
    for domain, ids in enumerate(ids_by_domain):
        stream = _passes(ids, units_each * unit_rows, salt)
        for index, row_id in enumerate(stream):
            unit = index // unit_rows * num_domains + domain
            places.setdefault(row_id, []).append(unit * unit_rows + index % unit_rows)
    return places


def _passes(ids: list[str], size: int, salt: str) -> list[str]:
    rows: list[str] = []
    while len(rows) < size:
        number = len(rows) // len(ids)
        rows += sorted(ids, key=lambda row_id: row_hash(row_id, f"{salt}/{number}"))
    return rows[:size]


def _ids_by_domain(encoded: Any, data: DataConfig) -> list[Any]:
    """Row ids of the training windows of each domain; ids only are held here, never rows."""
    blocks = list(map_blocks(encoded, _train_ids).iter_batches(batch_size=None, batch_format="numpy"))
    if not blocks:
        return [np.array([], dtype=object)] * len(data.domains)
    domains, ids = (np.concatenate([block[name] for block in blocks]) for name in ("pattern", "row_id"))
    return [ids[domains == index] for index in range(len(data.domains))]


def _digests(table: pa.Table) -> pa.Table:
    return pa.table({"digest": pa.array([digest(table)])})


def _train_ids(table: pa.Table) -> pa.Table:
    return table.filter(pa.array(~table["held_out"].to_numpy())).select(["pattern", "row_id"])


def _placed(table: pa.Table, places: Any, unit_rows: int, first_unit: int) -> pa.Table:
    places = ray.get(places) if isinstance(places, ray.ObjectRef) else places
    found = [(row, place) for row, row_id in enumerate(table["row_id"].to_pylist()) for place in places.get(row_id, ())]
    rows, at = (np.array([pair[side] for pair in found], dtype=np.int64) for side in (0, 1))
    taken = table.take(pa.array(rows)).select(["row_id", "input_ids", "target_mask"])
    return taken.append_column("place", pa.array(at)).append_column("unit", pa.array(first_unit + at // unit_rows))


class _Articles(NamedTuple):
    register: str
    number: int


def _parse_register(source: str) -> _Articles:
    from aarlib.nano.encyclopaedia import REGISTERS

    parts = source.split(":")
    if len(parts) != 3 or parts[1] not in REGISTERS or not parts[2].isdecimal() or int(parts[2]) == 0:
        raise ValueError(
            f"text = {source!r} is not of the form nano:<register>:<number of articles> with a register of "
            f"{', '.join(REGISTERS)}"
        )
    return _Articles(parts[1], int(parts[2]))

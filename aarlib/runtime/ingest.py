"""A Hub dataset to local parquet shards, once: streamed, resumable, described by a manifest."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from huggingface_hub import HfApi

from aarlib.config import write_text_atomically
from aarlib.data.conversations import OnBadRow, ReadReport, parse_conversation

logger = logging.getLogger("aarlib")

MANIFEST = "manifest.json"
ROWS_PER_SHARD = 10_000


@dataclass
class Shard:
    file: str
    rows: int
    sha256: str


@dataclass
class Manifest:
    """What lies in an ingested folder; written after every shard."""

    dataset: str
    revision: str | None
    """Commit of the Hub dataset, so that a resumed ingest reads the same rows; None for a local folder."""
    split: str
    rows_per_shard: int
    complete: bool = False
    rows_read: int = 0
    skipped: int = 0
    shards: list[Shard] = field(default_factory=list)
    config: str | None = None
    """The dataset's configuration."""
    max_rows: int | None = None
    text_column: str | None = None
    """The column of plain text, where the rows are no conversations."""
    asked_revision: str | None = None
    """Branch, tag or commit that was asked for; None: the main branch."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def ingest(
    dataset: str,
    pattern: str,
    split: str = "train",
    on_bad_row: OnBadRow = "error",
    rows_per_shard: int = ROWS_PER_SHARD,
    config: str | None = None,
    max_rows: int | None = None,
    text_column: str | None = None,
    revision: str | None = None,
) -> Manifest:
    """Stream `dataset`, a Hub id or a folder `datasets` reads, into the folder of `pattern` (data/tulu3/*.parquet).

    Rows are conversations, or with `text_column` plain text. Starts where an interrupted call stopped and does nothing where
    the folder is complete. A ValueError, before anything is written, where the folder holds something else or the dataset is
    not reached.
    """
    folder, stem = _target(pattern, dataset)
    asked = Manifest(
        dataset, None, split, rows_per_shard, config=config, max_rows=max_rows, text_column=text_column, asked_revision=revision
    )  # fmt: skip
    manifest = _open_manifest(folder, asked)
    if manifest.complete:
        return manifest
    started, first = time.monotonic(), manifest.rows_read
    for rows in _shards_of_rows(manifest):
        kept = _texts_in(rows, manifest) if text_column else _conversations_in(rows, manifest, on_bad_row)
        if kept:
            manifest.shards.append(_write_shard(folder, f"{stem}-{len(manifest.shards):05d}.parquet", kept))
        manifest.rows_read += len(rows)
        _save(manifest, folder)
        speed = (manifest.rows_read - first) / (time.monotonic() - started)
        logger.info("%s: %d rows in %d shards, %.0f rows/s", dataset, manifest.rows, len(manifest.shards), speed)
    if not manifest.shards:
        raise ValueError(
            f"data.hub = {dataset!r}: split {split!r} has no row to keep ({manifest.skipped} rows skipped)"
        )
    manifest.complete = True
    _save(manifest, folder)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Manifest(**{**values, "shards": [Shard(**shard) for shard in values["shards"]]})


def _target(pattern: str, dataset: str) -> tuple[Path, str]:
    """The folder to fill and the stem of its shards: the dataset's name, for row ids are <file name>:<row>."""
    path = Path(pattern).expanduser()
    stem = dataset.rstrip("/").rsplit("/", 1)[-1]
    if "://" in pattern or any(character in str(path.parent) for character in "*?["):
        raise ValueError(
            f"data.train = {pattern!r} is no local folder to ingest into; use one such as data/name/*.parquet"
        )
    if not fnmatch(f"{stem}-00000.parquet", path.name):
        raise ValueError(
            f"data.train = {pattern!r} would not find the shards {stem}-00000.parquet; end it in *.parquet"
        )
    return path.parent, stem


def _open_manifest(folder: Path, asked: Manifest) -> Manifest:
    """The folder's manifest with its shards checked, or a new one."""
    manifest = read_manifest(folder)
    if manifest is None:
        if folder.is_dir() and any(folder.glob("*.parquet")):
            raise ValueError(
                f"{folder} holds parquet files but no {MANIFEST}; remove data.hub to use them, or name an empty folder"
            )
        return replace(asked, revision=_current_revision(asked.dataset, asked.asked_revision))
    if (manifest.dataset, manifest.split) != (asked.dataset, asked.split):
        raise ValueError(
            f"{folder} holds {manifest.dataset!r} ({manifest.split}), not {asked.dataset!r} ({asked.split}); "
            "name another folder"
        )
    for name in ("config", "max_rows", "text_column", "asked_revision"):
        found, wanted = getattr(manifest, name), getattr(asked, name)
        if found != wanted:
            raise ValueError(f"{folder} was ingested with {name} = {found!r}, not {wanted!r}; name another folder")
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file() or _sha256(path) != shard.sha256:
            raise ValueError(f"{path} is missing or changed since it was ingested; restore it, or remove {folder}")
    return manifest


def _current_revision(dataset: str, asked: str | None) -> str | None:
    if Path(dataset).is_dir():
        return None
    try:
        return HfApi().dataset_info(dataset, revision=asked).sha
    except OSError as error:
        raise ValueError(_unreachable(dataset, error)) from error


def _unreachable(dataset: str, error: Exception) -> str:
    return (
        f"data.hub = {dataset!r} is not reached: {error}; check name and network, or put files where data.train looks"
    )


def _shards_of_rows(manifest: Manifest) -> Iterator[list[dict[str, Any]]]:
    try:
        stream = load_dataset(
            manifest.dataset, manifest.config, split=manifest.split, revision=manifest.revision, streaming=True
        )
        left = None if manifest.max_rows is None else max(0, manifest.max_rows - manifest.rows_read)
        rows = islice(stream.skip(manifest.rows_read), left)
        while part := list(islice(rows, manifest.rows_per_shard)):
            yield part
    except (OSError, RuntimeError) as error:
        raise ValueError(_unreachable(manifest.dataset, error)) from error


def _conversations_in(rows: list[dict[str, Any]], manifest: Manifest, on_bad_row: OnBadRow) -> list[dict[str, Any]]:
    report = ReadReport()
    kept: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=manifest.rows_read + 1):
        try:
            parse_conversation(row, row_id="")
        except ValueError as error:
            problem = f"data.hub = {manifest.dataset!r}, row {number}: {error}"
            if on_bad_row == "error":
                raise ValueError(f'{problem}; set data.on_bad_row = "skip" to leave such rows out') from None
            report.skip(problem)
            continue
        kept.append(_as_text(row))
    manifest.skipped += report.skipped
    for problem in report.examples:
        logger.warning("skipped: %s", problem)
    return kept


def _texts_in(rows: list[dict[str, Any]], manifest: Manifest) -> list[dict[str, Any]]:
    column = str(manifest.text_column)
    for number, row in enumerate(rows, start=manifest.rows_read + 1):
        if not isinstance(row.get(column), str):
            raise ValueError(
                f"hub = {manifest.dataset!r}, row {number}: no string under {column!r} (columns: {', '.join(row)}); "
                "set hub_column"
            )
    return [{"text": row[column]} for row in rows]


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """The row with every value but the list of messages as text, JSON where it was none: one schema for all rows."""
    messages = [{key: _text(value) for key, value in message.items()} for message in row["messages"]]
    return {**{key: _text(value) for key, value in row.items()}, "messages": messages}


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(_without_nulls(value), ensure_ascii=False, default=str)


def _without_nulls(value: Any) -> Any:
    """Without the nulls that a table's common schema puts into every nested object."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _write_shard(folder: Path, name: str, rows: list[dict[str, Any]]) -> Shard:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    pq.write_table(pa.Table.from_pylist(rows), temporary, compression="zstd")
    shard = Shard(name, len(rows), _sha256(temporary))
    os.replace(temporary, folder / name)
    return shard


def _save(manifest: Manifest, folder: Path) -> None:
    write_text_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

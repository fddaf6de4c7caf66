"""Fetch a run's conversations or texts where needed, count what the run will make of them, and show where its targets are.

Also takes the config of an FDAA study, for the texts that it evaluates on.
"""

import logging
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aarlib.runtime.fdaa_config import FDAAStudyConfig
from aarlib.training.config import DataConfig, RunConfig, TextDomain
from pipelines.command_line import parse_verb

if TYPE_CHECKING:
    from aarlib.data import Conversation, ReadReport
    from aarlib.data.conversations import OnBadRow
    from aarlib.data.survey import Survey


@dataclass(frozen=True)
class Flags:
    show: int = 0
    """Print this many conversations with their target tokens in [[ ]]."""


def main(argv: list[str] | None = None) -> None:
    arguments = parse_verb(config_class(argv), __doc__, argv, flags=Flags)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        if isinstance(arguments.config, FDAAStudyConfig):
            prepare_study(arguments.config, arguments.dry_run)
        else:
            prepare(arguments.config, arguments.extras.show, arguments.dry_run)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def config_class(argv: Sequence[str] | None) -> type[RunConfig] | type[FDAAStudyConfig]:
    """That of `study` where a named file has a table [fdaa]."""
    for token in sys.argv[1:] if argv is None else argv:
        if token.endswith(".toml") and Path(token).is_file() and "fdaa" in _tables(Path(token)):
            return FDAAStudyConfig
    return RunConfig


def _tables(path: Path) -> list[str]:
    try:
        return list(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # parse_verb says what is wrong with it
        return []


def prepare(config: RunConfig, show: int, dry_run: bool) -> None:
    from aarlib.data import ReadReport, check_template, render_targets
    from aarlib.data.sources import find_sources
    from aarlib.data.survey import survey
    from aarlib.moe.loading import load_tokenizer

    data = config.data
    if data.domains:
        ingest_texts(data.domains, dry_run)
        if not dry_run:
            count_documents(data)
        return
    if data.hub is not None and dry_run:
        print(f"would ingest {data.hub} into {data.train[0]}")
        return
    if data.hub is not None:
        from aarlib.runtime.ingest import ingest

        manifest = ingest(data.hub, data.train[0], on_bad_row=data.on_bad_row)
        print(f"{data.hub}@{manifest.revision}: {manifest.rows} rows in {len(manifest.shards)} shards")
    sources = find_sources(data.train)
    tokenizer = load_tokenizer(config.model.name, config.model.revision, config.model.chat_template)
    check_template(tokenizer)
    report = ReadReport()
    found = survey(
        tokenizer,
        read_sources(sources, data.on_bad_row, report),
        sequence_length=data.sequence_length,
        sample=data.sample,
        held_out=data.held_out,
        num_examples=show,
        on_bad_row=data.on_bad_row,
        report=report,
    )
    print(table(found, report, data))
    for row in found.examples:
        print(f"\n--- {row.row_id}{' (truncated)' if row.truncated else ''}\n{render_targets(tokenizer, row)}")


def ingest_texts(domains: Mapping[str, TextDomain], dry_run: bool) -> None:
    """The domains that name a hub dataset, each once."""
    from aarlib.runtime.ingest import ingest

    for name, domain in domains.items():
        if domain.hub is not None and dry_run:
            print(f"would ingest {domain.hub} into {domain.text[0]}")
        elif domain.hub is not None:
            manifest = ingest(
                domain.hub, domain.text[0], domain.hub_split, config=domain.hub_config, max_rows=domain.hub_rows,
                text_column=domain.hub_column, revision=domain.hub_revision,
            )  # fmt: skip
            print(f"{name}: {domain.hub}@{manifest.revision}: {manifest.rows} rows in {len(manifest.shards)} shards")


def count_documents(data: DataConfig) -> None:
    """Print how many documents each split of every domain has."""
    from collections import Counter

    from aarlib.data.corpora import split_of
    from aarlib.runtime.text_corpus import documents_of, find_texts

    counts = {name: Counter[str]() for name in data.domains}
    for source in find_texts(data):
        splits = (split_of(document.doc_id, data.held_out, data.test) for document in documents_of(source))
        counts[tuple(data.domains)[source.domain]].update(splits)
    for name, count in counts.items():
        print(
            f"{name}: "
            + ", ".join(f"{count[split]:,} {split}" for split in ("train", "development", "test"))
            + " documents"
        )


def prepare_study(config: FDAAStudyConfig, dry_run: bool) -> None:
    """The texts of a study; files that no training reads have no training split."""
    ingest_texts(config.fdaa.domains, dry_run)
    for name in () if dry_run else config.fdaa.domains:
        count_documents(config.fdaa.data(name))


def read_sources(sources: list[str], on_bad_row: "OnBadRow", report: "ReadReport") -> "Iterator[Conversation]":
    from aarlib.data import read_conversations

    for source in sources:
        if source.startswith("nano:"):
            from aarlib.nano import conversations

            _, split, rows = source.split(":")
            yield from conversations(split, int(rows))
        else:
            yield from read_conversations(source, on_bad_row, report)


def table(found: "Survey", report: "ReadReport", data: DataConfig) -> str:
    share = found.targets / found.tokens if found.tokens else 0.0
    lines = [
        ("conversations", found.conversations, ""),
        ("skipped rows", report.skipped, report.examples[0] if report.examples else ""),
        ("kept sample", found.kept, f"data.sample = {data.sample}"),
        ("to train on", found.train, ""),
        ("held out", found.held_out, f"data.held_out = {data.held_out}, data.max_held_out = {data.max_held_out}"),
        ("without targets", found.without_targets, "neither trained nor evaluated on"),
        ("truncated", found.truncated, f"data.sequence_length = {data.sequence_length}"),
        ("tokens", found.tokens, ""),
        ("target tokens", found.targets, f"{share:.1%} of the tokens"),
    ]
    return "\n".join(f"{name:<16}{value:>12,}  {note}".rstrip() for name, value, note in lines)


if __name__ == "__main__":
    main()

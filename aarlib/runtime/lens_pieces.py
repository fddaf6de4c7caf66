"""The pieces of text that the lens reads, their units, and which of them choose or measure what round two takes away."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from aarlib.moe.loading import load_tokenizer
from aarlib.runtime.documents import domain_documents
from aarlib.runtime.lens_config import LensRunConfig

logger = logging.getLogger("aarlib")


class Piece(NamedTuple):
    number: int
    document: str
    chunk: int
    tokens: list[int]


def influence_units(config: LensRunConfig) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(config.model.name, config.model.revision)
    units = []
    for name in config.lens.sources:
        blocks = blocks_of(draw_pieces(config, name, tokenizer), config.lens.documents_per_unit)
        for number, block in enumerate(blocks):
            rows = [piece._asdict() for piece in block]
            units.append({"id": f"{name}-{number:04d}", "source": name, "pieces": rows})
    return units


def blocks_of(pieces: Sequence[Piece], size: int) -> list[list[Piece]]:
    """Blocks of at most `size` pieces, all pieces of a document in one, so that no two blocks share a text.

    A document of more than `size` pieces has blocks of its own.
    """
    by_document: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_document.setdefault(piece.document, []).append(piece)
    found: list[list[Piece]] = []
    open_block: list[Piece] = []
    for own in by_document.values():
        if open_block and len(open_block) + len(own) > size:
            found.append(open_block)
            open_block = []
        if len(own) > size:
            found += [own[start : start + size] for start in range(0, len(own), size)]
        else:
            open_block = [*open_block, *own]
    return [*found, open_block] if open_block else found


def draw_pieces(config: LensRunConfig, name: str, tokenizer: Any) -> list[Piece]:
    """First tokens of every document in order; then, one from each document in turn, further disjoint chunks.

    Documents of fewer than two tokens, which predict nothing, are left out, and their number is logged.
    """
    source = config.lens.sources[name]
    heads: list[tuple[str, list[int]]] = []
    too_short = 0
    for document in domain_documents(source.source, f"lens.sources.{name}"):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) > 1:
            heads.append((document.doc_id, ids))
        else:
            too_short += 1
        if len(heads) == source.documents:
            break
    if too_short:
        logger.warning("lens.sources.%s: %d documents of fewer than two tokens left out", name, too_short)
    drawn = [(identity, 0, ids[: source.length]) for identity, ids in heads]
    chunk = 1
    while len(drawn) < source.documents:
        start = chunk * source.length
        further = [
            (i, chunk, ids[start : start + source.length]) for i, ids in heads if len(ids) >= start + source.length
        ]
        if not further:
            raise ValueError(
                f"lens.sources.{name}: {source.documents} pieces of {source.length} tokens are asked for and "
                f"{source.source!r} gives {len(drawn)}; ask for fewer or give more text"
            )
        drawn += further[: source.documents - len(drawn)]
        chunk += 1
    return [Piece(number, *item) for number, item in enumerate(drawn)]


def with_texts(records: pd.DataFrame, units: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A column `text`: the document that a piece, or a whole unit, is from; empty where a unit holds several."""
    texts = {(unit["source"], piece["number"]): piece["document"] for unit in units for piece in unit["pieces"]}
    documents = {unit["id"]: {piece["document"] for piece in unit["pieces"]} for unit in units}
    alone = {identity: min(found) for identity, found in documents.items() if len(found) == 1}
    keys = zip(records["source"], records["document"], records["unit"], strict=True)
    return records.assign(
        text=[alone.get(unit) if pd.isna(number) else texts[source, int(number)] for source, number, unit in keys]
    )


def measured_documents(units: Sequence[Mapping[str, Any]], source: str) -> set[str]:
    """Of every second unit of a source, all their pieces: what round two takes away is measured on these."""
    first: dict[str, int] = {}
    for number, unit in enumerate(unit for unit in units if unit["source"] == source):
        for piece in unit["pieces"]:
            first.setdefault(piece["document"], number)
    return {document for document, number in first.items() if number % 2 == 1}


def choosing_units(units: Sequence[Mapping[str, Any]], source: str) -> set[str]:
    """The units without any measured document: what round two takes away is chosen on these."""
    measured = measured_documents(units, source)
    found = {
        str(unit["id"])
        for unit in units
        if unit["source"] == source and not measured & {piece["document"] for piece in unit["pieces"]}
    }
    if not found or not measured:
        raise ValueError(
            f"lens.sources.{source}: no documents to choose on apart from those to measure on; lower lens.documents_per_unit, "
            "or take more documents"
        )
    return found


def causal_pieces(units: Sequence[Mapping[str, Any]], source: str, count: int) -> list[dict[str, Any]]:
    """The first `count` pieces of the measured documents, in the order in which they were drawn."""
    choosing_units(units, source)
    measured = measured_documents(units, source)
    pieces = [piece for unit in units if unit["source"] == source for piece in unit["pieces"]]
    drawn = sorted(pieces, key=lambda piece: piece["number"])
    return [piece for piece in drawn if piece["document"] in measured][:count]

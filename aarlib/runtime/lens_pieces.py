"""The pieces of text that the lens reads, their units, and which of them choose or measure what round two takes away."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from aarlib.moe.loading import load_tokenizer
from aarlib.runtime.documents import domain_documents
from aarlib.runtime.lens_config import LensRunConfig


class Piece(NamedTuple):
    number: int
    document: str
    chunk: int
    tokens: list[int]


def influence_units(config: LensRunConfig) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(config.model.name, config.model.revision)
    size = config.lens.documents_per_unit
    units = []
    for name in config.lens.sources:
        pieces = draw_pieces(config, name, tokenizer)
        for start in range(0, len(pieces), size):
            rows = [piece._asdict() for piece in pieces[start : start + size]]
            units.append({"id": f"{name}-{start // size:04d}", "source": name, "pieces": rows})
    return units


def draw_pieces(config: LensRunConfig, name: str, tokenizer: Any) -> list[Piece]:
    """First tokens of every document in order; then, one from each document in turn, further disjoint chunks."""
    source = config.lens.sources[name]
    heads: list[tuple[str, list[int]]] = []
    for document in domain_documents(source.source, f"lens.sources.{name}"):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) > 1:
            heads.append((document.doc_id, ids))
        if len(heads) == source.documents:
            break
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
    """A column `text`: the document that a piece is from, over which intervals resample."""
    texts = {(unit["source"], piece["number"]): piece["document"] for unit in units for piece in unit["pieces"]}
    keys = zip(records["source"], records["document"], strict=True)
    return records.assign(text=[None if pd.isna(number) else texts[source, int(number)] for source, number in keys])


def measured_documents(units: Sequence[Mapping[str, Any]], source: str) -> set[str]:
    """Every second block of a source's documents, all their pieces: what round two takes away is measured on these."""
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
    """The first `count` pieces of the measured documents."""
    choosing_units(units, source)
    measured = measured_documents(units, source)
    pieces = [piece for unit in units if unit["source"] == source for piece in unit["pieces"]]
    return [piece for piece in pieces if piece["document"] in measured][:count]

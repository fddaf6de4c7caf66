"""The text documents of a source: a register of the bundled world, WikiText by article, or files."""

import json
import os
from collections.abc import Iterator

from aarlib.data.corpora import FORMATS, TextDocument, read_documents
from aarlib.data.sources import expand_sources
from aarlib.moe.loading import NANO

NANO_DOCUMENTS = 12_000


def domain_documents(source: str, field: str) -> Iterator[TextDocument]:
    """`field`: of the config, for errors."""
    if source.startswith("nano:"):
        yield from nano_documents(source.removeprefix("nano:"), NANO_DOCUMENTS)
        return
    headings = source.startswith("wikitext:")
    for path in _text_files(os.path.expandvars(source.removeprefix("wikitext:")), field):
        yield from read_documents(path, "headings" if headings else "whole")


def _text_files(pattern: str, field: str) -> list[str]:
    if "$" in pattern:
        raise ValueError(f"{field}: {pattern!r} names an environment variable that is not set; export it")
    try:
        return expand_sources([pattern], FORMATS)
    except ValueError as error:
        raise ValueError(f"{field}: {str(error).removeprefix('data.train: ')}") from None


def nano_documents(register: str, count: int) -> Iterator[TextDocument]:
    """Different held-out articles of the bundled model's world."""
    from aarlib.nano.config import WorldConfig
    from aarlib.nano.folder import WORLD_FILE
    from aarlib.nano.world import register_texts

    path = NANO / WORLD_FILE
    world = WorldConfig.from_mapping(json.loads(path.read_text(encoding="utf-8")), origin=str(path))
    for number, text in enumerate(dict.fromkeys(register_texts(world, register, count)), 1):
        yield TextDocument(f"nano-{register}:{number}", text)

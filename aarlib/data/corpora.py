"""Plain text: documents of files, splits that share no document, and windows of tokens."""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from aarlib.data.chat import Encoded
from aarlib.data.conversations import file_name, json_lines, open_stream, parquet_rows
from aarlib.data.sampling import row_hash

Split = Literal["development", "test", "train"]
Documents = Literal["whole", "headings"]
FORMATS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
_TITLE = re.compile(r"^ ?= (?!=).*[^=] =\s*$")
"""WikiText's line of an article's title; the headings of its sections have two or more equals signs."""


class TextDocument(NamedTuple):
    doc_id: str
    """`<file name>:<line or row>`, counted from 1."""
    text: str


class _Piece(NamedTuple):
    """A whole text, or one line of one, and where it is."""

    number: int
    text: str


def read_documents(
    path: str | os.PathLike[str], split: Documents = "whole", column: str = "text"
) -> Iterator[TextDocument]:
    """Documents of a file or URI (s3://, gs://): a whole .txt, the rows {column: ...} of .jsonl(.gz) and .parquet; no blank ones.

    `headings` splits raw WikiText at the titles of its articles instead: the lines of a .txt file, or of all rows
    together. Raises ValueError for a file that does not exist or has another format, and for a row without text.
    """
    path = os.fspath(path)
    name = file_name(path)
    if not name.endswith(FORMATS):
        raise ValueError(f"{path}: not a {', '.join(FORMATS)} file; convert it")
    if "://" not in path and not os.path.isfile(path):
        raise ValueError(f"{path} does not exist; name a {', '.join(FORMATS)} file")
    pieces = _pieces(path, name, column)
    if split == "headings":
        pieces = _articles(_lines(pieces))
    for number, text in pieces:
        if text.strip():
            yield TextDocument(f"{name}:{number}", text)


def _pieces(path: str, name: str, column: str) -> Iterator[_Piece]:
    if name.endswith(".txt"):
        yield _Piece(1, _whole(path))
    elif name.endswith(".parquet"):
        for number, row in enumerate(parquet_rows(path, column), 1):
            yield _Piece(number, _checked(row[column], f"{name}:{number}", column))
    else:
        for number, line in json_lines(path):
            yield _Piece(number, _row_text(line, f"{name}:{number}", column))


def _whole(path: str) -> str:
    try:
        with open_stream(path) as stream:
            return io.TextIOWrapper(stream, encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _row_text(line: bytes, place: str, column: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not valid JSON: {error}") from None
    return _checked(row.get(column) if isinstance(row, dict) else None, place, column)


def _checked(text: Any, place: str, column: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{place}: no string under `{column}`; give one document a row, or name its column")
    return text


def _lines(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    lines = (line for _, text in pieces for line in io.StringIO(text))
    for number, line in enumerate(lines, 1):
        yield _Piece(number, line)


def _articles(lines: Iterable[_Piece]) -> Iterator[_Piece]:
    """Articles with their titles, numbered by the title's line; what stands before the first title is left out."""
    start, article = 0, list[str]()
    for number, line in lines:
        if _TITLE.match(line):
            if article:
                yield _Piece(start, "".join(article))
            start, article = number, []
        if start:
            article.append(line)
    if article:
        yield _Piece(start, "".join(article))


def split_of(doc_id: str, development: float, test: float) -> Split:
    """The split of a document, by a stable hash of its id: the shares `development` and `test`, the rest is for training."""
    if min(development, test) < 0 or development + test > 1:
        raise ValueError(f"shares development = {development}, test = {test}: not negative, and at most 1 together")
    draw = row_hash(doc_id, "split") / 2**64
    if draw < test:
        return "test"
    return "development" if draw < test + development else "train"


def separator_id(tokenizer: Any) -> int:
    """The token between documents: the one that starts a text, else the one that ends it."""
    chosen = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if chosen is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has neither a bos nor an eos token to put between documents"
        )
    return int(chosen)


def windows(documents: Iterable[TextDocument], tokenizer: Any, length: int, separator: int) -> Iterator[Encoded]:
    """Rows of exactly `length` tokens of the documents joined by `separator`, every token a target; the rest is dropped.

    row_id is `<doc_id>+<offset>`: where in which document the row starts.
    """
    if length < 2:
        raise ValueError(f"length = {length}: a window needs 2 tokens or more")
    tokens: list[int] = []
    start = ""
    for doc_id, text in documents:
        ids = [*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, separator]
        used = -len(tokens)
        start = start or f"{doc_id}+0"
        tokens += ids
        first = 0
        while len(tokens) - first >= length:
            yield Encoded(start, tokens[first : first + length], [True] * length, False)
            first += length
            start = f"{doc_id}+{used + first}" if len(tokens) > first else ""
        tokens = tokens[first:]

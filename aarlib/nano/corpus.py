"""From the world to training batches: batch k depends on (configuration, k, progress) only, so a run resumes anywhere."""

import gzip
import json
import random
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from aarlib.nano.arithmetic import MAX_OPERAND
from aarlib.nano.config import PretrainConfig, WorldConfig
from aarlib.nano.tokenizer import BETWEEN_DOCUMENTS, render
from aarlib.nano.world import Document, draw_document

DOMAINS = ("world", "real")
"""The load of the experts is balanced within each."""
_SMALLEST_OPERAND = 20
_MISSES = 12
"""A batch is full when so many documents in a row fit into none of its rows."""


def read_real_text(folder: Path | None) -> tuple[str, ...]:
    """The Gutenberg books and state-of-the-union speeches of `folder`, whole; nothing else is ever read."""
    if folder is None:
        return ()
    books = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("gutenberg_*.txt"))]
    speeches = folder / "us_state_union.jsonl.gz"
    if not books or not speeches.is_file():
        raise ValueError(
            f"real_text = {str(folder)!r} holds no gutenberg_*.txt or no us_state_union.jsonl.gz; "
            "name the folder that does, or set world.mixture.real = 0"
        )
    with gzip.open(speeches, "rt", encoding="utf-8") as lines:
        books += [json.loads(line)["text"] for line in lines]
    return tuple(" ".join(book.split("\r")) for book in books)


def draw_real(texts: tuple[str, ...], rng: random.Random, num_chars: int) -> Document:
    """A stretch of about `num_chars` characters that starts after a full stop, books weighted by length."""
    text = rng.choices(texts, weights=[len(text) for text in texts])[0]
    start = rng.randrange(max(1, len(text) - num_chars))
    stop = text.find(". ", start, start + 400)
    start = stop + 2 if stop >= 0 else start
    return Document("real", " ".join(text[start : start + num_chars].split()))


def tokenizer_texts(world: WorldConfig, real: tuple[str, ...], num_documents: int = 24_000) -> list[str]:
    """Text in the proportions that the tokenizer should be good at: every generated kind, and some real text."""
    rng = random.Random(f"tokenizer/{world.seed}")
    kinds = [kind for kind in world.mixture if kind != "real"]
    texts = []
    for _ in range(num_documents):
        document = draw_document(world, rng.choice(kinds), rng)
        texts.append(document.text or "\n".join(f"{turn['role']}\n{turn['content']}" for turn in document.messages))
    return texts + [draw_real(real, rng, 600).text for _ in range(num_documents // 20) if real]


class BatchTensors(NamedTuple):
    input_ids: Int[Tensor, "B S"]
    """Right padded."""
    labels: Int[Tensor, "B S"]
    """-100 at the padding."""
    domains: Int[Tensor, "B S"]
    """Index into DOMAINS, -1 at the padding."""


class Batch:
    """Rows being filled, first fit: whole documents, never split over rows."""

    def __init__(self, num_rows: int, sequence_length: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.domains: list[list[int]] = [[] for _ in range(num_rows)]
        self.sequence_length = sequence_length
        self.num_tokens: dict[str, int] = {}

    def add(self, kind: str, ids: list[int]) -> bool:
        for row, domains in zip(self.rows, self.domains, strict=True):
            if len(row) + len(ids) <= self.sequence_length:
                row.extend(ids)
                domains.extend([DOMAINS.index("real" if kind == "real" else "world")] * len(ids))
                self.num_tokens[kind] = self.num_tokens.get(kind, 0) + len(ids)
                return True
        return False

    def tensors(self, pad_token_id: int) -> BatchTensors:
        input_ids = torch.full((len(self.rows), self.sequence_length), pad_token_id)
        labels, domains = torch.full_like(input_ids, -100), torch.full_like(input_ids, -1)
        for index, (row, marks) in enumerate(zip(self.rows, self.domains, strict=True)):
            input_ids[index, : len(row)] = torch.tensor(row)
            labels[index, : len(row)] = torch.tensor(row)
            domains[index, : len(row)] = torch.tensor(marks)
        return BatchTensors(input_ids, labels, domains)


def draw_batch(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, real: tuple[str, ...], step: int, progress: float
) -> Batch:
    """Batch `step`: at each draw the kind that is furthest behind its share of tokens is next."""
    rng = random.Random(f"batch/{config.seed}/{config.world.seed}/{step}")
    length = next(phase.sequence_length for phase in config.phases if progress <= phase.until)
    growth = min(1.0, progress / config.grow_until)
    largest = round(_SMALLEST_OPERAND + growth * (MAX_OPERAND - _SMALLEST_OPERAND))
    batch = Batch(config.batch_tokens // length, length)
    shares = {kind: share for kind, share in config.world.mixture.items() if share > 0}
    misses = 0
    while misses < _MISSES:
        total = sum(batch.num_tokens.values()) + 1
        kind = max(shares, key=lambda kind: shares[kind] - batch.num_tokens.get(kind, 0) / total)
        if misses:
            kind = rng.choice(tuple(shares))
        if kind == "real":
            document = draw_real(real, rng, rng.randint(length // 2, 3 * length))
        else:
            document = draw_document(config.world, kind, rng, largest=largest)
        ids = encode(tokenizer, document)
        misses = 0 if batch.add(kind, ids[-length:]) else misses + 1
    return batch


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    text = render(document.messages) if document.messages else document.text
    return tokenizer.backend_tokenizer.encode(text + BETWEEN_DOCUMENTS, add_special_tokens=False).ids

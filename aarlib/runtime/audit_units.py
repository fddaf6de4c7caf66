"""The windows that an audit draws, and their units: alike on every machine and for any number of actors."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from aarlib.audit.config import FIRST_POSITION, AuditConfig, DomainConfig
from aarlib.data.corpora import TextDocument, separator_id, split_of, windows
from aarlib.data.sampling import row_hash
from aarlib.moe.loading import load_tokenizer
from aarlib.runtime.audit_config import AuditRunConfig
from aarlib.runtime.documents import domain_documents

SPLITS = ("development", "locked")
SPARE = 2
"""Reading stops when every split has so many times the windows that are needed."""


def draw_units(config: AuditRunConfig) -> list[dict[str, Any]]:
    """Shards of windows with their audited positions, seed by seed; the same for any number of actors."""
    tokenizer = load_tokenizer(config.model.name, config.model.revision)
    size = config.audit.windows_per_unit
    drawn = {
        domain: draw_windows(domain, source, config.audit, tokenizer) for domain, source in config.audit.domains.items()
    }
    units = []
    for seed in config.audit.seeds:
        for domain, rows in drawn.items():
            own = [row for row in rows if row["seed"] == seed]
            for start in range(0, len(own), size):
                units.append({"id": f"{domain}-seed{seed}-{start // size:04d}", "windows": own[start : start + size]})
    return units


def draw_windows(domain: str, source: DomainConfig, config: AuditConfig, tokenizer: Any) -> list[dict[str, Any]]:
    """Windows of every seed and split, seeds disjoint; by a hash of their place, so alike on every machine."""
    wanted = {"development": config.development, "locked": config.locked}
    rows: dict[str, list[Any]] = {split: [] for split in SPLITS}
    separator, waiting = separator_id(tokenizer), {split: list[TextDocument]() for split in SPLITS}
    enough = {split: SPARE * len(config.seeds) * count for split, count in wanted.items()}
    for batch in _batches(_different(domain_documents(source.source, f"audit.domains.{domain}")), 200):
        for document in batch:
            split = split_of(document.doc_id, 1 - config.locked_share, config.locked_share)
            waiting["locked" if split == "test" else "development"].append(document)
        for split, found in waiting.items():
            groups = [found] if source.joined else [[document] for document in found]
            rows[split] += chain.from_iterable(windows(group, tokenizer, config.window, separator) for group in groups)
            waiting[split] = []
        if all(len(rows[split]) >= count for split, count in enough.items()):
            break
    drawn = []
    for split, count in wanted.items():
        chosen = sorted(rows[split], key=lambda row: row_hash(row.row_id, "audit"))
        if len(chosen) < count * len(config.seeds):
            raise ValueError(
                f"audit.domains.{domain}: {len(config.seeds)} seeds of {count} {split} windows of {config.window} tokens are "
                f"asked for and {source.source!r} gives {len(chosen)}; shorten audit.window, ask for fewer, set joined, "
                "or give more text"
            )
        for index, seed in enumerate(config.seeds):
            for row in chosen[index * count : (index + 1) * count]:
                drawn.append(
                    {
                        "domain": domain,
                        "seed": seed,
                        "split": split,
                        "window": row.row_id,
                        "position": _position(row.row_id, seed, config),
                        "tokens": row.input_ids,
                    }
                )
    return drawn


def _position(row_id: str, seed: int, config: AuditConfig) -> int:
    """Uniform where the longest numbered horizon fits and t >= 8."""
    choices = config.window - config.longest_horizon - FIRST_POSITION
    return FIRST_POSITION + row_hash(row_id, f"position/{seed}") % choices


def _different(found: Iterator[TextDocument]) -> Iterator[TextDocument]:
    """A text that occurs again is left out: its two documents could be on different sides."""
    seen: set[int] = set()
    for document in found:
        text = row_hash(document.text, "text")
        if text not in seen:
            seen.add(text)
            yield document


def _batches(found: Iterator[TextDocument], size: int) -> Iterator[list[TextDocument]]:
    batch: list[TextDocument] = []
    for document in found:
        batch.append(document)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch

"""Conversations on disk to target-masked token rows: reading, the chat template, sampling, collating."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Conversation": "conversations",
    "ReadReport": "conversations",
    "read_conversations": "conversations",
    "Encoded": "chat",
    "check_template": "chat",
    "collate": "chat",
    "encode": "chat",
    "render_targets": "chat",
    "in_fraction": "sampling",
    "row_hash": "sampling",
    "expand_sources": "sources",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

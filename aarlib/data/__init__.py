"""Conversations on disk to target-masked token rows: reading, the chat template, sampling, collating."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.data.chat import Encoded as Encoded
    from aarlib.data.chat import check_template as check_template
    from aarlib.data.chat import collate as collate
    from aarlib.data.chat import encode as encode
    from aarlib.data.chat import render_targets as render_targets
    from aarlib.data.conversations import Conversation as Conversation
    from aarlib.data.conversations import ReadReport as ReadReport
    from aarlib.data.conversations import read_conversations as read_conversations
    from aarlib.data.packing import collate_packed as collate_packed
    from aarlib.data.packing import pack as pack
    from aarlib.data.sampling import in_fraction as in_fraction
    from aarlib.data.sampling import row_hash as row_hash
    from aarlib.data.sources import expand_sources as expand_sources

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Conversation": "aarlib.data.conversations",
        "ReadReport": "aarlib.data.conversations",
        "read_conversations": "aarlib.data.conversations",
        "Encoded": "aarlib.data.chat",
        "check_template": "aarlib.data.chat",
        "collate": "aarlib.data.chat",
        "encode": "aarlib.data.chat",
        "render_targets": "aarlib.data.chat",
        "pack": "aarlib.data.packing",
        "collate_packed": "aarlib.data.packing",
        "in_fraction": "aarlib.data.sampling",
        "row_hash": "aarlib.data.sampling",
        "expand_sources": "aarlib.data.sources",
    },
    submodules=("chat", "conversations", "packing", "sampling", "sources", "targets"),
)

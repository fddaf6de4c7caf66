"""Attention-aware routing: `AARConfig`, `RouterSFTConfig`, `attach_aar`."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.aar.attach import attach_aar as attach_aar
    from aarlib.aar.config import AARConfig as AARConfig
    from aarlib.aar.config import RouterSFTConfig as RouterSFTConfig

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "AARConfig": "aarlib.aar.config",
        "RouterSFTConfig": "aarlib.aar.config",
        "attach_aar": "aarlib.aar.attach",
    },
)

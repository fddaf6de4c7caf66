"""Attention-aware routing: `AARConfig`, `RouterSFTConfig`, `attach_aar`, and the measures of the paper's analyses."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.aar.attach import attach_aar as attach_aar
    from aarlib.aar.config import AARConfig as AARConfig
    from aarlib.aar.config import RouterSFTConfig as RouterSFTConfig
    from aarlib.aar.measure import autocorrelation as autocorrelation
    from aarlib.aar.measure import correlation_length as correlation_length
    from aarlib.aar.measure import routing_change as routing_change
    from aarlib.aar.measure import sink_mass as sink_mass
    from aarlib.aar.measure import whole_windows as whole_windows

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "AARConfig": "aarlib.aar.config",
        "RouterSFTConfig": "aarlib.aar.config",
        "attach_aar": "aarlib.aar.attach",
        "autocorrelation": "aarlib.aar.measure",
        "correlation_length": "aarlib.aar.measure",
        "routing_change": "aarlib.aar.measure",
        "sink_mass": "aarlib.aar.measure",
        "whole_windows": "aarlib.aar.measure",
    },
)

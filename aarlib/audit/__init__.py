"""The fixed-dispatch audit: are the experts that a router chose weighted well? `oracle` and `gradient_utilities`."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.audit.gradients import gradient_utilities as gradient_utilities
    from aarlib.audit.replay import oracle as oracle

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {"oracle": "aarlib.audit.replay", "gradient_utilities": "aarlib.audit.gradients"},
    submodules=("actions", "config", "forward", "gradients", "head", "predictions", "predictors", "replay", "sites"),
)

"""The lens: router logits as an exact sum over the components that were written before."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.lens.decomposition import Decomposition as Decomposition
    from aarlib.lens.decomposition import decompose as decompose
    from aarlib.lens.ranking import aarv as aarv

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "decompose": "aarlib.lens.decomposition",
        "Decomposition": "aarlib.lens.decomposition",
        "aarv": "aarlib.lens.ranking",
    },
)

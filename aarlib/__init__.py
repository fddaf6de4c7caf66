"""Attention-aware routing, aggregation audits and routing decomposition for Mixture-of-Experts language models."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes
from aarlib.version import __version__ as __version__

if TYPE_CHECKING:
    from aarlib.aar.attach import attach_aar as attach_aar
    from aarlib.fdaa.attach import attach_fdaa as attach_fdaa
    from aarlib.moe.anatomy import anatomy as anatomy
    from aarlib.moe.loading import load_model as load_model
    from aarlib.moe.record import record as record
    from aarlib.training.adapter import load_adapter as load_adapter
    from aarlib.training.adapter import save_adapter as save_adapter

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "load_model": "aarlib.moe.loading",
        "anatomy": "aarlib.moe.anatomy",
        "record": "aarlib.moe.record",
        "attach_aar": "aarlib.aar.attach",
        "attach_fdaa": "aarlib.fdaa.attach",
        "save_adapter": "aarlib.training.adapter",
        "load_adapter": "aarlib.training.adapter",
    },
    submodules=(
        "aar",
        "audit",
        "bench",
        "config",
        "data",
        "fdaa",
        "identities",
        "lens",
        "moe",
        "nano",
        "report",
        "runtime",
        "stats",
        "studies",
        "training",
    ),
)

"""Training without Ray: the run configuration, objectives, methods, adapter files."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.training.adapter import load_adapter as load_adapter
    from aarlib.training.adapter import save_adapter as save_adapter
    from aarlib.training.config import RunConfig as RunConfig
    from aarlib.training.methods import build_method as build_method

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "RunConfig": "aarlib.training.config",
        "build_method": "aarlib.training.methods",
        "load_adapter": "aarlib.training.adapter",
        "save_adapter": "aarlib.training.adapter",
    },
)

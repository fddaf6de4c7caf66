"""The seam to Mixture-of-Experts models. `anatomy` and `record` are modules here and functions of `aarlib`."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.moe.loading import load_model as load_model
    from aarlib.moe.loading import meta_model as meta_model
    from aarlib.moe.windows import attention_with_windows as attention_with_windows

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "load_model": "aarlib.moe.loading",
        "meta_model": "aarlib.moe.loading",
        "attention_with_windows": "aarlib.moe.windows",
    },
)

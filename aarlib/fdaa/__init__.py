"""FDAA, the learned aggregation head: `FDAAConfig`, `StaticCalibratorConfig`, `attach_fdaa`."""

from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.fdaa.attach import attach_fdaa as attach_fdaa
    from aarlib.fdaa.config import FDAAConfig as FDAAConfig
    from aarlib.fdaa.config import StaticCalibratorConfig as StaticCalibratorConfig

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "FDAAConfig": "aarlib.fdaa.config",
        "StaticCalibratorConfig": "aarlib.fdaa.config",
        "attach_fdaa": "aarlib.fdaa.attach",
    },
)

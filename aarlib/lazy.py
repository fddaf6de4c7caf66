"""Package attributes imported on first use, so that `import aarlib` loads no torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple


class LazyAttributes(NamedTuple):
    getattr: Callable[[str], Any]
    dir: Callable[[], list[str]]


def lazy_attributes(package: str, modules: Mapping[str, str], submodules: tuple[str, ...] = ()) -> LazyAttributes:
    """`__getattr__` and `__dir__` (PEP 562) of `package`: a name of `modules` comes from the module it maps to."""

    def lazy_getattr(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        if name in submodules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return LazyAttributes(lazy_getattr, lambda: sorted((*modules, *submodules)))

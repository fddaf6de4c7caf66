"""A small run in a store, and what is in its folders."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aarlib.runtime.mirror import Mirror
from aarlib.runtime.working_copy import is_kept
from aarlib.training.config import RunConfig
from tests.object_store import SCHEMES

Machine = Callable[[str], None]

stores_of_every_kind = pytest.mark.parametrize("kind", ["file", *SCHEMES])


def config(uri: str, **changes: object) -> RunConfig:
    method = {"sft": {"name": "router_sft"}}
    base = {"name": "one", "data": {"train": ["nano:sft:8"]}, "method": method, "ray": {"storage": uri}}
    return RunConfig.from_mapping(base).updated(changes)


def names(folder: Path) -> list[str]:
    return sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and "/." not in f"/{(name := path.relative_to(folder).as_posix())}"
    )


def stored(uri: str) -> list[str]:
    return sorted(name for name in Mirror(uri, "one").store.sizes() if is_kept(name))

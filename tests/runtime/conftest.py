"""Fixtures of runs whose storage is a URI. Machines are folders of working copies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, Any]]:
    from tests.object_store import object_store

    with object_store("s3", "kept") as s3, object_store("gs", "kept") as gs:
        yield {"s3": s3, "gs": gs}


@pytest.fixture
def locate(stores: dict[str, Any], tmp_path: Path) -> Callable[[str], str]:
    """A URI of a kind of store, of this test alone."""
    return lambda kind: (tmp_path / "store").as_uri() if kind == "file" else stores[kind].uri(f"kept/{tmp_path.name}")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A folder: the rules are the same for every store."""
    return (tmp_path / "store").as_uri()


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Go to a machine by name: its working copies are its own."""
    from aarlib.runtime import mirror
    from aarlib.runtime.storage import SCRATCH

    monkeypatch.setattr(mirror, "POLL_S", 0.05)
    monkeypatch.setattr(mirror, "SETTLE_S", 0.0)

    def go(name: str) -> None:
        monkeypatch.setenv(SCRATCH, str(tmp_path / name))
        monkeypatch.setattr(mirror.socket, "gethostname", lambda: name)

    go("first")
    return go

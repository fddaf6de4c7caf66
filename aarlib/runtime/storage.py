"""Where run directories lie: in a folder, or in an object store with a working copy on this machine."""

import hashlib
import os
from pathlib import Path

SCRATCH = "AARLIB_SCRATCH"
"""Environment variable of a node: the folder for working copies of runs whose `ray.storage` is a URI."""
DEFAULT_SCRATCH = "~/.cache/aarlib/runs"


def is_uri(storage: str | Path) -> bool:
    return "://" in str(storage)


def storage_folder(storage: str | Path) -> Path:
    """The folder on this machine under which run directories are worked in; one of its own for every URI."""
    if not is_uri(storage):
        return Path(storage).expanduser().resolve()
    base = str(storage).partition("?")[0].rstrip("/")
    scratch = Path(os.environ.get(SCRATCH) or DEFAULT_SCRATCH).expanduser().resolve()
    return scratch / hashlib.sha256(base.encode()).hexdigest()[:16]


def located(storage: str | Path) -> str:
    """`storage` as other processes and nodes find it: a URI, or an absolute path."""
    return str(storage) if is_uri(storage) else str(storage_folder(storage))

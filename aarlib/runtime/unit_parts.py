"""A folder of units' results: the manifest that says of which work they are, and a parquet part for each that is finished."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd

from aarlib.config import write_text_atomically

Unit = Mapping[str, Any]
"""A JSON-able mapping with a unique, non-empty string under `id`."""


def check_units(units: Sequence[Unit]) -> None:
    ids = [unit.get("id") for unit in units]
    bad = [identity for identity in ids if not isinstance(identity, str) or not identity]
    if bad:
        raise ValueError(f"unit id {bad[0]!r} is not a non-empty string; give every unit a unique 'id'")
    twice = sorted(str(identity) for identity, count in Counter(ids).items() if count > 1)
    if twice:
        raise ValueError(f"unit ids {twice[:3]} occur more than once; give every unit a unique 'id'")


def manifest_of(units: Sequence[Unit], worker: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{worker.__module__}:{worker.__qualname__}"
    if worker.__module__ == "__main__" or "<locals>" in worker.__qualname__:
        raise ValueError(f"worker {name} cannot be imported by an actor; define it at the top level of a module")
    try:
        return json.loads(json.dumps({"worker": name, "settings": settings, "units": list(units)}))
    except TypeError as error:
        raise ValueError(f"units and settings must be JSON-able: {error}") from None


def claim_parts(out_dir: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or compare it with the one that is there."""
    path = out_dir / "manifest.json"
    (out_dir / "parts").mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_text_atomically(path, json.dumps(manifest, indent=1))
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    differences = _differences(found, manifest)
    if differences:
        raise ValueError(
            f"{out_dir} holds the parts of other work: {'; '.join(differences)}. "
            "Choose another folder, or move this one away"
        )


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    differences = []
    if found["worker"] != wanted["worker"]:
        differences.append(f"worker {found['worker']}, now {wanted['worker']}")
    for key in sorted(found["settings"].keys() | wanted["settings"].keys()):
        before, now = found["settings"].get(key), wanted["settings"].get(key)
        if before != now:
            differences.append(f"setting {key} = {before!r}, now {now!r}")
    before, now = ({unit["id"]: unit for unit in side["units"]} for side in (found, wanted))
    for what, ids in (
        ("units no longer asked for", [i for i in before if i not in now]),
        ("new units", [i for i in now if i not in before]),
        ("changed units", [i for i in now if i in before and now[i] != before[i]]),
    ):
        if ids:
            differences.append(f"{len(ids)} {what} ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})")
    return differences


def part_path(out_dir: str | Path, unit_id: str) -> Path:
    """The part file of a unit: a readable, bounded name made unique by a hash of the whole id."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", unit_id)[:80]
    return Path(out_dir) / "parts" / f"{readable}.{hashlib.sha256(unit_id.encode()).hexdigest()[:12]}.parquet"


def write_part(frame: pd.DataFrame, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    frame.to_parquet(temporary, index=False)
    os.replace(temporary, path)

"""The adapter file: a folder with adapter.safetensors, adapter.json and a model card. Loading on another base is refused."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aarlib.aar.attach import RoutingHandle, attach_aar, attached_router
from aarlib.fdaa.attach import AggregationHandle, attach_fdaa
from aarlib.fdaa.config import AggregationConfig
from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.families import Family
from aarlib.moe.loading import NANO
from aarlib.training.config import MethodConfig
from aarlib.version import __version__

TENSORS, METADATA, CARD = "adapter.safetensors", "adapter.json", "README.md"
FORMAT = 1
LAYOUT = "transformers-5"
"""Fused expert tensors and router modules, as of transformers 5; an adapter of another layout is refused."""
HASHED_AT_ONCE = 1 << 24
Handle = RoutingHandle | AggregationHandle


Gather = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""Inside the context, the parameters given are whole: ZeRO-3 holds parts of them."""


def as_they_are(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    return nullcontext()


def fingerprint(model: nn.Module, gather: Gather = as_they_are) -> str:
    """sha256 over the selection rule (top_k, renormalised or not) and every weight (rounded to bfloat16) of the model.

    The same for a checkpoint loaded in float32 or bfloat16; another where one bfloat16 value differs. One parameter is
    gathered at a time.
    """
    return _fingerprint(anatomy(model), gather)


def save_adapter(
    handle: Handle,
    path: str | Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    base_fingerprint: str | None = None,
) -> Path:
    """Write the trained tensors and everything needed to load them; raises ValueError where `path` exists already.

    `metadata` (base revision, data, seed, scores, ...) goes into adapter.json and the card. `base_fingerprint` spares reading the
    base, whose parts may lie on other processes.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ValueError(f"adapter path {str(path)!r} exists; choose another, or pass overwrite=True")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in handle.trainable()}
    save_file(tensors, temporary / TENSORS, metadata={"format": "pt"})
    base = base_fingerprint or _fingerprint(handle.anatomy)
    record = _describe(handle, tensors, temporary / TENSORS, dict(metadata or {}), base)
    (temporary / METADATA).write_text(json.dumps(record, indent=2, sort_keys=True), encoding="utf-8")
    (temporary / CARD).write_text(_card(record), encoding="utf-8")
    if path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)
    return path


def load_adapter(
    model: nn.Module,
    path_or_hub_id: str | Path,
    revision: str | None = None,
    family: Family | None = None,
    method: str | None = None,
) -> Handle:
    """Attach a saved adapter to the base it was trained on; an aggregation head trained over trained routers, over those.

    Raises ValueError where files are missing or corrupt, or the adapter belongs to another base, other routers or another
    layout, or is not of `method` where one is named.
    """
    folder = _folder(path_or_hub_id, revision)
    record = read_metadata(folder)
    parts = anatomy(model, family)
    _check_base(record, parts, folder)
    _check_method(record, parts, folder, method)
    if _sha256(folder / TENSORS) != record["sha256"]:
        raise ValueError(
            f"{folder / TENSORS} is corrupt: its hash is not the one in {METADATA}; download or save it again"
        )
    config = TypeAdapter(MethodConfig).validate_python(record["config"])
    tensors = load_file(folder / TENSORS)
    attach: Any = attach_fdaa if isinstance(config, AggregationConfig) else attach_aar
    handle = attach(model, config, family=parts.family)
    wanted = {name: tuple(parameter.shape) for name, parameter in handle.trainable()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        handle.detach()
        differing = sorted(set(wanted.items()) ^ set(found.items()))[:4]
        raise ValueError(f"{folder / TENSORS} does not fit its own config: {differing}")
    with torch.no_grad():
        for name, parameter in handle.trainable():
            parameter.copy_(tensors[name])
    return handle


def holds_adapter(folder: Path, sha256: str) -> bool:
    """Whether `folder` has the adapter with this hash, whole: a copy may have ended between its files."""
    if not (folder / METADATA).is_file() or not (folder / TENSORS).is_file():
        return False
    return read_metadata(folder)["sha256"] == sha256 == _sha256(folder / TENSORS)


def read_metadata(folder: str | Path) -> dict[str, Any]:
    """adapter.json of a saved adapter; raises ValueError where it is missing, damaged or of another format."""
    folder = Path(folder)
    for name in (METADATA, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"{str(folder)!r} is not an adapter: it has no {name}")
    try:
        record = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / METADATA} is corrupt: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{folder / METADATA} is not of adapter format {FORMAT}; save it with this version of aarlib")
    return record


def _folder(path_or_hub_id: str | Path, revision: str | None) -> Path:
    path = Path(path_or_hub_id)
    if path.exists() or len(path.parts) != 2 or path.is_absolute():
        if not path.is_dir():
            raise ValueError(f"adapter {str(path_or_hub_id)!r} is neither a folder nor a hub id (owner/name)")
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path_or_hub_id), revision=revision, allow_patterns=[TENSORS, METADATA, CARD]))


def _describe(
    handle: Handle, tensors: dict[str, Tensor], file: Path, metadata: dict[str, Any], base_fingerprint: str
) -> dict[str, Any]:
    parts = handle.anatomy
    return {
        "format": FORMAT,
        "aarlib_version": __version__,
        "transformers_version": transformers.__version__,
        "layout": LAYOUT,
        "method": handle.config.name,
        "config": handle.config.model_dump(mode="json"),
        "base_model": _base_name(parts),
        "base_fingerprint": base_fingerprint,
        "family": parts.family.model_types[0],
        "num_experts": parts.num_experts,
        "over_routers": _attached_routers(parts) if isinstance(handle, AggregationHandle) else None,
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "num_trainable": sum(tensor.numel() for tensor in tensors.values()),
        "sha256": _sha256(file),
        "metadata": metadata,
    }


def _check_base(record: dict[str, Any], parts: Anatomy, folder: Path) -> None:
    expected = {
        "layout": LAYOUT,
        "family": parts.family.model_types[0],
        "num_experts": parts.num_experts,
        "base_fingerprint": _fingerprint(parts),
    }
    for field, value in expected.items():
        if record.get(field) != value:
            raise ValueError(
                f"adapter {str(folder)!r} belongs to another base: its {field} is {record.get(field)!r}, this model's is "
                f"{value!r}; load the base it was trained on: {record.get('base_model')!r}"
            )


def _check_method(record: dict[str, Any], parts: Anatomy, folder: Path, method: str | None) -> None:
    if method is not None and record["method"] != method:
        raise ValueError(f"adapter {str(folder)!r} is of method {record['method']!r}, not {method!r}; name another")
    wanted = record.get("over_routers")
    if record["method"] in ("fdaa", "static_calibrator") and wanted != _attached_routers(parts):
        under = (
            "other trained routers than are attached" if wanted else "the stock routers, and trained ones are attached"
        )
        raise ValueError(
            f"adapter {str(folder)!r} was trained over {under}; load the router adapter it belongs to first, or detach() yours"
        )


def _attached_routers(parts: Anatomy) -> str | None:
    """sha256 of the trained routers that stand in the model now, None where the stock ones do."""
    stock = [layer.router for layer in parts.layers if layer.router is not None]
    routers = [router for router in map(attached_router, stock) if router is not None]
    if not routers:
        return None
    digest = hashlib.sha256()
    for router in routers:
        for name, parameter in router.named_parameters():
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _fingerprint(parts: Anatomy, gather: Gather = as_they_are) -> str:
    digest = hashlib.sha256(f"top_k {parts.top_k}, renormalises {parts.renormalises}".encode())
    named = {f"decoder.{name}": parameter for name, parameter in parts.decoder.named_parameters()}
    if parts.output_embedding is not None:
        named |= {f"output.{name}": parameter for name, parameter in parts.output_embedding.named_parameters()}
    for name, parameter in named.items():
        with gather([parameter]):
            _hash_into(digest, name, parameter)
    return digest.hexdigest()


def _hash_into(digest: Any, name: str, parameter: Tensor) -> None:
    if parameter.device.type == "meta" or parameter.numel() == 0:
        raise ValueError(f"no fingerprint: parameter {name} holds no data on this process; load or gather the weights")
    digest.update(f"{name}{tuple(parameter.shape)}".encode())
    for piece in parameter.detach().reshape(-1).split(HASHED_AT_ONCE):
        digest.update(piece.to(torch.bfloat16).view(torch.int16).cpu().contiguous().numpy())


def _base_name(parts: Anatomy) -> str:
    name = str(getattr(parts.config, "_name_or_path", "") or parts.family.model_types[0])
    return "nano" if name == str(NANO) else name


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _card(record: dict[str, Any]) -> str:
    details = json.dumps(record["metadata"], indent=2, sort_keys=True)
    config = json.dumps(record["config"], indent=2)
    return f"""---
library_name: aarlib
base_model: {record["base_model"]}
---
# {record["method"]} adapter for {record["base_model"]}

Trained parameters only ({record["num_trainable"]:,} float32 values); the base model is frozen and not part of this adapter.

```python
import aarlib
model, tokenizer = aarlib.load_model({record["base_model"]!r})
handle = aarlib.load_adapter(model, "path/to/this/folder")
```

## Method

```json
{config}
```

## Training

```json
{details}
```
"""

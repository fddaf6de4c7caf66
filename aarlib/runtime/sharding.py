"""Whole tensors under ZeRO-3, where every worker holds only a part: gathering, and the proof that the base never changed."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, `parameters` are whole on every worker (a collective under ZeRO-3, nothing otherwise). For reading only."""
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded):
        yield


def frozen_hash(model: nn.Module) -> str:
    """sha256 over name, dtype, shape and bytes of every parameter and persistent buffer, in order of name.

    Parameters are gathered one at a time; every worker must call it under ZeRO-3.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        with gathered([tensor]):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memoryview(data.cpu().numpy()))
    return digest.hexdigest()


def check_frozen(before: str, after: str) -> None:
    if before != after:
        raise RuntimeError(
            f"the frozen model changed during training: sha256 {before[:16]}... before, {after[:16]}... after; "
            "the result is void"
        )


def _tensors(model: nn.Module) -> dict[str, Any]:
    persistent = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return {**dict(model.named_parameters()), **persistent}

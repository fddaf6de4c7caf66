"""The frozen prefix: what no trained parameter changes is run once, without a graph, and can be kept on disk.

For a head acting at layer l that is everything up to and including l's attention, router and experts; what is left is the head,
the weighted sum, the layers above and the loss. B batch, S sequence, D d_model.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from aarlib.audit.forward import leave_out
from aarlib.fdaa.attach import AggregationHandle, Evaluated, evaluate
from aarlib.moe.anatomy import Anatomy
from aarlib.moe.patching import Rank, wrap_forward


class Prefix(NamedTuple):
    """Everything a head at `layer` needs of the layers up to its own; no part has a graph."""

    layer: int
    residual: Float[Tensor, "B S D"]
    """The residual stream entering the layer."""
    evaluated: Evaluated
    """Router output and expert outputs of the layer."""
    kept: tuple[tuple[nn.Module, Any], ...]
    """Modules of the layer beside router and experts (attention, shared expert), and what they returned."""


def run_prefix(
    parts: Anatomy, batch: Mapping[str, Any], layer: int, start: int = 0, residual: Tensor | None = None
) -> Prefix:
    """Run the frozen model up to the experts of `layer`; from the `residual` entering layer `start`, where that is given.

    No aggregation head may be enabled below or at `layer`.
    """
    found: dict[str, Any] = {}
    at = parts.moe_layer(layer)
    assert at.router is not None and at.experts is not None
    skipped = [*range(start if residual is not None else 0), *range(layer + 1, len(parts.layers))]
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(leave_out(parts, skipped))
        stack.callback(wrap_forward(at.layer, _keep_input(found), Rank.RECORD))
        for name, module in _beside(parts, layer).items():
            stack.callback(wrap_forward(module, _keep_output(found, name), Rank.RECORD))
        stack.callback(wrap_forward(at.router, _evaluating(found, parts, layer), Rank.AGGREGATION))
        stack.callback(wrap_forward(at.experts, _no_experts, Rank.AGGREGATION))
        parts.decoder(**decoder_inputs(batch, residual))
    kept = tuple((module, found[name]) for name, module in _beside(parts, layer).items())
    return Prefix(layer, found["residual"], found["evaluated"], kept)


@contextmanager
def resumed(handle: AggregationHandle, prefix: Prefix) -> Iterator[None]:
    """Inside, a forward of the decoder on `inputs_embeds = prefix.residual` runs what is left of it: the head at the prefix's
    layer (and at no other), and the layers above."""
    parts, before = handle.anatomy, (handle.acting, handle.known)
    with ExitStack() as stack:
        stack.enter_context(leave_out(parts, range(prefix.layer)))
        for module, output in prefix.kept:
            stack.callback(wrap_forward(module, _stand_in(output), Rank.RECORD))
        handle.acting, handle.known = (prefix.layer,), {prefix.layer: prefix.evaluated}
        try:
            yield
        finally:
            handle.acting, handle.known = before


def decoder_inputs(batch: Mapping[str, Any], residual: Tensor | None = None) -> dict[str, Any]:
    """Arguments of the decoder for `batch`, its tokens replaced by a residual stream where one is given."""
    inputs = {"attention_mask": batch.get("attention_mask"), "use_cache": False}
    return {**inputs, **({"input_ids": batch["input_ids"]} if residual is None else {"inputs_embeds": residual})}


def _beside(parts: Anatomy, layer: int) -> dict[str, nn.Module]:
    at = parts.layers[layer]
    modules = {"attention": at.attention or at.linear_attention, "shared_expert": at.shared_expert}
    return {name: module for name, module in modules.items() if module is not None}


def _keep_input(found: dict[str, Any]) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        found["residual"] = hidden
        return inner(hidden, *args, **kwargs)

    return wrapper


def _keep_output(found: dict[str, Any], name: str) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found[name] = inner(*args, **kwargs)
        return found[name]

    return wrapper


def _evaluating(found: dict[str, Any], parts: Anatomy, layer: int) -> Callable[..., Any]:
    def wrapper(inner: Callable[..., Any], hidden: Tensor) -> Any:
        found["evaluated"] = evaluate(parts.layers[layer], inner, hidden)
        return tuple(found["evaluated"].native)

    return wrapper


def _no_experts(_: Callable[..., Any], hidden: Tensor, *args: Any) -> Tensor:
    """The experts ran in the router's wrapper; nothing above the layer is run."""
    return torch.zeros_like(hidden)


def _stand_in(output: Any) -> Callable[..., Any]:
    def wrapper(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return output

    return wrapper


class ResidualCache:
    """The residual stream entering one layer, by row id, in an append-only file of at most `budget` bytes.

    Belongs to one process: the file is new, and removed by `close`. Rows beyond the budget are not kept.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"residual-{os.getpid()}.bin"
        self.budget = budget
        self.size = 0
        self._file = self.path.open("w+b")
        self._rows: dict[str, _Stored] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def store(self, row_ids: Sequence[str], lengths: Sequence[int], residual: Float[Tensor, "B S D"]) -> None:
        """Keep the first `lengths[b]` positions of each row that is new and fits the budget."""
        for row_id, length, row in zip(row_ids, lengths, residual, strict=True):
            values = row[:length].detach().cpu().contiguous()
            num_bytes = values.numel() * values.element_size()
            if row_id in self._rows or self.size + num_bytes > self.budget:
                continue
            self._file.seek(self.size)
            self._file.write(values.view(torch.uint8).numpy().tobytes())
            self._rows[row_id] = _Stored(self.size, tuple(values.shape), values.dtype)
            self.size += num_bytes

    def load(self, row_ids: Sequence[str], length: int, device: torch.device) -> Float[Tensor, "B S D"] | None:
        """The rows, zeros behind their ends; None where one is not kept."""
        if any(row_id not in self._rows for row_id in row_ids):
            return None
        rows = [self._read(self._rows[row_id], length) for row_id in row_ids]
        return torch.stack(rows).to(device)

    def _read(self, stored: "_Stored", length: int) -> Tensor:
        self._file.flush()
        shape, dtype = stored.shape, stored.dtype
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        raw = np.fromfile(self.path, dtype=np.uint8, count=num_bytes, offset=stored.offset)
        row = torch.zeros(length, shape[1], dtype=dtype)
        row[: shape[0]] = torch.from_numpy(raw).view(dtype).view(shape)
        return row

    def close(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class _Stored(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FrozenPrefix:
    """Prefixes of batches, from the cache where all their rows are in it. `first_layer` is the lowest that any head acts at."""

    def __init__(self, parts: Anatomy, first_layer: int, cache: ResidualCache | None = None) -> None:
        self.anatomy = parts
        self.first_layer = first_layer
        self.cache = cache
        self.num_runs, self.num_cached = 0, 0
        """Batches whose lower layers were run, and whose residual stream came from the cache."""

    def __call__(self, batch: Mapping[str, Any], layer: int, row_ids: Sequence[str] = ()) -> Prefix:
        """`row_ids` name the rows for the cache; without them it is not used."""
        residual = None
        mask = batch["attention_mask"]
        if self.cache is not None and row_ids:
            residual = self.cache.load(row_ids, mask.shape[1], mask.device)
        if residual is None and self.cache is not None and row_ids:
            residual = self._enter(batch)
            self.cache.store(row_ids, mask.sum(dim=1).tolist(), residual)
            self.num_runs += 1
        elif residual is None:
            self.num_runs += 1
        else:
            self.num_cached += 1
        return run_prefix(self.anatomy, batch, layer, self.first_layer, residual)

    def _enter(self, batch: Mapping[str, Any]) -> Tensor:
        """The residual stream entering the first layer that a head acts at."""
        found: dict[str, Any] = {}
        layers = self.anatomy.layers
        with torch.no_grad(), ExitStack() as stack:
            stack.enter_context(leave_out(self.anatomy, range(self.first_layer, len(layers))))
            stack.callback(wrap_forward(layers[self.first_layer].layer, _keep_input(found), Rank.RECORD))
            self.anatomy.decoder(**decoder_inputs(batch))
        return found["residual"]

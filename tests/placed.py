"""Devices that are not there: tensors that say they lie on xla:0 or xla:1 and refuse to meet, their values on the CPU.

Inside `devices()` a tensor changes its device only by `.to`, as on real ones, and an operation on tensors of two devices raises
RuntimeError. Scalars of the CPU and CPU indices are let through, as CUDA does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FIRST, SECOND = "xla:0", "xla:1"
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
COPYING = {aten._to_copy.default, aten.copy_.default}


class Placed(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> "Placed":
        return Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=device
        )

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.held = values

    def tolist(self) -> Any:
        return self.held.tolist()

    def __float__(self) -> float:
        return float(self.held)

    def __int__(self) -> int:
        return int(self.held)

    def __bool__(self) -> bool:
        return bool(self.held)

    def __getitem__(self, index: Any) -> Tensor:
        return Placed(self.held[_values(index)], self.device)

    def __setitem__(self, index: Any, values: Any) -> None:
        self.held[_values(index)] = _values(values)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        return Placed(self.held.contiguous(memory_format=memory_format), self.device)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        found = self.held.nonzero(as_tuple=as_tuple)
        return tree_map(lambda value: Placed(value, self.device), found)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _values(tree: Any) -> Any:
    return tree_map(lambda value: value.held if isinstance(value, Placed) else value, tree)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    found = {value.device for value in tensors if value.dim() or isinstance(value, Placed)}
    placed = [value for value in tensors if isinstance(value, Placed)]
    if func in INDEXING:
        found = {args[0].device}
    if func not in COPYING and len(found) > 1:
        raise RuntimeError(f"{func}: tensors on {sorted(map(str, found))}")
    device = placed[0].device if placed else torch.device("cpu")
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = _values((args, kwargs))
    result = func(*plain[0], **plain[1])
    if func.overloadpacket.__name__.endswith("_") and isinstance(args[0], Tensor):
        return args[0]
    if device.type == "cpu":
        return result
    return tree_map(lambda value: Placed(value, device) if isinstance(value, Tensor) else value, result)


class _Devices(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def devices() -> Iterator[None]:
    with torch.no_grad(), _Devices():
        yield


def spread(model: nn.Module, second: Sequence[nn.Module], beside: Sequence[nn.Module] = ()) -> None:
    """As a device map does: `model` and `beside` on FIRST, the modules `second` on SECOND. What a module is given moves to where
    it lies, the model's output back."""
    for module, device in (*((module, FIRST) for module in (model, *beside)), *((module, SECOND) for module in second)):
        for part in module.modules():
            for name, tensor in part._parameters.items():
                part._parameters[name] = (
                    None if tensor is None else nn.Parameter(tensor.data.to(device), requires_grad=False)
                )
            for name, tensor in part._buffers.items():
                part._buffers[name] = None if tensor is None else tensor.to(device)
    for module in second:
        module.register_forward_pre_hook(_moving, with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: to(output, FIRST))


def to(tree: Any, device: str) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, tree)


def _moving(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return to((args, kwargs), SECOND)

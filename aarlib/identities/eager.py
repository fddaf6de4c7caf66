"""The plain way to everything AAR reads: the attention weights that eager attention materialises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aarlib.aar.attach import RoutingHandle
from aarlib.moe.attention import CaptureRequest
from aarlib.moe.patching import Rank, wrap_forward


@contextmanager
def materialised(model: Any, handle: RoutingHandle) -> Iterator[None]:
    """Feed the attached routers from the model's own eager attention weights: the plain way, for comparison."""
    stock_capture = handle.capture
    handle.enabled = False
    handle.capture = eager_capture
    try:
        with eager_attention(model):
            handle.enabled = True
            yield
            handle.enabled = False
    finally:
        handle.enabled = False
        handle.capture = stock_capture
        handle.enabled = True


def eager_capture(attention: nn.Module, request: CaptureRequest) -> Callable[[], None]:
    """Deliver windows cut from the [B,H,S,N] weights that eager attention returns."""

    def wrapper(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        weights, mask = output[1].float(), kwargs.get("attention_mask")
        if mask is not None:
            weights = weights.masked_fill(mask[..., : weights.shape[-1]] <= torch.finfo(mask.dtype).min / 2, 0.0)
        assert request.window is not None
        windows = _cut(weights.mean(1), request.window)
        request.deliver(windows if request.window_grad else windows.detach(), None)
        return output

    return wrap_forward(attention, wrapper, Rank.ROUTER)


def _cut(weights_BSN: Tensor, window: int) -> Tensor:
    """The `window` entries of each row that end on its own key."""
    length, keys = weights_BSN.shape[1:]
    padded = pad(weights_BSN, (window, 0))
    return torch.stack(
        [padded[:, row, keys - length + row + 1 : keys - length + row + 1 + window] for row in range(length)], dim=1
    )


def eager_capture_into(
    attention: nn.Module | None, window: int, index: int, into: dict[int, Tensor]
) -> Callable[[], None]:
    assert attention is not None

    def deliver(windows: Tensor | None, _: Tensor | None) -> None:
        assert windows is not None
        into[index] = windows

    return eager_capture(attention, CaptureRequest(window, window_grad=False, sink_index=None, deliver=deliver))


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    stock = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(stock)

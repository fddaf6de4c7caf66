"""Captures attention windows inside a Hugging Face model, one attention module at a time.

A captured module gets a stand-in for its `config` whose only difference is the attention function it names, so that masks and
every other layer keep the model's own implementation. The stand-in goes with the last request.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface

from aarlib.moe.windows import attention_with_windows

IMPLEMENTATION = "aarlib"
MASKED_BY = ("sdpa", "eager")
"""Attention implementations whose masks the capture reads."""


class AttentionInputs(NamedTuple):
    """What one attention call was given; `mask` as attention_with_windows reads it."""

    query: Float[Tensor, "B H Sq Dh"]
    key: Float[Tensor, "B Hkv Skv Dh"]
    value: Float[Tensor, "B Hkv Skv Dv"]
    mask: Tensor | None
    scale: float
    sinks: Float[Tensor, " H"] | None


class CaptureRequest(NamedTuple):
    """`window`: M, or None for the largest that others ask for. `deliver` gets windows [B,Sq,M] and the sink weight [B,Sq]."""

    window: int | None
    window_grad: bool
    sink_index: Callable[[int, int], Int[Tensor, "B Sq"]] | None
    """Maps (Sq, Skv) to the key column of each query's document start (-1: none); None: no sink weight."""
    deliver: Callable[[Float[Tensor, "B Sq M"] | None, Float[Tensor, "B Sq"] | None], None]
    observe: Callable[[AttentionInputs], None] | None = None


class _CapturingConfig:
    """The module's config in all but its attention implementation."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        self.requests: list[CaptureRequest] = []
        self._attn_implementation = IMPLEMENTATION

    def __getattr__(self, name: str) -> Any:
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)


def capture_attention(attention: nn.Module, request: CaptureRequest) -> Callable[[], None]:
    """Make `attention` deliver its windows; the returned function takes the request back (once; later calls do nothing).

    Raises ValueError where the model runs an attention implementation whose masks the capture cannot read.
    """
    config: Any = attention.config
    if not isinstance(config, _CapturingConfig):
        implementation = config._attn_implementation
        if implementation not in MASKED_BY:
            raise ValueError(
                f"attn_implementation = {implementation!r}: windows are captured under {' or '.join(MASKED_BY)}; "
                "load the model with attn_implementation='sdpa' ('eager' for gpt_oss)"
            )
        config = _CapturingConfig(config)
        attention.config = config
    config.requests.append(request)

    def remove() -> None:
        remaining = [item for item in config.requests if item is not request]
        if len(remaining) == len(config.requests):
            return
        config.requests = remaining
        if not remaining and attention.config is config:
            attention.config = config.stock

    return remove


def attached_window(attention: nn.Module) -> int | None:
    """The largest window asked for on this module, or None."""
    config = attention.config
    windows = [request.window for request in getattr(config, "requests", ()) if request.window is not None]
    return max(windows, default=None)


@torch.compiler.disable()  # requests are Python objects; inductor also fails on the band's strided reads
def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if dropout:
        raise ValueError(f"attention dropout = {dropout} while windows are captured; put the frozen model in eval()")
    requests: list[CaptureRequest] = module.config.requests  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.shape[-1] > num_keys:
        attention_mask = attention_mask[..., :num_keys]
    with_sink = next((request.sink_index for request in requests if request.sink_index is not None), None)
    mask = None if attention_mask is None else attention_mask[..., :num_keys]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = attention_with_windows(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        window=max((request.window for request in requests if request.window is not None), default=None),
        sinks=s_aux,
        sink_index=None if with_sink is None else with_sink(num_queries, num_keys).to(query.device),
        window_grad=any(request.window_grad for request in requests),
    )
    for request in requests:
        if request.observe is not None:
            request.observe(AttentionInputs(query, key, value, mask, scale, s_aux))
        request.deliver(_last(result.windows, request), result.sink)
    return result.output.transpose(1, 2).contiguous(), None


def _last(windows: Tensor | None, request: CaptureRequest) -> Tensor | None:
    if windows is None:
        return None
    windows = windows if request.window is None else windows[..., -request.window :]
    return windows if request.window_grad else windows.detach()


AttentionInterface.register(IMPLEMENTATION, _attention_forward)

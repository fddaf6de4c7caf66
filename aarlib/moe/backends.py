"""Which attention kernel serves a call. Each is compared with the plain formula before its first use in a process; one that is
off is left aside with a warning, and the block-wise path serves instead."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from aarlib.moe.kernels import KERNELS, Kernel
from aarlib.moe.windows_blockwise import causal_mask

logger = logging.getLogger("aarlib")

Backend = Literal["auto", "cpu_flash", "cuda_flash", "cuda_flex", "cuda_efficient", "blockwise"]

calls: Counter[str] = Counter()
"""How often each backend served, in this process."""
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error of the self-check, relative to the largest value (at least 1)."""
CHECKED_SHORT, CHECKED_LONG = 24, 600
"""Keys of a self-check: one block of a kernel, or several with a rest, for calls of more than LONG keys."""
LONG = 512


class Signature(NamedTuple):
    """Calls that share one self-check."""

    kernel: str
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    group: int
    masked: bool
    num_queries: int = CHECKED_SHORT
    num_keys: int = CHECKED_SHORT
    """Sizes that are checked in place of the call's: as many queries as keys, one, or a chunk behind cached keys."""


_verdicts: dict[Signature, bool] = {}
_forced: list[Backend] = []


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Every capture inside uses `backend`; a forced kernel is not checked first."""
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.remove(backend)


def choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, backend: Backend = "auto") -> Kernel | None:
    """The kernel for a call, None for block-wise. Raises ValueError where the one asked for does not take the call."""
    if backend == "auto" and _forced:
        backend = _forced[-1]
    chosen = None
    if backend == "auto":
        chosen = next((kernel for kernel in KERNELS if _suits(kernel, query, key, value, mask)), None)
        if chosen is not None and not _trusted(chosen, query, key, value, mask):
            chosen = None
    elif backend != "blockwise":
        chosen = _named(backend)
        if not _suits(chosen, query, key, value, mask):
            raise ValueError(
                f"backend = {backend!r} does not take {query.dtype} on {query.device} "
                f"{'with' if mask is not None else 'without'} a mask; use 'auto' or 'blockwise'"
            )
    calls["blockwise" if chosen is None else chosen.name] += 1
    return chosen


def _named(name: str) -> Kernel:
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    known = ", ".join(kernel.name for kernel in KERNELS)
    raise ValueError(f"backend is {name!r}: use 'auto', 'blockwise' or one of {known}")


def _suits(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    here = kernel.device == query.device.type and query.dtype in kernel.dtypes
    return here and kernel.takes(query, key, value, mask)


def _trusted(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    group = query.shape[1] // key.shape[1]
    sizes = _checked_sizes(query.shape[2], key.shape[2])
    signature = Signature(
        kernel.name, query.device, query.dtype, query.shape[-1], value.shape[-1], group, mask is not None, *sizes
    )
    if signature not in _verdicts:
        error, bound = self_check(kernel, signature), BOUNDS[query.dtype]
        _verdicts[signature] = error <= bound
        if error > bound:
            logger.warning(
                "attention kernel %s is off by %.1e (bound %.0e) in %s on %s: "
                "windows take the block-wise path instead, which is slower",
                *(kernel.name, error, bound, query.dtype, query.device),
            )
    return _verdicts[signature]


class _Sizes(NamedTuple):
    num_queries: int
    num_keys: int


def _checked_sizes(num_queries: int, num_keys: int) -> _Sizes:
    size = CHECKED_LONG if num_keys > LONG else CHECKED_SHORT
    if num_queries == num_keys:
        return _Sizes(size, size)
    return _Sizes(1 if num_queries == 1 else size // 3, size)


@torch.inference_mode(False)
@torch.no_grad()
def self_check(kernel: Kernel, signature: Signature) -> float:
    """Largest relative error of output, log-sum-exp and gradients (through both) on a few random rows; inf where it fails."""
    inputs = _random_inputs(signature)
    query, key, value, grad_output, grad_lse = inputs
    scale, (rows, columns) = signature.head_dim**-0.5, signature[-2:]
    mask = None
    if signature.masked:
        mask = causal_mask(rows, columns, query.device).clone()
        mask[..., rows // 2 :, : columns // 3] = False
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
            found = kernel.attend(query, key, value, mask, scale)
            gradients = torch.autograd.grad(found, leaves, (grad_output, grad_lse))
    except RuntimeError as problem:  # what a kernel raises that does not run on this device
        logger.warning("attention kernel %s does not run here: %s", kernel.name, str(problem).splitlines()[0])
        return float("inf")
    expected = _plain(_Inputs(*(tensor.detach().double() for tensor in inputs)), mask, scale)
    return max(_error(ours, theirs) for ours, theirs in zip((*found, *gradients), expected, strict=True))


class _Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    grad_lse: Tensor


def _random_inputs(signature: Signature) -> _Inputs:
    generator = torch.Generator().manual_seed(0)
    heads, (rows, columns) = 2 * signature.group, signature[-2:]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(signature.device, signature.dtype)

    return _Inputs(
        draw(1, heads, rows, signature.head_dim),
        draw(1, 2, columns, signature.head_dim),
        draw(1, 2, columns, signature.value_dim),
        draw(1, heads, rows, signature.value_dim),
        draw(1, heads, rows).float(),
    )


def _plain(inputs: _Inputs, mask: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients written out: dL/ds = p (grad . v - sum(output grad) + dL/dlse)."""
    query, key, value, grad_output, grad_lse = inputs
    group = query.shape[1] // key.shape[1]
    allowed = causal_mask(query.shape[2], key.shape[2], query.device) if mask is None else mask
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = (scale * query @ keys.mT).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None])
    output = weights @ values
    inner = grad_output @ values.mT - (output * grad_output).sum(-1, keepdim=True) + grad_lse[..., None]
    grad_scores = weights * inner * scale

    def per_key_head(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, group)).sum(2)

    grad_key, grad_value = per_key_head(grad_scores.mT @ query), per_key_head(weights.mT @ grad_output)
    return output, lse, grad_scores @ keys, grad_key, grad_value


def _error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected).abs().max() / expected.abs().max().clamp_min(1.0)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")

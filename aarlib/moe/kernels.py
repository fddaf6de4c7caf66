"""Fused attention kernels that give each row's log-sum-exp, differentiable in the output and in the log-sum-exp.

The table KERNELS says what exists, where it runs and which calls it takes; aarlib/moe/backends.py chooses and checks.
The CUDA entries follow the calls of torch's own scaled_dot_product_attention; they have been traced for shapes and arguments on
the meta device, and have not run on a GPU.

Backward. aten's flash backward computes p * (grad . v - sum(output * grad)) from the output it is given, and uses that output for
nothing else. With output' = output - dL/dlse * grad / |grad|^2 the sum becomes sum(output * grad) - dL/dlse, so that the part
through the log-sum-exp comes with the same call; the rounding error is that of dL/dlse itself. Where a row of grad is 0 and its
dL/dlse is not, one more column does the same: 0 in q, k and v, -dL/dlse in the output, 1 in grad.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from aarlib.moe.windows_blockwise import additive_mask, causal_mask

aten = torch.ops.aten
FLEX_MIN_KEYS = 1024
"""Below, building a block mask costs more than the blocks it saves."""
TINY = 1e-30
FLASH_MAX_HEAD = 248
"""CUDA flash takes heads up to 256; the backward may need one more column, padded to a multiple of 8."""


class Attended(NamedTuple):
    output: Float[Tensor, "B H Sq Dv"]
    lse: Float[Tensor, "B H Sq"]
    """log sum exp of the scores; 0 in fully masked rows, whose output is 0."""


class Kernel(NamedTuple):
    """`takes` looks at query, key, value, mask; `attend` is called with those and the scale."""

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    takes: Callable[[Tensor, Tensor, Tensor, Tensor | None], bool]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Attended]


class _AtenCall(NamedTuple):
    """What aten's kernels take beside q, k, v: `is_causal` aligned top-left, or an additive mask in the query's dtype."""

    is_causal: bool
    bias: Tensor | None
    scale: float


class _Aten(NamedTuple):
    """A pair of aten ops on heads of one size: forward(q, k, v, call) gives (output, lse), backward(grad, q, k, v, output, lse,
    call) the gradients of q, k, v."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    alignment: int
    """Head sizes are padded with zeros to a multiple of it."""


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: _Aten, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        call = _aten_call(mask, query, key, scale)
        width = _round_up(max(query.shape[-1], value.shape[-1]), ops.alignment)
        output, lse = ops.forward(*(_widen(tensor, width) for tensor in (query, key, value)), call)
        output = output[..., : value.shape[-1]]
        if call.bias is not None:
            empty = call.bias.amax(-1).isneginf().expand(lse.shape)
            output, lse = output.masked_fill(empty[..., None], 0), lse.masked_fill(empty, 0)
        ctx.save_for_backward(query, key, value, mask, output, lse)
        ctx.ops, ctx.scale = ops, scale
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mask, output, lse = ctx.saved_tensors
        grad_output, grad_lse = grads
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        if grad_lse is not None:
            output, grad_output = _with_lse_gradient(output, grad_output, grad_lse)
        width = _round_up(max(head_dim, output.shape[-1]), ctx.ops.alignment)
        wide = [_widen(tensor, width) for tensor in (grad_output, query, key, value, output)]
        dq, dk, dv = ctx.ops.backward(*wide, lse, _aten_call(mask, query, key, ctx.scale))
        return None, dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim], None, None


def _with_lse_gradient(output: Tensor, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(output', grad') of the module's docstring."""
    square = grad.to(grad_lse.dtype).square().sum(-1)
    carried = (square > TINY) | (grad_lse == 0)
    unknown = grad.is_meta or grad.dtype == torch.float16  # no values; a range too small for 1 / |grad|^2
    if not unknown and bool(carried.all()):
        share = (grad_lse / square.clamp_min(TINY)).to(output.dtype)
        return torch.addcmul(output, share[..., None], grad, value=-1), grad
    return torch.cat([output, -grad_lse[..., None].to(output.dtype)], dim=-1), pad(grad, (0, 1), value=1.0)


def _aten_call(mask: Tensor | None, query: Tensor, key: Tensor, scale: float) -> _AtenCall:
    if mask is not None:
        return _AtenCall(False, additive_mask(mask, query.dtype), scale)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries in (1, num_keys):
        return _AtenCall(num_queries > 1, None, scale)
    return _AtenCall(False, additive_mask(causal_mask(num_queries, num_keys, query.device), query.dtype), scale)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _widen(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def _of(ops: _Aten) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Attended]:
    return lambda query, key, value, mask, scale: Attended(*_Flash.apply(ops, query, key, value, mask, scale))


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, call: _AtenCall) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, call.is_causal, attn_mask=call.bias, scale=call.scale
    )


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: _AtenCall
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, call.is_causal, attn_mask=call.bias, scale=call.scale
    )


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, call: _AtenCall) -> tuple[Tensor, Tensor]:
    output, lse, *_ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, call.is_causal, False, scale=call.scale
    )
    return output, lse


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: _AtenCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Random state is read only with dropout; the cumulative lengths belong to nested tensors."""
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    sizes = (None, None, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, output, lse, *sizes, 0.0, call.is_causal, seed, offset, scale=call.scale
    )


EFFICIENT_LSE_ROWS = 32
"""The efficient kernel's log-sum-exp has this multiple of rows; those past the last query are +inf, so that their p is 0."""


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, call: _AtenCall) -> tuple[Tensor, Tensor]:
    key, value = (_each_head(tensor, query.shape[1]) for tensor in (key, value))
    output, lse, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, _efficient_bias(call.bias, query, key), True, 0.0, call.is_causal, scale=call.scale
    )
    return output, lse[..., : query.shape[2]]


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: _AtenCall
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    key, value = (_each_head(tensor, num_heads) for tensor in (key, value))
    rows = _round_up(query.shape[2], EFFICIENT_LSE_ROWS) - query.shape[2]
    lse = pad(lse, (0, rows), value=torch.inf).contiguous()
    state = torch.zeros((), dtype=torch.int64, device=query.device)
    wanted = [True, True, True, False]
    bias = _efficient_bias(call.bias, query, key)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, bias, output, lse, state, state, 0.0, wanted, call.is_causal, scale=call.scale
    )
    return dq, *(tensor.unflatten(1, (num_key_heads, -1)).sum(2) for tensor in (dk, dv))


def _each_head(tensor: Tensor, num_heads: int) -> Tensor:
    """Keys or values repeated for every query head."""
    return tensor if tensor.shape[1] == num_heads else tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def _efficient_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Expanded over batch and heads, its rows padded in memory to a multiple of 16 elements."""
    if bias is None:
        return None
    num_keys = key.shape[2]
    aligned = pad(bias, (0, _round_up(num_keys, 16) - num_keys))[..., :num_keys]
    return aligned.expand(query.shape[0], query.shape[1], query.shape[2], num_keys)


_block_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""One block mask a mask tensor: the layers of a forward share the tensor."""


def flex_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, compiled: bool = True
) -> Attended:
    """torch's FlexAttention on a bool mask [B,1,Sq,Skv]: blocks that are masked whole are skipped."""
    from torch.nn.attention.flex_attention import AuxRequest

    assert mask is not None
    call = _flex(compiled)
    output, aux = call(
        query,
        key,
        value,
        block_mask=_block_mask(mask),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    empty = ~mask.any(-1).expand(aux.lse.shape)
    return Attended(output.masked_fill(empty[..., None], 0), aux.lse.masked_fill(empty, 0))


def _flex(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    global _compiled_flex
    if not compiled:
        return flex_attention
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=True)
    return _compiled_flex


_compiled_flex: Callable[..., Any] | None = None


def _block_mask(mask: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if mask not in _block_masks:
        sizes, kept = (
            (mask.shape[0], None, mask.shape[2], mask.shape[3]),
            mask.detach(),
        )  # the key itself must be free to go
        _block_masks[mask] = create_block_mask(
            lambda batch, head, row, column: kept[batch, 0, row, column], *sizes, device=str(mask.device)
        )
    return _block_masks[mask]


def _flash_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    square = query.shape[2] in (1, key.shape[2])
    return mask is None and square and max(query.shape[-1], value.shape[-1]) <= FLASH_MAX_HEAD


def _flex_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if mask is None or mask.dtype != torch.bool or mask.shape[0] != query.shape[0] or mask.shape[1] != 1:
        return False
    powers = all(size & (size - 1) == 0 for size in (query.shape[-1], value.shape[-1]))
    return query.shape[2] == key.shape[2] >= FLEX_MIN_KEYS and powers


def _any(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return True


HALF, FLOAT = (torch.bfloat16, torch.float16), (torch.float32,)
KERNELS = (
    Kernel("cuda_flash", "cuda", HALF, _flash_takes, _of(_Aten(_flash_forward, _flash_backward, 8))),
    Kernel("cuda_flex", "cuda", HALF, _flex_takes, flex_attend),
    Kernel("cuda_efficient", "cuda", HALF + FLOAT, _any, _of(_Aten(_efficient_forward, _efficient_backward, 8))),
    Kernel("cpu_flash", "cpu", (torch.float32, torch.bfloat16), _any, _of(_Aten(_cpu_forward, _cpu_backward, 1))),
)
"""In order of preference; what none of them takes goes block-wise."""

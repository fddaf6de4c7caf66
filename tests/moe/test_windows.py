"""attention_with_windows against loops over tokens in float64, forward and gradients, both backends."""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from aarlib.moe import backends
from aarlib.moe import windows as windows_module
from aarlib.moe.kernels import KERNELS
from aarlib.moe.windows import attention_with_windows, mean_head_weights_reference
from aarlib.moe.windows_blockwise import blockwise_attention
from aarlib.moe.windows_fused import fused_attention
from tests.moe.naive_attention import CASES, SCALE, Case, Inputs, Naive, allowed_entries, make_inputs, naive_attention

BACKENDS = ("cpu_flash", "blockwise")


def run(inputs: Inputs, window: int | None, backend: str, window_grad: bool = True):
    return attention_with_windows(
        *inputs[:3],
        mask=inputs.mask,
        scale=SCALE,
        window=window,
        sinks=inputs.sinks,
        sink_index=inputs.sink_index,
        window_grad=window_grad,
        backend=backend,
    )


def leaves(inputs: Inputs) -> list[Tensor]:
    return [tensor for tensor in inputs[:4] if tensor is not None]


def weighted_loss(output: Tensor, windows: Tensor | None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    loss = (output * torch.randn(output.shape, generator=generator)).sum()
    if windows is not None:
        loss = loss + (windows * torch.randn(windows.shape, generator=generator) * 4).sum()
    return loss


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5, msg=lambda m: f"{what}: {m}")


class Expected(NamedTuple):
    values: Naive
    gradients: tuple[Tensor, ...]
    gradients_of_output: tuple[Tensor, ...]


@cache
def expected_results(name: str) -> Expected:
    case, inputs = CASES[name], make_inputs(CASES[name])
    naive = naive_attention(inputs, allowed_entries(case), case.window)
    both, output = weighted_loss(naive.output, naive.windows), weighted_loss(naive.output, None)
    gradients = torch.autograd.grad(both, leaves(inputs), retain_graph=True)
    return Expected(Naive(*(t.detach() for t in naive)), gradients, torch.autograd.grad(output, leaves(inputs)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_windows_sink_and_gradients_equal_loops_over_tokens(backend: str, name: str) -> None:
    case, inputs, expected = CASES[name], make_inputs(CASES[name]), expected_results(name)
    actual = run(inputs, case.window, backend)
    assert actual.windows.dtype == actual.sink.dtype == torch.float32 and not actual.sink.requires_grad
    for field in ("output", "windows", "sink"):
        assert_close(getattr(actual, field), getattr(expected.values, field), field)
    gradients = torch.autograd.grad(weighted_loss(actual.output, actual.windows), leaves(inputs))
    for index, (gradient, reference) in enumerate(zip(gradients, expected.gradients, strict=True)):
        assert_close(gradient, reference, f"gradient of {Inputs._fields[index]}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_windows_leave_the_gradient_of_plain_attention(backend: str, name: str) -> None:
    case, inputs, expected = CASES[name], make_inputs(CASES[name]), expected_results(name)
    actual = run(inputs, case.window, backend, window_grad=False)
    assert not actual.windows.requires_grad
    assert_close(actual.windows, expected.values.windows, "windows")
    gradients = torch.autograd.grad(weighted_loss(actual.output, actual.windows), leaves(inputs))
    for index, (gradient, reference) in enumerate(zip(gradients, expected.gradients_of_output, strict=True)):
        assert_close(gradient, reference, f"gradient of {Inputs._fields[index]}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_through_the_windows_is_not_small(backend: str) -> None:
    inputs = make_inputs(CASES["sinks"])
    with_windows, without = run(inputs, 4, backend), run(inputs, 4, backend, window_grad=False)
    live = torch.autograd.grad(weighted_loss(with_windows.output, with_windows.windows), leaves(inputs))
    constant = torch.autograd.grad(weighted_loss(without.output, without.windows), leaves(inputs))
    differences = [(a - b).abs().max().item() for a, b in zip(live, constant, strict=True)]
    assert min(differences[0], differences[1], differences[3]) > 1e-2, differences


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_alone_and_output_alone_have_gradients(backend: str) -> None:
    case = CASES["sinks_left_padding"]
    inputs = make_inputs(case)
    expected, actual = naive_attention(inputs, allowed_entries(case), case.window), run(inputs, case.window, backend)
    chosen = [inputs.query, inputs.key, inputs.sinks]
    for got, want in ((actual.windows, expected.windows), (actual.output, expected.output)):
        gradients = torch.autograd.grad(got.square().sum(), chosen, retain_graph=True)
        wanted = torch.autograd.grad(want.square().sum(), chosen, retain_graph=True)
        for gradient, reference in zip(gradients, wanted, strict=True):
            assert_close(gradient, reference, "gradient")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0])
def test_gradients_where_the_output_has_little_or_none_in_some_rows(backend: str, scale: float) -> None:
    case = CASES["sinks_left_padding"]
    inputs = make_inputs(case)
    expected, actual = naive_attention(inputs, allowed_entries(case), case.window), run(inputs, case.window, backend)
    rows = torch.where(torch.arange(case.queries) % 3 == 0, scale, 1.0)[:, None]
    gradients, wanted = (
        torch.autograd.grad((result.output * rows).square().sum() + result.windows.square().sum(), leaves(inputs))
        for result in (actual, expected)
    )
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert_close(gradient, reference, "gradient")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fully_masked_rows_give_zeros(backend: str) -> None:
    for name in ("left_padding", "sinks_left_padding"):
        inputs = make_inputs(CASES[name])
        assert inputs.mask is not None
        empty = ~inputs.mask[:, 0].any(-1)
        assert 0 < empty.sum() < empty.numel()
        result = run(inputs, 4, backend)
        assert not result.windows[empty].any() and not result.sink[empty].any()
        assert not result.output.transpose(1, 2)[empty].any()
        gradient = torch.autograd.grad(weighted_loss(result.output, result.windows), inputs.query)[0]
        assert not gradient.transpose(1, 2)[empty].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["left_padding", "packed", "chunked_left_padding", "sinks_left_padding", "per_head_mask"]
)
@pytest.mark.parametrize("masked_value", [-math.inf, torch.finfo(torch.float32).min])
def test_float_masks_equal_the_bool_mask(backend: str, name: str, masked_value: float) -> None:
    inputs = make_inputs(CASES[name])
    assert inputs.mask is not None
    additive = torch.zeros(inputs.mask.shape).masked_fill(~inputs.mask, masked_value)
    for actual, expected in zip(run(inputs._replace(mask=additive), 4, backend), run(inputs, 4, backend), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_finite_float_mask_is_a_bias_of_the_scores(backend: str) -> None:
    case = CASES["grouped_query"]
    inputs = make_inputs(case)
    bias = torch.randn(case.batch, case.heads, case.queries, case.keys, generator=torch.Generator().manual_seed(5))
    bias = bias.masked_fill(~allowed_entries(case), -math.inf)
    result = run(inputs._replace(mask=bias), 4, backend)
    repeated = [tensor.repeat_interleave(2, dim=1) for tensor in (inputs.key, inputs.value)]
    weights = (SCALE * inputs.query @ repeated[0].mT + bias).softmax(-1)
    assert_close(result.output, weights @ repeated[1], "output")
    for m in range(4):
        diagonal = weights.mean(1).diagonal(offset=m - 3, dim1=1, dim2=2)
        assert_close(result.windows[:, 3 - m :, m], diagonal, f"window column {m}")


@pytest.mark.parametrize("name", ["causal", "grouped_query", "left_padding", "sinks", "chunked", "packed"])
def test_the_reference_equals_loops_over_tokens(name: str) -> None:
    inputs = make_inputs(CASES[name])
    expected = naive_attention(inputs, allowed_entries(CASES[name]), 4).weights.mean(1)
    weights = mean_head_weights_reference(inputs.query, inputs.key, inputs.mask, SCALE, inputs.sinks)
    assert weights.dtype == torch.float32
    assert_close(weights, expected, "weights")


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_asked_for_is_returned(backend: str) -> None:
    inputs = make_inputs(CASES["sinks"])
    both = run(inputs, 4, backend)
    sink_only = run(inputs, None, backend)
    assert sink_only.windows is None and torch.equal(sink_only.sink, both.sink)
    common = {"mask": None, "scale": SCALE, "sinks": inputs.sinks, "backend": backend}
    windows_only = attention_with_windows(*inputs[:3], window=4, **common)
    assert windows_only.sink is None and torch.equal(windows_only.windows, both.windows)
    neither = attention_with_windows(*inputs[:3], window=None, **common)
    assert neither.windows is None and neither.sink is None and torch.equal(neither.output, both.output)
    neither.output.sum().backward()
    assert inputs.query.grad is not None and inputs.query.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputation_and_repeated_backward(backend: str) -> None:
    inputs = make_inputs(CASES["sinks_left_padding"])
    plain = run(inputs, 4, backend)
    loss = weighted_loss(plain.output, plain.windows)
    first = torch.autograd.grad(loss, leaves(inputs), retain_graph=True)
    second = torch.autograd.grad(loss, leaves(inputs))
    result = checkpoint(run, inputs, 4, backend, use_reentrant=False)
    third = torch.autograd.grad(weighted_loss(result.output, result.windows), leaves(inputs))
    for gradients in zip(first, second, third, strict=True):
        assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def flash_attention(*arguments):
    [kernel] = [kernel for kernel in KERNELS if kernel.name == "cpu_flash"]
    return fused_attention(kernel, *arguments)


@pytest.mark.parametrize("attention", [flash_attention, blockwise_attention], ids=BACKENDS)
@pytest.mark.parametrize("name", ["causal", "left_padding", "chunked", "decode"])
def test_gradcheck_in_float64(attention, name: str) -> None:
    case = CASES[name]._replace(batch=2, heads=2, key_heads=1, head_dim=3, value_dim=2, window=3, sinks=True)
    inputs = make_inputs(case._replace(queries=min(case.queries, 5), keys=5), torch.float64)

    def output_and_windows(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attention(query, key, value, inputs.mask, SCALE, 3, sinks, None, True)[:2]

    assert torch.autograd.gradcheck(output_and_windows, leaves(inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["grouped_query", "sinks_left_padding", "long", "value_narrower", "chunked"])
def test_bfloat16_is_finite(backend: str, name: str) -> None:
    case = CASES[name]
    exact, half = make_inputs(case), make_inputs(case, torch.bfloat16)
    results = [run(inputs, case.window, backend) for inputs in (exact, half)]
    assert results[1].output.dtype == torch.bfloat16
    assert results[1].windows.dtype == torch.float32
    gradients = [
        torch.autograd.grad(weighted_loss(result.output.float(), result.windows), leaves(inputs))
        for result, inputs in zip(results, (exact, half), strict=True)
    ]
    assert all(tensor.isfinite().all() for tensor in (*results[1], *gradients[1]))
    errors = [(a - b).abs().max().item() for a, b in zip(results[0], results[1], strict=True)]
    errors += [(a - b).abs().max().item() for a, b in zip(*gradients, strict=True)]
    print(f"bfloat16 against float32, {name}, {backend}: " + " ".join(f"{error:.1e}" for error in errors))


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_the_flash_kernel_creates_nothing_of_size_s_times_s() -> None:
    length = 1024
    case = Case(batch=1, heads=1, key_heads=1, queries=length, keys=length, window=40)
    inputs = make_inputs(case)
    largest = {}
    for backend in BACKENDS:
        with LargestTensor() as tracker:
            result = run(inputs, case.window, backend)
        largest[backend] = tracker.numel
        with LargestTensor() as tracker:
            weighted_loss(result.output, result.windows).backward()
        largest[backend + " backward"] = tracker.numel
    assert largest["cpu_flash"] <= length * (64 + case.window), largest
    assert largest["cpu_flash backward"] <= length * (64 + case.window), largest
    assert largest["blockwise"] >= 128 * length, largest


def test_auto_is_the_flash_kernel_on_cpu_and_equals_plain_attention() -> None:
    inputs = make_inputs(CASES["causal"])
    result = run(inputs, 4, "auto")
    assert torch.equal(result.output, run(inputs, 4, "cpu_flash").output)
    assert torch.equal(result.output, scaled_dot_product_attention(*inputs[:3], is_causal=True, scale=SCALE))
    double = make_inputs(CASES["causal"], torch.float64)
    assert torch.equal(run(double, 4, "auto").output, run(double, 4, "blockwise").output)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Dynamo cannot trace the tests' own annotation checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager(unchecked_annotations: None, backend: str) -> None:
    inputs = make_inputs(CASES["sinks_left_padding"])
    expected, actual = run(inputs, 4, backend), torch.compile(run, backend="eager")(inputs, 4, backend)
    gradients = torch.autograd.grad(weighted_loss(actual.output, actual.windows), leaves(inputs))
    wanted = torch.autograd.grad(weighted_loss(expected.output, expected.windows), leaves(inputs))
    for got, want in zip((*actual, *gradients), (*expected, *wanted), strict=True):
        assert_close(got, want, "compiled")


def test_wrong_arguments_are_named() -> None:
    inputs = make_inputs(CASES["causal"])
    query, key, value = inputs[:3]
    with pytest.raises(ValueError, match="window is 0"):
        attention_with_windows(query, key, value, mask=None, scale=1.0, window=0)
    with pytest.raises(ValueError, match="query has 9 rows and key 8"):
        attention_with_windows(query, key[:, :, :8], value[:, :, :8], mask=None, scale=1.0, window=2)
    with pytest.raises(ValueError, match="not a multiple of the 3 heads"):
        attention_with_windows(query, key[:, :3], value[:, :3], mask=None, scale=1.0, window=2)
    with pytest.raises(ValueError, match="mask requires a gradient"):
        mask = torch.zeros(2, 1, 9, 9, requires_grad=True)
        attention_with_windows(query, key, value, mask=mask, scale=1.0, window=2)
    with pytest.raises(ValueError, match="backend = 'cpu_flash' does not take torch.float32 on meta without a mask"):
        meta = [tensor.to("meta") for tensor in (query, key, value)]
        attention_with_windows(*meta, mask=None, scale=1.0, window=2, backend="cpu_flash")
    with pytest.raises(ValueError, match="backend is 'flash': use 'auto', 'blockwise' or one of cuda_flash"):
        backends._named("flash")
    check = windows_module._check
    with pytest.raises(ValueError, match="mask has shape"):
        check(query, key, value, torch.ones(2, 1, 9, 8, dtype=torch.bool), 2, None, None)
    with pytest.raises(ValueError, match="sinks has shape"):
        check(query, key, value, None, 2, torch.zeros(3), None)
    with pytest.raises(ValueError, match="sink_index has shape"):
        check(query, key, value, None, 2, None, torch.zeros(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="value has shape"):
        check(query, key, value[:, :, :8], None, 2, None, None)

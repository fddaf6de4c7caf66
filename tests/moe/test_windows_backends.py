"""The table of attention kernels: which one serves, that a wrong one is found out, and that the calls to CUDA are well formed."""

import logging
import math

import pytest
import torch
from torch import Tensor

from aarlib import identities
from aarlib.moe import backends, kernels
from aarlib.moe.backends import Signature, choose, self_check, use_backend
from aarlib.moe.kernels import KERNELS, Attended, flex_attend
from aarlib.moe.windows import attention_with_windows
from aarlib.moe.windows_blockwise import causal_mask
from aarlib.moe.windows_fused import fused_attention
from tests.tiny import tiny_inputs, tiny_model

HERE = ("cpu_flash", "blockwise")
CUDA = [kernel for kernel in KERNELS if kernel.device == "cuda"]


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdicts or counts of other tests."""
    monkeypatch.setattr(backends, "_verdicts", {})
    backends.calls.clear()


@pytest.mark.parametrize("backend", HERE)
def test_each_backend_that_exists_here_can_be_forced_and_gives_the_same_model(fresh: None, backend: str) -> None:
    model = tiny_model("olmoe")
    handle = identities.default_attach(model)
    inputs = tiny_inputs(model, padding="left")
    with use_backend(backend):
        assert identities.logits_against_eager(model, handle, inputs) < 1e-5
        assert identities.gradients_against_eager(model, handle, inputs) < 1e-5
    assert set(backends.calls) == {backend} and backends.calls[backend] > 0


def test_auto_takes_the_kernel_after_its_check(fresh: None) -> None:
    query = draw(1, 2, 8, 16)
    attention_with_windows(query, query, query, mask=None, scale=0.25, window=4)
    assert backends.calls == {"cpu_flash": 1}
    assert list(backends._verdicts.values()) == [True]
    double = query.double()
    attention_with_windows(double, double, double, mask=None, scale=0.25, window=4)
    assert backends.calls == {"cpu_flash": 1, "blockwise": 1}


def test_squares_single_queries_chunks_and_long_calls_have_a_check_each(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with one kind of call only is found, and the other kinds keep the kernel."""
    good, checked = backends._named("cpu_flash"), []

    def bad_where_queries_are_few(query: Tensor, key: Tensor, *rest) -> Attended:
        checked.append((query.shape[2], key.shape[2]))
        attended = good.attend(query, key, *rest)
        return off_by_ln2(attended) if query.shape[2] < key.shape[2] else attended

    monkeypatch.setattr(backends, "KERNELS", (good._replace(attend=bad_where_queries_are_few),))
    for queries, keys in ((8, 8), (1, 8), (3, 8), (520, 520), (1, 520), (9, 520)):
        backends.calls.clear()
        query, key = draw(1, 2, queries, 16), draw(1, 2, keys, 16)
        for _ in range(2):
            attention_with_windows(query, key, key, mask=None, scale=0.25, window=4)
        assert backends.calls == {"cpu_flash" if queries == keys else "blockwise": 2}
    in_a_check = [sizes for sizes in checked if sizes not in ((8, 8), (520, 520))]
    assert in_a_check == [(24, 24), (1, 24), (8, 24), (600, 600), (1, 600), (200, 600)]


def test_the_check_passes_also_in_a_first_forward_without_gradients(fresh: None) -> None:
    for mode in (torch.inference_mode, torch.no_grad):
        backends._verdicts.clear()
        with mode():
            query = draw(1, 2, 8, 16)
            attention_with_windows(query, query, query, mask=None, scale=0.25, window=4)
        assert list(backends._verdicts.values()) == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "value_dim", "group"), [(64, 64, 1), (16, 12, 2)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(24, 24), (1, 24), (8, 24), (600, 600), (1, 600), (200, 600)])
def test_the_cpu_kernel_passes_its_check(
    dtype: torch.dtype, head_dim: int, value_dim: int, group: int, masked: bool, sizes: tuple[int, int]
) -> None:
    kernel = backends._named("cpu_flash")
    signature = Signature(kernel.name, torch.device("cpu"), dtype, head_dim, value_dim, group, masked, *sizes)
    error = self_check(kernel, signature)
    print(f"self-check of cpu_flash, {dtype}, heads of {head_dim}/{value_dim}, {sizes}: {error:.1e}")
    assert error < (1e-5 if dtype == torch.float32 else backends.BOUNDS[dtype])


def off_by_ln2(attended: Attended) -> Attended:
    return attended._replace(lse=attended.lse + math.log(2))


def all_zeros(attended: Attended) -> Attended:
    return attended._replace(lse=attended.lse * 0)


def without_gradient(attended: Attended) -> Attended:
    return attended._replace(lse=attended.lse.detach() + 0 * attended.lse)


@pytest.mark.parametrize("corrupt", [off_by_ln2, all_zeros, without_gradient])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_corrupted_log_sum_exp_is_caught_and_block_wise_serves(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, corrupt, dtype: torch.dtype
) -> None:
    good = backends._named("cpu_flash")
    bad = good._replace(attend=lambda *arguments: corrupt(good.attend(*arguments)))
    monkeypatch.setattr(backends, "KERNELS", (bad,))
    query, key = draw(1, 4, 8, 16, dtype=dtype), draw(1, 2, 8, 16, dtype=dtype)
    with caplog.at_level(logging.WARNING, "aarlib"):
        found = attention_with_windows(query, key, key, mask=None, scale=0.25, window=4)
        attention_with_windows(query, key, key, mask=None, scale=0.25, window=4)
    assert backends.calls == {"blockwise": 2}
    [warning] = [entry.getMessage() for entry in caplog.records]
    assert "attention kernel cpu_flash is off by" in warning and "block-wise path" in warning
    expected = attention_with_windows(query, key, key, mask=None, scale=0.25, window=4, backend="blockwise")
    assert torch.equal(found.windows, expected.windows)


def test_a_kernel_that_does_not_run_is_left_aside(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CUDA kernels do not run on CPU tensors: what a device without the kernel would answer."""
    flash = backends._named("cuda_flash")._replace(device="cpu")
    monkeypatch.setattr(backends, "KERNELS", (flash,))
    query = draw(1, 2, 8, 16, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "aarlib"):
        attention_with_windows(query, query, query, mask=None, scale=0.25, window=4)
    assert backends.calls == {"blockwise": 1}
    assert "attention kernel cuda_flash does not run here" in caplog.text


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_check_leaves_a_checkpointed_forward_and_the_random_state_alone(fresh: None, checkpointed: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    query = draw(1, 2, 8, 16).requires_grad_()
    state = torch.get_rng_state()

    def run(query: Tensor) -> Tensor:
        result = attention_with_windows(query, query, query, mask=None, scale=0.25, window=4)
        return result.output.sum() + result.windows.square().sum()

    loss = checkpoint(run, query, use_reentrant=False) if checkpointed else run(query)
    loss.backward()
    assert query.grad is not None and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("queries", "keys", "head", "dtype", "mask", "expected"),
    [
        (512, 512, 64, torch.bfloat16, None, "cuda_flash"),
        (1, 512, 64, torch.bfloat16, None, "cuda_flash"),
        (7, 512, 64, torch.bfloat16, None, "cuda_efficient"),
        (512, 512, 256, torch.bfloat16, None, "cuda_efficient"),
        (512, 512, 64, torch.float32, None, "cuda_efficient"),
        (512, 512, 64, torch.bfloat16, torch.bool, "cuda_efficient"),
        (2048, 2048, 64, torch.bfloat16, torch.bool, "cuda_flex"),
        (2048, 2048, 96, torch.bfloat16, torch.bool, "cuda_efficient"),
        (2048, 2048, 64, torch.bfloat16, torch.bfloat16, "cuda_efficient"),
        (512, 512, 64, torch.float64, None, None),
    ],
)
def test_the_kernel_on_cuda_follows_the_mask(queries, keys, head, dtype, mask, expected) -> None:
    query, key = (torch.empty(2, *size, head, dtype=dtype, device="meta") for size in ((8, queries), (4, keys)))
    allowed = None if mask is None else torch.empty(2, 1, queries, keys, dtype=mask, device="meta")
    suiting = [kernel.name for kernel in CUDA if dtype in kernel.dtypes and kernel.takes(query, key, key, allowed)]
    assert (suiting[0] if suiting else None) == expected


@pytest.mark.parametrize("kernel", [kernel for kernel in CUDA if kernel.name != "cuda_flex"], ids=lambda k: k.name)
@pytest.mark.parametrize("masked", [False, True])
def test_calls_to_cuda_ops_are_well_formed(kernel: kernels.Kernel, masked: bool) -> None:
    """aten's shape functions accept the arguments, forward and backward, and every gradient has its input's shape."""
    if masked and kernel.name == "cuda_flash":
        return  # it takes no mask: the table above
    shapes = [(2, 8, 50, 64), (2, 4, 50, 64), (2, 4, 50, 48)]
    leaves = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    mask = torch.ones(2, 1, 50, 50, dtype=torch.bool, device="meta") if masked else None
    found = fused_attention(kernel, *leaves, mask, 0.125, 10, None, None, True)
    assert found.output.shape == (2, 8, 50, 48) and found.windows.shape == (2, 50, 10)
    gradients = torch.autograd.grad((found.output.float().sum(), found.windows.sum()), leaves)
    assert [tuple(gradient.shape) for gradient in gradients] == shapes


@pytest.mark.parametrize("group", [1, 2])
def test_flex_gives_the_same_windows_where_it_runs_without_a_compiler(group: int) -> None:
    """FlexAttention on CPU has no backward; its forward and log-sum-exp serve the same windows."""
    query, key, value = draw(2, 2 * group, 40, 16), draw(2, 2, 40, 16), draw(2, 2, 40, 16)
    mask = causal_mask(40, 40, query.device).repeat(2, 1, 1, 1)
    mask[1, ..., :7] = False
    flex = backends._named("cuda_flex")._replace(attend=lambda *rest: flex_attend(*rest, compiled=False))
    with torch.no_grad():
        found = fused_attention(flex, query, key, value, mask, 0.25, 6, None, None, False)
        expected = attention_with_windows(
            query, key, value, mask=mask, scale=0.25, window=6, backend="blockwise", window_grad=False
        )
    assert identities.error(found.output, expected.output) < 1e-5
    assert identities.error(found.windows, expected.windows) < 1e-5


def test_a_forced_kernel_that_does_not_take_the_call_is_an_error() -> None:
    query = draw(1, 2, 8, 16)
    with use_backend("cuda_flash"), pytest.raises(ValueError, match="'cuda_flash' does not take torch.float32 on cpu"):
        choose(query, query, query, None)
    assert choose(query, query, query, None) is backends._named("cpu_flash")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA, ids=lambda kernel: kernel.name)
def test_the_cuda_kernels_pass_their_checks(kernel: kernels.Kernel) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    masked = kernel.name != "cuda_flash"
    sizes = {"cuda_flash": [(24, 24), (1, 24), (600, 600), (1, 600)], "cuda_flex": [(600, 600)]}
    for queries, keys in sizes.get(kernel.name, [(24, 24), (1, 24), (8, 24), (600, 600), (1, 600), (200, 600)]):
        signature = Signature(kernel.name, torch.device("cuda"), torch.bfloat16, 64, 64, 2, masked, queries, keys)
        assert self_check(kernel, signature) < backends.BOUNDS[torch.bfloat16], (queries, keys)

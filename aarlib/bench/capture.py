"""Attention with windows against plain attention and against materialised attention, on the attention of `mid`.

plain: torch's scaled_dot_product_attention, without windows. eager: what Hugging Face's eager attention and a hook on its weights
amount to. ours: aarlib.moe.windows, the backward with the windows' gradient (`window_grad`) or without.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.olmoe.modeling_olmoe import eager_attention_forward

from aarlib.bench.chart import by_length
from aarlib.bench.claims import Claim, Equal, Part, equal, paired
from aarlib.bench.process import OutOfMemory, Turns, extra_peak, run_job, take_turns
from aarlib.moe.backends import LONG
from aarlib.moe.windows import attention_with_windows

HEADS, HEAD_DIM, WINDOW = 16, 64, 40
JOB = "aarlib.bench.capture"
TOLERANCE = 1e-5
EAGER_CHECKED, LAST_ROWS = 1024, 64
"""Ours is compared with eager attention up to this length, and at the whole of a longer one with plain attention, its windows on
the last rows with their softmax written out."""
MEMORY_WAYS = ("plain", "ours", "eager")
TARGETS = {
    "forward / plain": 1.6,
    "forward+backward / plain": 1.5,
    "forward+backward, windows constant / plain": 1.4,
}
EAGER_TARGET = 4.0
"""Times that the eager forward takes of ours, at 2048."""
MEMORY_TARGET = 4.5
"""Extra peak of ours, forward and backward, at 8192 over that at 2048."""


class Problem(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    grad_windows: Tensor
    window: int


def problem(length: int, heads: int, head_dim: int, window: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, length, head_dim)
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    grad_output = torch.randn(shape, generator=generator)
    grad_windows = torch.randn(1, length, window, generator=generator)
    return Problem(query, key, value, grad_output, grad_windows, window)


class _NoGroups:
    num_key_value_groups = 1
    training = False


def plain(case: Problem) -> Tensor:
    return scaled_dot_product_attention(case.query, case.key, case.value, is_causal=True)


def ours(case: Problem, window_grad: bool = True) -> tuple[Tensor, Tensor]:
    result = attention_with_windows(
        *case[:3], mask=None, scale=case.query.shape[-1] ** -0.5, window=case.window, window_grad=window_grad
    )
    assert result.windows is not None
    return result.output, result.windows


def eager(case: Problem) -> tuple[Tensor, Tensor]:
    """Hugging Face's eager attention; the windows cut from the head mean of its weights."""
    length = case.query.shape[2]
    mask = torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu(1)
    output, weights = eager_attention_forward(_NoGroups(), *case[:3], mask, case.query.shape[-1] ** -0.5)  # pyright: ignore[reportArgumentType]
    mean = torch.nn.functional.pad(weights.mean(1), (case.window - 1, 0))
    columns = torch.arange(length)[:, None] + torch.arange(case.window)
    return output.transpose(1, 2), mean.gather(2, columns[None])


def backward(case: Problem, result: Any, windows: bool = True) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    outputs, grads = [result] if isinstance(result, Tensor) else list(result), [case.grad_output, case.grad_windows]
    count = len(outputs) if windows else 1
    return torch.autograd.grad(outputs[:count], case[:3], grads[:count])


def forward_only(way: Callable[[Problem], Any], case: Problem) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return way(case)

    return call


def timings(
    length: int, rounds: int, with_eager: bool, heads: int = HEADS, head_dim: int = HEAD_DIM, window: int = WINDOW
) -> dict[str, Any]:
    """Turns of every way at one length, after `check` and `check_long`: their RuntimeError where the ways' numbers differ."""
    checked = check(min(length, EAGER_CHECKED), heads, head_dim, window)
    case = problem(length, heads, head_dim, window)
    checked += check_long(case) if length > EAGER_CHECKED else []
    calls = {
        "plain": forward_only(plain, case),
        "ours": forward_only(ours, case),
        "plain, backward": lambda: backward(case, plain(case)),
        "ours, backward": lambda: backward(case, ours(case)),
        "ours, backward, windows constant": lambda: backward(case, ours(case, False), windows=False),
    }
    if with_eager:
        calls["eager"] = forward_only(eager, case)
        calls["eager, backward"] = lambda: backward(case, eager(case))
    turns = {name: list(turns) for name, turns in take_turns(calls, rounds).items()}
    return {"equal": checked, "turns": turns}


def check(length: int, heads: int, head_dim: int, window: int) -> list[Equal]:
    """Outputs, windows and gradients of query, key and value: ours, eager and, where it has them, plain."""
    case = problem(length, heads, head_dim, window)
    expected, found = eager(case), ours(case)
    checked = [
        equal("output, ours and eager", found[0], expected[0], TOLERANCE),
        equal("windows, ours and eager", found[1], expected[1], TOLERANCE),
        equal("output, plain and eager", plain(case), expected[0], TOLERANCE),
    ]
    pairs = {
        "with the windows' gradient, ours and eager": (backward(case, found), backward(case, expected)),
        "windows constant, ours and plain": (
            backward(case, ours(case, False), windows=False),
            backward(case, plain(case)),
        ),
    }
    for name, sides in pairs.items():
        for what, one, other in zip(("query", "key", "value"), *sides, strict=True):
            checked.append(equal(f"gradient of the {what}, {name}", one, other, TOLERANCE))
    return checked


def check_long(case: Problem) -> list[Equal]:
    """At full length: outputs and gradients with constant windows against plain attention, windows of the last rows."""
    at, found, expected = f"at {case.query.shape[2]} tokens", ours(case, False), plain(case)
    checked = [
        equal(f"output {at}, ours and plain", found[0], expected, TOLERANCE),
        equal(f"windows of the last rows {at}, ours and a softmax", found[1][:, -LAST_ROWS:], last(case), TOLERANCE),
    ]
    sides = backward(case, found, windows=False), backward(case, expected)
    for what, one, other in zip(("query", "key", "value"), *sides, strict=True):
        checked.append(equal(f"gradient of the {what} {at}, windows constant, ours and plain", one, other, TOLERANCE))
    return checked


@torch.no_grad()
def last(case: Problem) -> Tensor:
    """Windows of the last rows [1, rows, M], from the whole rows of their softmax."""
    length = case.query.shape[2]
    rows = torch.arange(length - LAST_ROWS, length)
    scores = case.query[:, :, rows] @ case.key.mT * case.query.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.arange(length) > rows[:, None], -torch.inf)
    columns = rows[:, None] - case.window + 1 + torch.arange(case.window)
    return scores.softmax(-1).mean(1).gather(2, columns[None])


def memory(
    way: str, length: int, heads: int = HEADS, head_dim: int = HEAD_DIM, window: int = WINDOW
) -> dict[str, float]:
    """Extra peak of one forward and backward, after short ones that load, and check, what is loaded and checked once."""
    run = {"plain": plain, "ours": ours, "eager": eager}[way]
    for short in (64, min(length, LONG + 1)):
        backward(small := problem(short, heads, head_dim, min(window, short)), run(small))
    del small
    case = problem(length, heads, head_dim, window)
    return {"extra_gib": extra_peak(lambda: backward(case, run(case)))}


def claims_of(length: int, turns: Mapping[str, Turns]) -> list[Claim]:
    at = f"{length} tokens"
    pairs = {
        "forward / plain": ("ours", "plain"),
        "forward+backward / plain": ("ours, backward", "plain, backward"),
        "forward+backward, windows constant / plain": ("ours, backward, windows constant", "plain, backward"),
    }
    found = [
        paired(name, turns[one], turns[other], target=TARGETS[name], at=at) for name, (one, other) in pairs.items()
    ]
    if "eager" in turns:
        target = EAGER_TARGET if length == 2048 else None
        found.append(paired("eager forward / ours", turns["eager"], turns["ours"], target=target, at_least=True, at=at))
        both = turns["eager, backward"], turns["ours, backward"]
        found.append(paired("eager forward+backward / ours", *both, at=at))
    return found


def run(lengths: Sequence[int], rounds: int, threads: int, limit_gib: float, **shape: int) -> Iterator[Part]:
    """Each length's turns in one process; memory of each way in its own, under `limit_gib`."""
    grown: dict[int, float] = {}
    for length in lengths:
        settings = {"length": length, "rounds": rounds, **shape}
        found = run_job(f"{JOB}:timings", {**settings, "with_eager": True}, threads, limit_gib)
        if isinstance(found, OutOfMemory):
            found = run_job(f"{JOB}:timings", {**settings, "with_eager": False}, threads)
        peaks: dict[str, float | None] = {}
        for way in MEMORY_WAYS:
            peak = run_job(f"{JOB}:memory", {"way": way, "length": length, **shape}, threads, limit_gib)
            peaks[way] = None if isinstance(peak, OutOfMemory) else peak["extra_gib"]
        turns = {name: Turns(*values) for name, values in found["turns"].items()}
        checked, claims = [Equal(*item) for item in found["equal"]], claims_of(length, turns)
        yield Part(f"{length} tokens", checked, claims, by_length(length, 1, turns, peaks))
        grown |= {length: peaks["ours"]} if peaks["ours"] is not None else {}
    if 2048 in grown and 8192 in grown:
        growth = grown[8192] / grown[2048]
        name = "extra peak of ours, 8192 over 2048 tokens"
        yield Part("memory", claims=[Claim(name, growth, growth, growth, target=MEMORY_TARGET)])

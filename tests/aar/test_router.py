"""The router's formula against a naive reading of DESIGN 2.2, in Python loops over tokens and experts."""

import cmath
import math

import pytest
import torch

from aarlib.aar.router import CLOSED_GATE_BIAS, AttentionAwareRouter
from aarlib.aar.views import view_of, view_size

T, D, E, M = 5, 6, 4, 7


def router(views, init="default", bias=False):
    generator = torch.Generator().manual_seed(0)
    made = AttentionAwareRouter(
        torch.randn(E, D, generator=generator), torch.randn(E, generator=generator) if bias else None
    )
    made.add_views(views, M, init, generator)
    return made


def inputs():
    generator = torch.Generator().manual_seed(1)
    windows = torch.rand(T, M, generator=generator) / M
    return torch.randn(T, D, generator=generator), windows


def naive_view(view, window):
    if view == "time":
        return list(window)
    bins = []
    for k in range(len(window) // 2 + 1):
        total = sum(value * cmath.exp(-2j * math.pi * k * n / len(window)) for n, value in enumerate(window))
        bins.append(math.log(1 + abs(total)))
    return bins


@torch.no_grad()
def naive_logits(made, hidden, windows):
    rows = []
    for h, w in zip(hidden.tolist(), windows.tolist(), strict=True):
        row = []
        for e in range(E):
            standard = sum(a * b for a, b in zip(made.weight[e].tolist(), h, strict=True))
            standard += 0 if made.bias is None else float(made.bias[e])
            alphas, gated = [], []
            for view in made.views:
                features = naive_view(view, w)
                attention = sum(float(made.attention_weights[view][m, e]) * x for m, x in enumerate(features))
                gate_input = sum(
                    float(g) * x for g, x in zip(made.gate_weights[view][e].tolist(), h + features, strict=True)
                )
                gate_bias = getattr(made, f"gate_bias_{view}", None)
                gate_input += 0 if gate_bias is None else float(gate_bias[e])
                alpha = 1 / (1 + math.exp(-gate_input))
                alphas.append(alpha)
                gated.append(alpha * attention)
            count = len(made.views)
            row.append((1 - sum(alphas) / count) * standard + sum(gated) / count)
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("views", [("time",), ("spectrum",), ("time", "spectrum")])
@pytest.mark.parametrize("init", ["default", "closed"])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_follow_the_formula(views, init, bias):
    made, (hidden, windows) = router(views, init, bias), inputs()
    with torch.no_grad():
        found = made(hidden, windows)
    torch.testing.assert_close(found, naive_logits(made, hidden, windows), atol=1e-5, rtol=1e-5)
    assert (found - hidden @ made.weight.T).abs().max() > 1e-2


def test_alpha_zero_is_the_stock_router():
    made, (hidden, windows) = router(("time", "spectrum"), "closed"), inputs()
    with torch.no_grad():
        for view in made.views:
            getattr(made, f"gate_{view}").zero_()
            getattr(made, f"gate_bias_{view}").fill_(-200.0)
        torch.testing.assert_close(made(hidden, windows), hidden @ made.weight.T, atol=1e-6, rtol=1e-6)


def test_closed_starts_near_the_stock_router_and_default_does_not():
    hidden, windows = inputs()
    moved = {}
    for init in ("default", "closed"):
        made = router(("time", "spectrum"), init)
        with torch.no_grad():
            moved[init] = (made(hidden, windows) - hidden @ made.weight.T).abs().mean()
    assert made.gate_bias_time.unique().tolist() == [CLOSED_GATE_BIAS]
    assert moved["closed"] < 0.1 * moved["default"]


def test_initial_bounds_and_shapes():
    made = router(("time", "spectrum"))
    for view in made.views:
        size = view_size(view, M)
        attention, gate = made.attention_weights[view], made.gate_weights[view]
        assert attention.shape == (size, E)
        assert gate.shape == (E, D + size)
        assert 0.5 / math.sqrt(size) < attention.abs().max() <= 1 / math.sqrt(size)
        assert 0.5 / math.sqrt(D + size) < gate.abs().max() <= 1 / math.sqrt(D + size)


@pytest.mark.parametrize("window", [20, 24, 40, 7])
def test_spectrum_takes_any_window_and_bfloat16(window):
    windows = torch.rand(3, window)
    spectrum = view_of("spectrum", windows.to(torch.bfloat16))
    assert spectrum.shape == (3, window // 2 + 1)
    assert spectrum.dtype == torch.float32
    torch.testing.assert_close(spectrum, view_of("spectrum", windows.to(torch.bfloat16).float()), atol=0, rtol=0)


def test_gradient_of_the_spectrum_is_finite_at_a_zero_window():
    windows = torch.zeros(2, M, requires_grad=True)
    view_of("spectrum", windows).sum().backward()
    assert torch.isfinite(windows.grad).all()


def test_the_copy_of_the_stock_weight_is_float32_and_separate():
    weight = torch.randn(E, D)
    made = AttentionAwareRouter(weight, None)
    with torch.no_grad():
        made.weight += 1
    assert made.weight.dtype == torch.float32
    assert not torch.equal(made.weight, weight)
    assert AttentionAwareRouter(weight.to(torch.bfloat16), None).weight.dtype == torch.float32

"""The audit against the plain way on `mid`: suffix replay against whole forwards, one backward against one per sample.

One window of 256 tokens, horizon 32, one position and the layers at 1/4, 1/2, 3/4 and the end: 4 samples of 12 actions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aarlib.audit.actions import action_weights
from aarlib.audit.gradients import gradient_utilities, utilities, zero_leaves
from aarlib.audit.replay import Isolation, oracle
from aarlib.bench.measure import Measurement, measure, mid_model
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput, expert_outputs
from aarlib.moe.record import intervene

WINDOW, HORIZON, POSITION = 256, 32, 128
LAYERS = (1, 3, 5, 7)
NUM_POSITIONS = 64
PLAIN_BACKWARDS = 8
"""Of the 256 backwards of the plain way, those that are timed; the rest is scaled up."""
TOLERANCE = 3e-6


class Comparison(NamedTuple):
    name: str
    plain: Measurement
    plain_scale: float
    """What the plain way's measured time is multiplied by to stand for the whole work."""
    ours: Measurement
    speedup: float
    cpu_speedup: float
    """The same of processor times."""
    target: float
    met: bool


def run(threads: int = 1, repeats: int = 5) -> list[Comparison]:
    """Equal numbers first, then each variant in a process of its own. RuntimeError where the numbers differ."""
    check()

    def timed(variant: str, **settings: Any) -> Measurement:
        return measure(f"aarlib.bench.audit:{variant}", settings, threads, repeats)

    def compare(name: str, plain: Measurement, scale: float, ours: Measurement, target: float) -> Comparison:
        speedup, cpu_speedup = plain.median_s * scale / ours.median_s, plain.cpu_s * scale / ours.cpu_s
        return Comparison(name, plain, scale, ours, speedup, cpu_speedup, target, speedup >= target)

    forwards, samples, scale = timed("whole_forwards"), len(LAYERS), NUM_POSITIONS * len(LAYERS) / PLAIN_BACKWARDS
    return [
        compare("oracle, batched", forwards, samples, timed("replay", isolation="batched"), 8),
        compare("oracle, exact", forwards, samples, timed("replay", isolation="exact"), 2),
        compare("gradient utilities", timed("plain_backwards"), scale, timed("one_backward"), 30),
    ]


def check(model: Any = None, window: int = WINDOW, layers: tuple[int, ...] = LAYERS, horizon: int = HORIZON) -> None:
    """Both ways give the same losses and utilities."""
    model = mid_model() if model is None else model
    ids, position = tokens(model, window), window // 2
    samples = [(0, position, layer) for layer in layers]
    expected = torch.stack([whole_forward(model, ids, position, layer, horizon) for layer in layers])
    for isolation in ("exact", "batched"):
        frame = oracle(model, ids, samples, horizon=horizon, isolation=isolation)
        found = torch.tensor(frame["ce"].to_numpy()).view_as(expected)
        _equal(f"oracle ({isolation})", found, expected)
    found = gradient_utilities(model, ids, layers, positions=[position])
    for layer in layers:
        _equal(
            f"gradient utilities of layer {layer}",
            found[layer][0, position],
            plain_utility(model, ids, position, layer),
        )


def _equal(what: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    if not error < TOLERANCE:
        raise RuntimeError(f"{what}: the two ways differ by {error:.1e}; the benchmark would compare different things")


def tokens(model: Any, window: int = WINDOW) -> Tensor:
    return torch.randint(1, model.config.vocab_size, (1, window), generator=torch.Generator().manual_seed(0))


def replay(isolation: Isolation) -> Callable[[], Any]:
    model = mid_model()
    ids, samples = tokens(model), [(0, POSITION, layer) for layer in LAYERS]
    return lambda: oracle(model, ids, samples, horizon=HORIZON, isolation=isolation)


def whole_forwards() -> Callable[[], Any]:
    """One sample of the four: whichever layer is acted on, the forward is the same work."""
    model = mid_model()
    ids = tokens(model)
    return lambda: whole_forward(model, ids, POSITION, LAYERS[0], HORIZON)


@torch.no_grad()
def whole_forward(model: Any, ids: Tensor, position: int, layer: int, horizon: int) -> Tensor:
    """[A]: loss of every action from one forward of the window per action, all actions in one batch."""
    num_actions = 4 + 2 * anatomy(model).top_k

    def change(stock: RouterOutput, _: Tensor) -> RouterOutput:
        weights = stock.weights.view(num_actions, -1, stock.weights.shape[-1]).clone()
        weights[:, position] = action_weights(weights[0, position])
        return RouterOutput(stock.router_logits, weights.flatten(0, 1), stock.expert_ids)

    with intervene(model, {layer: change}):
        hidden = model.get_decoder()(ids.expand(num_actions, -1), use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, position : position + horizon])
    targets = ids[0, position + 1 : position + horizon + 1].expand(num_actions, -1)
    return cross_entropy(logits.mT, targets, reduction="none").double().mean(1)


def one_backward() -> Callable[[], Any]:
    model = mid_model()
    ids, positions = tokens(model), _positions()
    return lambda: gradient_utilities(model, ids, LAYERS, positions=positions)


def plain_backwards() -> Callable[[], Any]:
    """A backward per sample through one forward's graph, kept for all of them; the forward is not timed."""
    model = mid_model()
    ids = tokens(model)
    with torch.enable_grad(), zero_leaves(anatomy(model), LAYERS) as sums:
        logits = model(ids, use_cache=False).logits[0]
        ce = cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="none")
    samples = [(position, layer) for position in _positions()[:: NUM_POSITIONS // 2] for layer in LAYERS]
    assert len(samples) == PLAIN_BACKWARDS
    return lambda: [
        torch.autograd.grad(ce[position:].mean(), sums[layer].leaf, retain_graph=True) for position, layer in samples
    ]


def _positions() -> list[int]:
    return list(range(8, WINDOW - HORIZON, (WINDOW - HORIZON - 8) // NUM_POSITIONS))[:NUM_POSITIONS]


def plain_utility(model: Any, ids: Tensor, position: int, layer: int) -> Tensor:
    """[K]: one forward and one backward for this sample alone."""
    with torch.enable_grad(), zero_leaves(anatomy(model), [layer]) as sums:
        logits = model(ids, use_cache=False).logits[0]
        loss = cross_entropy(logits[position:-1].float(), ids[0, position + 1 :])
        gradient = torch.autograd.grad(loss, sums[layer].leaf)[0].view(ids.shape[1], -1)[position]
    kept = sums[layer]
    with torch.no_grad():
        here = slice(position, position + 1)
        outputs = expert_outputs(kept.experts, kept.hidden[here], kept.expert_ids[here])[0]
    return utilities(gradient, outputs, kept.weights[position])

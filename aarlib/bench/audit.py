"""The audit against the plain way on `mid`: suffix replay against whole forwards, one backward against one per sample.

One window of 256 tokens, horizon 32, one position and the layers at 1/4, 1/2, 3/4 and the end: 4 samples of 12 actions.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aarlib.audit.actions import action_weights
from aarlib.audit.gradients import gradient_utilities, utilities, zero_leaves
from aarlib.audit.replay import Isolation, oracle
from aarlib.bench.claims import Equal, Part, apart, equal, peaks, within
from aarlib.bench.measure import Measurement, measure, mid_model
from aarlib.bench.process import run_job
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput, expert_outputs
from aarlib.moe.record import intervene

LAYERS = (1, 3, 5, 7)
TARGETS = {"oracle, batched": 8.0, "oracle, exact": 2.0, "gradient utilities": 30.0}
"""Times that the plain way takes of ours, at least."""
PLAIN_BACKWARDS = 8
"""Of the plain way's backwards, those that are timed; the rest is scaled up."""
TOLERANCE = 3e-6
RELATIVE_TOLERANCE = 1e-4
"""Utilities of a random model are far below 1, where the tolerance above would let anything pass."""


class Settings(NamedTuple):
    window: int = 256
    horizon: int = 32
    positions: int = 64
    """Of gradient utilities."""
    shape: Mapping[str, Any] = {}
    """Changes to `mid`."""


def run(settings: Settings, threads: int = 1, repeats: int = 5) -> Iterator[Part]:
    """Equal numbers first, then each variant in a process of its own. RuntimeError where the numbers differ."""
    yield Part("equal", [Equal(*item) for item in run_job("aarlib.bench.audit:check", settings._asdict(), threads)])

    def timed(variant: str, **more: Any) -> Measurement:
        return measure(f"aarlib.bench.audit:{variant}", {**settings._asdict(), **more}, threads, repeats)

    def part(name: str, plain: Measurement, scale: float, ours: Measurement) -> Part:
        claim = apart(f"plain way / {name}", plain, ours, scale, target=TARGETS[name], at_least=True)
        details = {"plain": plain._asdict(), "plain_scale": scale, "ours": ours._asdict()}
        return Part(name, claims=[claim, *peaks({f"{name}, the plain way": plain, name: ours})], details=details)

    forwards = timed("whole_forwards")
    yield part("oracle, batched", forwards, len(LAYERS), timed("replay", isolation="batched"))
    yield part("oracle, exact", forwards, len(LAYERS), timed("replay", isolation="exact"))
    scale = settings.positions * len(LAYERS) / PLAIN_BACKWARDS
    yield part("gradient utilities", timed("plain_backwards"), scale, timed("one_backward"))


def check(**settings: Any) -> list[Equal]:
    """Both ways give the same losses and utilities, as the job that `run` starts with."""
    chosen = Settings(**settings)
    model = mid_model(**dict(chosen.shape))
    return equal_numbers(model, chosen.window, LAYERS, chosen.horizon)


def equal_numbers(model: Any, window: int, layers: tuple[int, ...], horizon: int) -> list[Equal]:
    ids, position = tokens(model, window), window // 2
    samples = [(0, position, layer) for layer in layers]
    expected = torch.stack([whole_forward(model, ids, position, layer, horizon) for layer in layers])
    checked = []
    for isolation in ("exact", "batched"):
        frame = oracle(model, ids, samples, horizon=horizon, isolation=isolation)
        found = torch.tensor(frame["ce"].to_numpy()).view_as(expected)
        checked.append(equal(f"losses of the actions, {isolation}", found, expected, TOLERANCE))
    found = gradient_utilities(model, ids, layers, positions=[position])
    for layer in layers:
        ours, theirs = found[layer][0, position], plain_utility(model, ids, position, layer)
        checked.append(equal(f"gradient utilities of layer {layer}", ours, theirs, TOLERANCE))
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        checked.append(within(f"gradient utilities of layer {layer}, of the largest", error, RELATIVE_TOLERANCE))
    return checked


def tokens(model: Any, window: int) -> Tensor:
    return torch.randint(1, model.config.vocab_size, (1, window), generator=torch.Generator().manual_seed(0))


def replay(isolation: Isolation, **settings: Any) -> Callable[[], Any]:
    model, ids, chosen = _case(settings)
    samples = [(0, chosen.window // 2, layer) for layer in LAYERS]
    return lambda: oracle(model, ids, samples, horizon=chosen.horizon, isolation=isolation)


def whole_forwards(**settings: Any) -> Callable[[], Any]:
    """One sample of the four: whichever layer is acted on, the forward is the same work."""
    model, ids, chosen = _case(settings)
    return lambda: whole_forward(model, ids, chosen.window // 2, LAYERS[0], chosen.horizon)


class _Case(NamedTuple):
    model: Any
    ids: Tensor
    settings: Settings


def _case(settings: Mapping[str, Any]) -> _Case:
    chosen = Settings(**settings)
    model = mid_model(**dict(chosen.shape))
    return _Case(model, tokens(model, chosen.window), chosen)


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


def one_backward(**settings: Any) -> Callable[[], Any]:
    model, ids, chosen = _case(settings)
    return lambda: gradient_utilities(model, ids, LAYERS, positions=positions_of(chosen))


def plain_backwards(**settings: Any) -> Callable[[], Any]:
    """A backward per sample through one forward's graph, kept for all of them; the forward is not timed."""
    model, ids, chosen = _case(settings)
    with torch.enable_grad(), zero_leaves(anatomy(model), LAYERS) as sums:
        logits = model(ids, use_cache=False).logits[0]
        ce = cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="none")
    places = positions_of(chosen)[:: chosen.positions // 2]
    samples = [(position, layer) for position in places for layer in LAYERS]
    assert len(samples) == PLAIN_BACKWARDS
    return lambda: [
        torch.autograd.grad(ce[position:].mean(), sums[layer].leaf, retain_graph=True) for position, layer in samples
    ]


def positions_of(settings: Settings) -> list[int]:
    """Evenly over the window, from 8 on, where the horizon fits."""
    step = (settings.window - settings.horizon - 8) // settings.positions
    return list(range(8, settings.window - settings.horizon, step))[: settings.positions]


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

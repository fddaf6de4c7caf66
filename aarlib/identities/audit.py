"""Identities of the fixed-dispatch audit: replay against whole forwards, one backward against one per sample."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aarlib.audit.actions import action_names, action_weights
from aarlib.audit.gradients import gradient_utilities
from aarlib.audit.replay import Isolation, oracle
from aarlib.audit.sites import Site, documents, sites
from aarlib.identities.routing import Inputs, Measure, error
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.families import Family
from aarlib.moe.patching import Rank, wrap_forward
from aarlib.moe.record import intervene, record

Samples = Sequence[tuple[int, int, int]]


class ReplayError(NamedTuple):
    largest: float
    """Of the losses, in the sense of `measure`."""
    bite: float
    """Largest |delta CE| of an action: the identity proves nothing where no action changed the loss."""


def replay_against_full_forward(
    model: Any,
    inputs: Inputs,
    samples: Samples,
    horizon: int | None = None,
    isolation: Isolation = "exact",
    family: Family | None = None,
    measure: Measure = error,
) -> ReplayError:
    """The oracle's losses against one whole batch-1 forward, without padding or cache, for every action of every sample."""
    found = oracle(
        model,
        inputs["input_ids"],
        samples,
        inputs.get("attention_mask"),
        horizon,
        isolation,
        position_ids=inputs.get("position_ids"),
        family=family,
    )
    frame = found.set_index(["row", "position", "layer", "action"])["ce"]
    names = action_names(anatomy(model, family).top_k)
    largest, bite = 0.0, 0.0
    for sample in samples:
        (site,) = _sites(inputs, [sample], horizon)
        losses = torch.stack([_acted_loss(model, site, index, family) for index in range(len(names))]).cpu()
        ours = torch.tensor([frame[(*sample, name)] for name in names], dtype=torch.float64)
        largest = max(largest, measure(ours, losses))
        bite = max(bite, float((losses - losses[0]).abs().max()))
    return ReplayError(largest, bite)


def _sites(inputs: Inputs, samples: Samples, horizon: int | None) -> list[Site]:
    found = documents(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))
    return sites(inputs["input_ids"], found, samples, horizon)


def _acted_loss(model: Any, site: Site, action: int, family: Family | None) -> Tensor:
    """Mean CE of the site's targets in a forward of its document alone, its token's weights those of `action`."""

    def change(stock: RouterOutput, _: Tensor) -> RouterOutput:
        weights = stock.weights.clone()
        weights[site.offset] = action_weights(stock.weights[site.offset])[action].to(weights.dtype)
        return RouterOutput(stock.router_logits, weights, stock.expert_ids)

    (layer,) = site.layers
    with torch.no_grad(), intervene(model, {layer: change}, family):
        logits = model(input_ids=site.tokens[None], use_cache=False).logits[0]
    return _horizon_ce(logits, site)


def _horizon_ce(logits: Tensor, site: Site) -> Tensor:
    covered = slice(site.offset, site.offset + site.num_targets)
    targets = site.tokens[site.offset + 1 : site.offset + 1 + site.num_targets].to(logits.device)
    return cross_entropy(logits[covered].double(), targets)


class GradientError(NamedTuple):
    largest: float
    """Of the utilities, in the sense of `measure`."""
    relative: float
    """Largest difference over the largest |utility|: utilities are far below 1."""
    bite: float
    """Largest |utility|: the identity proves nothing where all are zero."""


def gradients_against_autograd(
    model: Any,
    inputs: Inputs,
    samples: Samples,
    horizon: int | None = None,
    family: Family | None = None,
    measure: Measure = error,
) -> GradientError:
    """Gradient utilities of all tokens against a forward and backward per sample, of its document alone and its own loss only."""
    layers = sorted({layer for _, _, layer in samples})
    found = gradient_utilities(
        model,
        inputs["input_ids"],
        layers,
        inputs.get("attention_mask"),
        horizon,
        position_ids=inputs.get("position_ids"),
        family=family,
    )
    errors, differences, sizes = list[float](), list[float](), list[float]()
    for sample in samples:
        (site,) = _sites(inputs, [sample], horizon)
        row, position, layer = sample
        ours, expected = found[layer][row, position].cpu(), _sample_utilities(model, site, family).cpu()
        errors.append(measure(ours, expected))
        differences.append(float((ours - expected).abs().max()))
        sizes.append(float(expected.abs().max()))
    bite = max(sizes)
    return GradientError(max(errors), max(differences) / bite if bite else float("inf"), bite)


def _sample_utilities(model: Any, site: Site, family: Family | None) -> Tensor:
    """-g^T (M u_j - m) written out, g from a leaf at the site's token and layer alone."""
    (layer,) = site.layers
    experts = anatomy(model, family).moe_layer(layer).experts
    assert experts is not None
    leaves: list[Tensor] = []

    def wrapper(inner: Callable[..., Tensor], *args: Any) -> Tensor:
        output = inner(*args)
        leaves.append(torch.zeros_like(output, requires_grad=True))
        return output + leaves[-1]

    with record(model, [layer], dispatch=True, expert_outputs=True, family=family) as rec:
        remove = wrap_forward(experts, wrapper, Rank.RECORD)
        try:
            logits = model(input_ids=site.tokens[None], use_cache=False).logits[0]
        finally:
            remove()
    (leaf,) = leaves
    gradient = torch.autograd.grad(_horizon_ce(logits, site), leaf)[0][site.offset].float()
    weights = rec.dispatch[layer].weights[0, site.offset].detach().float()
    outputs = rec.expert_outputs[layer][0, site.offset].detach().float()
    routed = (weights[:, None] * outputs).sum(0)
    return torch.stack([-gradient @ (weights.sum() * output - routed) for output in outputs])

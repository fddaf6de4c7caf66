"""Identities of the fixed-dispatch audit: replay against whole forwards, one backward against one per sample."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aarlib.audit.actions import action_names, action_weights
from aarlib.audit.replay import Isolation, oracle
from aarlib.audit.sites import Site, documents, sites
from aarlib.identities.routing import Inputs
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.families import Family
from aarlib.moe.record import intervene

Samples = Sequence[tuple[int, int, int]]


class ReplayError(NamedTuple):
    largest: float
    """Largest difference of a loss, in nats."""
    bite: float
    """Largest |delta CE| of an action: the identity proves nothing where no action changed the loss."""


def replay_against_full_forward(
    model: Any,
    inputs: Inputs,
    samples: Samples,
    horizon: int | None = None,
    isolation: Isolation = "exact",
    family: Family | None = None,
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
        losses = torch.stack([_acted_loss(model, site, index, family) for index in range(len(names))])
        ours = torch.tensor([frame[(*sample, name)] for name in names], dtype=torch.float64)
        largest = max(largest, float((ours - losses).abs().max()))
        bite = max(bite, float((losses - losses[0]).abs().max()))
    return ReplayError(largest, bite)


def _sites(inputs: Inputs, samples: Samples, horizon: int | None) -> list[Site]:
    found = documents(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))
    return sites(inputs["input_ids"], found, samples, horizon)


def _acted_loss(model: Any, site: Site, action: int, family: Family | None) -> Tensor:
    """Mean CE of the site's targets in a forward of its document alone, its token's weights those of `action`."""

    def change(stock: RouterOutput, _: Tensor) -> RouterOutput:
        weights = stock.weights.clone()
        weights[site.index] = action_weights(stock.weights[site.index])[action].to(weights.dtype)
        return RouterOutput(stock.router_logits, weights, stock.expert_ids)

    (layer,) = site.layers
    with torch.no_grad(), intervene(model, {layer: change}, family):
        logits = model(input_ids=site.tokens[None], use_cache=False).logits[0]
    return _horizon_ce(logits, site)


def _horizon_ce(logits: Tensor, site: Site) -> Tensor:
    covered = slice(site.index, site.index + site.num_targets)
    targets = site.tokens[site.index + 1 : site.index + 1 + site.num_targets]
    return cross_entropy(logits[covered].double(), targets)

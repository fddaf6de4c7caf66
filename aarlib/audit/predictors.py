"""Predictors of vertex utilities from what a deployed model has, trained on exact labels (DESIGN 2.4).

reranker: the aggregation head's network scores slots directly. gradient_field: predict the downstream gradient g from
(h, u), score with it. credit_subspace: predict c, the coordinates of g in the span of the displacements. leaked: the
reranker, given the mean embedding of the tokens to come. N samples, K top_k, D d_model.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, gelu, normalize

from aarlib.audit.gradients import utilities
from aarlib.audit.head import LAYER_EMBEDDING, AggregationHead

PROJECTION_SIZE = 128
HIDDEN_SIZE = 512
BATCH = 128
Kind = Literal["reranker", "gradient_field", "credit_subspace", "leaked"]
KINDS: tuple[Kind, ...] = ("reranker", "gradient_field", "credit_subspace", "leaked")


class Examples(NamedTuple):
    """Audited samples with their features; `utility` is -delta CE of each vertex."""

    hidden: Float[Tensor, "N D"]
    outputs: Float[Tensor, "N K D"]
    weights: Float[Tensor, "N K"]
    expert_ids: Int[Tensor, "N K"]
    layers: Int[Tensor, " N"]
    gradient: Float[Tensor, "N D"]
    suffix: Float[Tensor, "N D"]
    utility: Float[Tensor, "N K"]

    def take(self, index: Tensor) -> "Examples":
        return Examples(*(field[index] for field in self))


def displacements(outputs: Float[Tensor, "N K D"], weights: Float[Tensor, "N K"]) -> Float[Tensor, "N K D"]:
    """Delta_j = M u_j - m: what committing to slot j adds to the routed sum."""
    routed = (weights[..., None] * outputs).sum(-2, keepdim=True)
    return weights.sum(-1)[..., None, None] * outputs - routed


def credit_coordinates(gradient: Float[Tensor, "N D"], displacement: Float[Tensor, "N K D"]) -> Float[Tensor, "N K"]:
    """c = (Delta Delta^T)^+ Delta g, in float64: the gradient's coordinates in the span of the displacements.

    Rank K - 1 at most, since sum_j p_j Delta_j = 0.
    """
    displacement, gradient = displacement.double(), gradient.double()
    along = (displacement @ gradient[..., None])[..., 0]
    gram = displacement @ displacement.mT
    return (torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ along[..., None])[..., 0]


def credit_utilities(coordinates: Float[Tensor, "N K"], displacement: Float[Tensor, "N K D"]) -> Float[Tensor, "N K"]:
    """-Delta Delta^T c; equal to the gradient utilities -Delta g at the coordinates of g."""
    displacement = displacement.double()
    return -(displacement @ (displacement.mT @ coordinates.double()[..., None]))[..., 0]


class SlotScorer(nn.Module):
    """The aggregation head over samples of several layers; outputs are first scaled to unit mean square a layer."""

    def __init__(self, examples: Examples, num_experts: int, seed: int, context: bool = False) -> None:
        super().__init__()
        d_model = examples.hidden.shape[-1]
        self.layers = sorted(set(examples.layers.tolist()))
        self.head = AggregationHead(
            d_model,
            num_experts,
            self.layers,
            projection_size=PROJECTION_SIZE,
            hidden_size=HIDDEN_SIZE,
            context_size=d_model if context else 0,
            seed=seed,
        )
        self.scale = {layer: _scale(examples.outputs[examples.layers == layer]) for layer in self.layers}
        self.context_scale = _scale(examples.suffix) if context else None

    def forward(self, batch: Examples) -> Float[Tensor, "N K"]:
        scores = torch.zeros_like(batch.weights)
        for layer in self.layers:
            rows = batch.layers == layer
            if rows.any():
                own = batch.take(rows)
                context = None if self.context_scale is None else own.suffix * self.context_scale
                scaled = own.outputs * self.scale[layer]
                scores[rows] = self.head(own.hidden, scaled, own.weights, own.expert_ids, layer, context=context)
        return scores


class GradientField(nn.Module):
    """g from h, the routed sum m and the mean of the u_j (so the order of slots does not matter) and the layer."""

    def __init__(self, examples: Examples, seed: int) -> None:
        super().__init__()
        d_model = examples.hidden.shape[-1]
        self.layers = sorted(set(examples.layers.tolist()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layer = nn.Embedding(len(self.layers), LAYER_EMBEDDING)
            self.read = nn.Linear(3 * d_model + LAYER_EMBEDDING, HIDDEN_SIZE)
            self.write = nn.Linear(HIDDEN_SIZE, d_model)
        self.scale = {layer: _scale(examples.outputs[examples.layers == layer]) for layer in self.layers}

    def forward(self, batch: Examples) -> Float[Tensor, "N D"]:
        scale = torch.stack([self.scale[int(layer)] for layer in batch.layers])[:, None]
        index = torch.tensor([self.layers.index(int(layer)) for layer in batch.layers])
        routed = (batch.weights[..., None] * batch.outputs).sum(1) * scale
        read = torch.cat([batch.hidden, routed, batch.outputs.mean(1) * scale, self.layer(index)], dim=-1)
        return self.write(gelu(self.read(read)))


class Predictor(NamedTuple):
    kind: Kind
    module: nn.Module
    num_parameters: int
    num_steps: int


def fit(
    kind: Kind, examples: Examples, num_experts: int, seed: int, num_steps: int = 400, learning_rate: float = 1e-3
) -> Predictor:
    """Train a predictor on exact labels with AdamW; batches drawn by `seed`. ValueError where there are no examples."""
    if examples.hidden.shape[0] == 0:
        raise ValueError("no development samples to train a predictor on")
    module: nn.Module = (
        GradientField(examples, seed)
        if kind == "gradient_field"
        else SlotScorer(examples, num_experts, seed, context=kind == "leaked")
    )
    target = _target(kind, examples)
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        for _ in range(num_steps):
            index = torch.randint(examples.hidden.shape[0], (BATCH,), generator=generator)
            loss = _loss(kind, module(examples.take(index)), target[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return Predictor(kind, module, sum(part.numel() for part in module.parameters()), num_steps)


def _target(kind: Kind, examples: Examples) -> Tensor:
    """Gradients; coordinates scaled to unit length; utilities centred and scaled to unit deviation in each sample."""
    if kind == "gradient_field":
        return examples.gradient
    if kind == "credit_subspace":
        displacement = displacements(examples.outputs, examples.weights)
        return normalize(credit_coordinates(examples.gradient, displacement), dim=-1).float()
    centred = examples.utility.float() - examples.utility.float().mean(-1, keepdim=True)
    return centred / centred.std(-1, keepdim=True, correction=0).clamp_min(1e-12)


def _loss(kind: Kind, predicted: Tensor, target: Tensor) -> Tensor:
    if kind == "gradient_field":
        return (1 - cosine_similarity(predicted, target, dim=-1)).mean()
    if kind == "credit_subspace":
        return (predicted - target).square().mean()
    return (predicted - predicted.mean(-1, keepdim=True) - target).square().mean()


@torch.no_grad()
def predict(predictor: Predictor, examples: Examples) -> Float[Tensor, "N K"]:
    """Predicted utility of each vertex, up to a positive factor of the sample."""
    predicted = predictor.module(examples)
    if predictor.kind == "gradient_field":
        return utilities(predicted, examples.outputs, examples.weights)
    if predictor.kind == "credit_subspace":
        return credit_utilities(predicted, displacements(examples.outputs, examples.weights)).float()
    return predicted


def _scale(values: Tensor) -> Tensor:
    return values.square().mean().rsqrt()

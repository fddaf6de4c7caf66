"""Expert FFN neurons. A neuron's scores are (a w / rms) * c_n with c_n [E] its down-projection row seen by a router, so that over
a stock receiver variance, APS and ANS need three constants per (neuron, receiver) and never its scores.

T tokens, K top_k, F d_ff of an expert, R receivers, E num_experts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from aarlib.lens.projection import Projection
from aarlib.lens.scores import Reading, Vector, sender_scale
from aarlib.moe.anatomy import Anatomy


class ExpertTokens(NamedTuple):
    """The tokens that chose one expert, in their order."""

    expert: int
    tokens: Int[Tensor, " n"]
    weights: Float[Tensor, " n"]
    activations: Float[Tensor, "n F"]
    """The input of the down-projection."""


def expert_tokens(reading: Reading, layer: int, only: int | None = None) -> Iterator[ExpertTokens]:
    """Each expert of a MoE layer, or `only` that one, that some token chose."""
    parts = reading.parts
    experts = parts.layers[layer].experts
    assert experts is not None
    routed = reading.capture.routed(layer)
    for expert in routed.expert_ids.unique().tolist():
        if only is not None and expert != only:
            continue
        tokens, slots = (routed.expert_ids == expert).nonzero(as_tuple=True)
        activations = neuron_activations(parts, experts, expert, routed.hidden[tokens])
        yield ExpertTokens(expert, tokens, routed.weights[tokens, slots], activations)


def neuron_activations(
    parts: Anatomy, experts: nn.Module, expert: int, hidden: Float[Tensor, "n D"]
) -> Float[Tensor, "n F"]:
    weight = experts.get_parameter("gate_up_proj")[expert].detach().to(hidden.device, torch.float32)
    weight = weight.T if parts.family.experts_layout == "in_out" else weight
    bias = getattr(experts, "gate_up_proj_bias", None)
    gate_up = linear(hidden, weight, None if bias is None else bias[expert].detach().to(hidden.device, torch.float32))
    if parts.family.experts_glu == "halves":
        gate, up = gate_up.chunk(2, dim=-1)
        return experts.act_fn(gate) * up  # pyright: ignore[reportCallIssue]
    alpha, limit = float(experts.alpha), float(experts.limit)  # pyright: ignore[reportArgumentType]
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def down_projection(projection: Projection, layer: int, expert: int) -> Float[Tensor, "F D"]:
    experts = projection.parts.layers[layer].experts
    assert experts is not None
    weight = experts.get_parameter("down_proj")[expert].detach().to(projection.device, torch.float32)
    return weight if projection.parts.family.experts_layout == "in_out" else weight.T


def expert_bias(reading: Reading, layer: int) -> Vector | None:
    """The down-projection biases of the chosen experts, weighted: moe.<layer>.bias."""
    bias = getattr(reading.parts.layers[layer].experts, "down_proj_bias", None)
    if bias is None:
        return None
    routed = reading.capture.routed(layer)
    values = torch.einsum(
        "tk,tkd->td", routed.weights, bias.detach().to(reading.projection.device, torch.float32)[routed.expert_ids]
    )
    return Vector(f"moe.{layer}.bias", 2 * layer + 1, values)


class NeuronConstants:
    """Variance, positive and negative mean over E of c_n, for every (neuron, receiver); made once for a model."""

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self._kept: dict[int, Tensor] = {}

    def of_layer(self, layer: int) -> Float[Tensor, "Es F Rs 3"]:
        if layer not in self._kept:
            experts = range(self.projection.parts.num_experts)
            self._kept[layer] = torch.stack([self._of_expert(layer, expert) for expert in experts])
        return self._kept[layer]

    def _of_expert(self, layer: int, expert: int) -> Float[Tensor, "F Rs 3"]:
        folded = self.folded(layer, expert)
        positive, mean = folded.clamp_min(0).mean(-1), folded.mean(-1)
        variance = (folded - mean[..., None]).pow(2).mean(-1)
        return torch.stack([variance, positive, mean - positive], dim=-1)

    def folded(self, layer: int, expert: int) -> Float[Tensor, "F Rs E"]:
        projection = self.projection
        start = projection.start(2 * layer + 1)
        matrix = projection.of_sublayer(layer, is_attention=False)[:, start:]
        down = down_projection(projection, layer, expert)
        return (down @ matrix.flatten(1)).unflatten(1, matrix.shape[1:])


class NeuronSums(NamedTuple):
    """Sums over tokens of variance, APS and ANS, for the neurons of one MoE layer; `first`: over first tokens only."""

    layer: int
    start: int
    all: Float[Tensor, "Es F Rs 3"]
    first: Float[Tensor, "Es F Rs 3"]
    selected: Int[Tensor, " Es"]


def neuron_sums(reading: Reading, constants: NeuronConstants) -> Iterator[NeuronSums]:
    for layer, kept in reading.capture.layers.items():
        depth = 2 * layer + 1
        start = reading.projection.start(depth)
        if kept.routed is None or start == len(reading.projection.receivers):
            continue
        table = constants.of_layer(layer)
        sums = torch.zeros(2, *table.shape, device=table.device)
        selected = torch.zeros(table.shape[0], dtype=torch.int64)
        scale = sender_scale(reading, depth)
        for item in expert_tokens(reading, layer):
            selected[item.expert] = len(item.tokens)
            weights = item.weights if scale is None else item.weights * scale[item.tokens]
            signal = item.activations * weights[:, None]
            first = reading.capture.first[item.tokens]
            sums[:, item.expert] = _sums(reading, item.tokens, signal, first, start, table[item.expert])
            if reading.state.factor is not None:
                folded = constants.folded(layer, item.expert)
                _replace_scaled(reading, item.tokens, signal, first, start, folded, sums[:, item.expert])
        yield NeuronSums(layer, start, sums[0], sums[1], selected)


def _sums(
    reading: Reading,
    tokens: Int[Tensor, " n"],
    signal: Float[Tensor, "n F"],
    first: Bool[Tensor, " n"],
    start: int,
    table: Float[Tensor, "F Rs 3"],
) -> Float[Tensor, "two F Rs 3"]:
    scale = reading.state.scale[tokens, start:]
    scale = torch.cat([scale, scale * first[:, None]], dim=1)

    def over_tokens(values: Tensor, factors: Tensor) -> Float[Tensor, "two F Rs"]:
        return (values.T @ factors).unflatten(1, (2, -1)).transpose(0, 1)

    square = over_tokens(signal.square(), scale.square())
    positive, total = over_tokens(signal.clamp_min(0), scale), over_tokens(signal, scale)
    negative = total - positive
    variance, above, below = table.unbind(-1)
    return torch.stack(
        [square * variance, positive * above + negative * below, positive * below + negative * above], -1
    )


def _replace_scaled(
    reading: Reading,
    tokens: Int[Tensor, " n"],
    signal: Float[Tensor, "n F"],
    first: Bool[Tensor, " n"],
    start: int,
    folded: Float[Tensor, "F Rs E"],
    sums: Float[Tensor, "two F Rs 3"],
) -> None:
    """AAR receivers, whose factor f is per token and expert: scores are s f_e c_e, with s the scaled signal.

    Variance of f c over e: (f^2) (c^2)^T / E - ((f c^T) / E)^2.
    """
    factor = reading.state.factor
    assert factor is not None
    num_experts = folded.shape[-1]
    for index in range(folded.shape[1]):
        receiver = reading.projection.receivers[start + index]
        terms = reading.capture.routed(receiver).terms
        if terms is None or not terms.gates:
            continue
        factor_nE, column_FE = factor[tokens, start + index], folded[:, index]
        scaled = signal * reading.state.scale[tokens, start + index, None]
        mean = factor_nE @ column_FE.T / num_experts
        above = factor_nE @ column_FE.clamp_min(0).T / num_experts
        square = factor_nE.square() @ column_FE.square().T / num_experts
        positive, negative = scaled.clamp_min(0), scaled.clamp_max(0)
        below = mean - above
        moments = torch.stack(
            [
                scaled.square() * (square - mean.square()),
                positive * above + negative * below,
                positive * below + negative * above,
            ],
            dim=-1,
        )
        sums[0, :, index] = moments.sum(0)
        sums[1, :, index] = moments[first].sum(0)

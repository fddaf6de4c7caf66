"""First-order utilities of the vertices: G_j = -g^T (M u_j - m), g = d horizon loss / d m (DESIGN 2.4, 6.2; paper, equation 4).

CE before t does not depend on m_t, so d(full-horizon loss)/d m_t is d(sum of all CE)/d m_t over the number n_t of targets from
t on: one backward for every token and layer. A limited horizon takes the CE summed up to its end: one backward per
distinct end of a row, rows sharing a backward since they do not touch. B rows, S columns, K top_k, D d_model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aarlib.audit.actions import check_freedom
from aarlib.audit.sites import IGNORED, Document, documents
from aarlib.moe.anatomy import Anatomy, anatomy
from aarlib.moe.dispatch import expert_outputs
from aarlib.moe.families import Family
from aarlib.moe.packing import packed_inputs
from aarlib.moe.patching import Rank, wrap_forward


class Horizons(NamedTuple):
    """Of every column; 0 where it has no target or was not asked for."""

    end: Int[Tensor, "B S"]
    """The column after the last one whose CE counts."""
    num_targets: Int[Tensor, "B S"]
    targets: Int[Tensor, "B S"]
    """Next tokens; -100 where there is none."""


class RoutedSums(NamedTuple):
    """One layer of a forward: a zero leaf added to the routed sum, and what the experts were given."""

    leaf: Float[Tensor, "T D"]
    hidden: Float[Tensor, "T D"]
    expert_ids: Int[Tensor, "T K"]
    weights: Float[Tensor, "T K"]
    experts: Callable[..., Tensor]


def gradient_utilities(
    model: nn.Module,
    input_ids: Int[Tensor, "B S"],
    layers: Sequence[int],
    attention_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    horizon: int | None = None,
    positions: Sequence[int] | Sequence[tuple[int, int]] | None = None,
    *,
    position_ids: Int[Tensor, "B S"] | None = None,
    family: Family | None = None,
) -> dict[int, Float[Tensor, "B S K"]]:
    """Predicted drop of the horizon loss by committing to each slot, at every position of `layers`; float32.

    `positions` restricts the work: columns (of every row) or (row, column) pairs; others, and positions without a target,
    are NaN. position_ids restart at 0 where packed documents start. ValueError for a layer without router, horizon < 1, a
    position outside the rows, top_k = 1, or an attached window that is held constant (window_grad = False).
    """
    chosen = tuple(layers)
    found = credits(
        model, input_ids, chosen, attention_mask, horizon, positions, position_ids=position_ids, family=family
    )
    utilities_of: dict[int, Tensor] = {}
    for layer, credit in found.items():
        own = utilities(credit.gradient, credit.outputs, credit.weights)
        utilities_of[layer] = own.new_full((*input_ids.shape, own.shape[-1]), torch.nan)
        utilities_of[layer][credit.rows, credit.columns] = own
    return utilities_of


class Credit(NamedTuple):
    """One layer at the N positions asked for that have a target."""

    rows: Int[Tensor, " N"]
    columns: Int[Tensor, " N"]
    gradient: Float[Tensor, "N D"]
    """d horizon loss / d m, m the routed sum."""
    hidden: Float[Tensor, "N D"]
    """h, the input of router and experts."""
    outputs: Float[Tensor, "N K D"]
    weights: Float[Tensor, "N K"]
    expert_ids: Int[Tensor, "N K"]


def credits(
    model: nn.Module,
    input_ids: Int[Tensor, "B S"],
    layers: Sequence[int],
    attention_mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None = None,
    horizon: int | None = None,
    positions: Sequence[int] | Sequence[tuple[int, int]] | None = None,
    *,
    position_ids: Int[Tensor, "B S"] | None = None,
    family: Family | None = None,
) -> dict[int, Credit]:
    """What the utilities are made of; arguments as in `gradient_utilities`."""
    parts = anatomy(model, family)
    check_freedom(parts.top_k)
    _check_windows(parts)
    chosen = [parts.moe_layer(layer).index for layer in layers]
    found = documents(input_ids, attention_mask, position_ids)
    if attention_mask is not None and len(found) > len({document.row for document in found}):
        raise ValueError("attention_mask: rows of packed documents take none; pass position_ids alone, without padding")
    horizons = _horizons(input_ids, found, horizon, positions)
    with torch.enable_grad(), zero_leaves(parts, chosen) as sums:
        ce = _ce(model, input_ids, horizons.targets, attention_mask, position_ids, family)
        gradients = _gradients(ce, horizons, sums)
    rows, columns = horizons.num_targets.nonzero(as_tuple=True)
    return {layer: _credit(gradients[layer], sums[layer], rows, columns) for layer in chosen}


@torch.no_grad()
def _credit(gradient: Float[Tensor, "B S D"], layer: RoutedSums, rows: Tensor, columns: Tensor) -> Credit:
    rows, columns = rows.to(gradient.device), columns.to(gradient.device)
    flat = rows * gradient.shape[1] + columns
    hidden, expert_ids = layer.hidden[flat], layer.expert_ids[flat]
    outputs = expert_outputs(layer.experts, hidden, expert_ids)
    return Credit(rows, columns, gradient[rows, columns], hidden, outputs, layer.weights[flat], expert_ids)


@contextmanager
def zero_leaves(parts: Anatomy, layers: Sequence[int]) -> Iterator[Mapping[int, RoutedSums]]:
    """Add a zero that asks for its gradient to the routed sum of each layer, before shared experts and output norms."""
    sums: dict[int, RoutedSums] = {}

    def wrapper_of(layer: int) -> Callable[..., Tensor]:
        def wrapper(inner: Callable[..., Tensor], hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
            output = inner(hidden, expert_ids, weights)
            leaf = torch.zeros_like(output, requires_grad=True)
            kept = (hidden.detach().flatten(0, -2), expert_ids.detach(), weights.detach())
            sums[layer] = RoutedSums(leaf, *kept, inner)
            return output + leaf

        return wrapper

    with ExitStack() as stack:
        for layer in layers:
            experts = parts.moe_layer(layer).experts
            assert experts is not None
            stack.callback(wrap_forward(experts, wrapper_of(layer), Rank.RECORD))
        yield sums


def utilities(
    gradient: Float[Tensor, "*T D"], outputs: Float[Tensor, "*T K D"], weights: Float[Tensor, "*T K"]
) -> Float[Tensor, "*T K"]:
    """G_j = -g^T (M u_j - m) with M = sum_j w_j and m = sum_j w_j u_j."""
    weights = weights.float()
    along = (outputs.float() @ gradient.float()[..., None])[..., 0]
    return (weights * along).sum(-1, keepdim=True) - weights.sum(-1, keepdim=True) * along


def _ce(
    model: Any,
    input_ids: Tensor,
    targets: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    family: Family | None,
) -> Float[Tensor, "B S"]:
    """CE of every column's target, 0 where there is none."""
    if position_ids is not None and attention_mask is None:
        arguments = packed_inputs(model, input_ids, position_ids, family)
    else:
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
        arguments = {"input_ids": input_ids, "use_cache": False}
        if attention_mask is not None:
            arguments |= {"attention_mask": attention_mask, "position_ids": position_ids}
    hidden = model.get_decoder()(**arguments).last_hidden_state
    logits = model.get_output_embeddings()(hidden).float()
    ce = cross_entropy(
        logits.flatten(0, 1), targets.to(logits.device).flatten(), ignore_index=IGNORED, reduction="none"
    )
    return ce.view(targets.shape)


def _gradients(
    ce: Float[Tensor, "B S"], horizons: Horizons, sums: Mapping[int, RoutedSums]
) -> dict[int, Float[Tensor, "B S D"]]:
    """d horizon loss / d m at every position; the k-th backward serves the k-th distinct end of each row."""
    end, counts = horizons.end.to(ce.device), horizons.num_targets.to(ce.device)
    shape, columns = ce.shape, torch.arange(ce.shape[1], device=ce.device)
    leaves = [layer.leaf for layer in sums.values()]
    totals = [torch.zeros_like(leaf).view(*shape, -1) for leaf in leaves]
    ends = [row[row > 0].unique().tolist() for row in horizons.end]
    rounds = max((len(row) for row in ends), default=0)
    for index in range(rounds):
        stop = torch.tensor([row[index] if index < len(row) else 0 for row in ends], device=ce.device)[:, None]
        found = torch.autograd.grad((ce * (columns < stop)).sum(), leaves, retain_graph=index + 1 < rounds)
        served = ((end == stop) & (end > 0))[..., None]
        for total, gradient in zip(totals, found, strict=True):
            scaled = gradient.view(*shape, -1) / counts.clamp_min(1)[..., None].to(gradient.device)
            total += torch.where(served.to(gradient.device), scaled, torch.zeros_like(scaled))
    return dict(zip(sums, totals, strict=True))


def _horizons(
    input_ids: Tensor, found: Sequence[Document], horizon: int | None, positions: Sequence[Any] | None
) -> Horizons:
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon = {horizon}: give the number of targets, 1 or more, or None for all")
    wanted = _wanted(input_ids, positions)
    end, counts = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    targets = torch.full_like(input_ids, IGNORED)
    for row, start, stop in found:
        columns = torch.arange(start, stop - 1, device=input_ids.device)
        last = torch.full_like(columns, stop - 1) if horizon is None else (columns + horizon).clamp_max(stop - 1)
        asked = wanted[row, start : stop - 1]
        end[row, start : stop - 1] = last * asked
        counts[row, start : stop - 1] = (last - columns) * asked
        targets[row, start : stop - 1] = input_ids[row, start + 1 : stop]
    return Horizons(end, counts, targets)


def _wanted(input_ids: Tensor, positions: Sequence[Any] | None) -> Bool[Tensor, "B S"]:
    if positions is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    wanted = torch.zeros_like(input_ids, dtype=torch.bool)
    num_rows, num_columns = input_ids.shape
    for place in positions:
        pairs = [tuple(place)] if isinstance(place, Sequence) else [(row, place) for row in range(num_rows)]
        for row, column in pairs:
            if not (0 <= row < num_rows and 0 <= column < num_columns):
                raise ValueError(f"positions: {place} is outside input_ids {tuple(input_ids.shape)}")
            wanted[row, column] = True
    return wanted


def _check_windows(parts: Anatomy) -> None:
    """Windows held constant would leave out how m_t moves later routers."""
    for layer in parts.layers:
        requests = getattr(getattr(layer.attention, "config", None), "requests", ())
        if any(request.window is not None and not request.window_grad for request in requests):
            raise ValueError(
                f"layer {layer.index}: windows are attached with window_grad = False, so gradients do not pass through them; "
                "attach with window_grad = True"
            )

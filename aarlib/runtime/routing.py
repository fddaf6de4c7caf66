"""What the routers did on a batch, beside what the stock routers would have done with the same hidden states."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aarlib.aar.measure import picks_kept
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.patching import Rank, wrap_forward


class RoutingCounts(NamedTuple):
    """Sums over the tokens seen, so that workers' counts add up. L MoE layers, E num_experts."""

    load_LE: Tensor
    """Picks of each expert."""
    entropy_L: Tensor
    """Of softmax over the router logits, in nats."""
    mass_L: Tensor
    """Of the selected experts' weights."""
    kept_L: Tensor
    """Picks that the stock router makes too, given the same input."""
    tokens_L: Tensor
    margin_L: Tensor
    """Of the k-th largest minus the (k+1)-th largest router logit. NaN where every expert is picked."""


def routing_metrics(counts: RoutingCounts, layers: Sequence[int]) -> dict[str, float]:
    """Means over tokens and layers; picks changed, the busiest expert's load and the margin also for each of `layers` (decoder
    indices). There is no margin where every expert is picked."""
    share_LE = counts.load_LE / counts.load_LE.sum(dim=1, keepdim=True)
    by_layer = {
        "routing/expert_load_max_share": share_LE.amax(dim=1),
        "routing/picks_changed": 1 - counts.kept_L / counts.load_LE.sum(dim=1),
    }
    if not counts.margin_L.isnan().any():
        by_layer["routing/margin"] = counts.margin_L / counts.tokens_L
    return {
        "routing/entropy": float((counts.entropy_L / counts.tokens_L).mean()),
        "routing/mass": float((counts.mass_L / counts.tokens_L).mean()),
        **{key: float(value_L.mean()) for key, value_L in by_layer.items()},
        **{
            f"{key}/layer_{layer}": float(value)
            for key, value_L in by_layer.items()
            for layer, value in zip(layers, value_L, strict=True)
        },
    }


@contextmanager
def counting(model: nn.Module, attention_mask: Tensor) -> Iterator[Callable[[], RoutingCounts]]:
    """Count routing in the forwards inside; the function it yields gives the sums. Padding is left out."""
    parts = anatomy(model)
    layers = parts.moe_layers
    kept = attention_mask.bool().reshape(-1)
    rows: dict[int, list[Tensor]] = {}

    def watch(index: int, router: nn.Module) -> Callable[..., Any]:
        def wrapper(inner: Callable[..., Any], hidden: Tensor) -> Any:
            output = inner(hidden)
            stock = RouterOutput(*type(router).forward(router, hidden))
            rows[index] = _count(RouterOutput(*output), stock.expert_ids, kept, parts.num_experts)
            return output

        return wrapper

    with ExitStack() as stack:
        for index in layers:
            router = parts.layers[index].router
            assert router is not None
            stack.callback(wrap_forward(router, watch(index, router), Rank.RECORD))
        yield lambda: RoutingCounts(*(torch.stack(column) for column in zip(*(rows[i] for i in layers), strict=True)))


def _count(output: RouterOutput, stock_ids_TK: Tensor, kept_T: Tensor, num_experts: int) -> list[Tensor]:
    logits_TE, weights_TK = output.router_logits[kept_T].double(), output.weights[kept_T].double()
    ids_TK, stock_ids_TK = output.expert_ids[kept_T], stock_ids_TK[kept_T]
    log_p_TE = logits_TE.log_softmax(dim=-1)
    top_k = ids_TK.shape[-1]
    margin = torch.tensor(torch.nan, dtype=torch.float64, device=logits_TE.device)
    if top_k < num_experts:
        highest_TK1 = logits_TE.topk(top_k + 1).values
        margin = (highest_TK1[:, -2] - highest_TK1[:, -1]).sum()
    return [
        torch.bincount(ids_TK.reshape(-1), minlength=num_experts).double(),
        -(log_p_TE.exp() * log_p_TE).sum(),
        weights_TK.sum(),
        picks_kept(ids_TK, stock_ids_TK).sum().double(),
        kept_T.sum().double(),
        margin,
    ]

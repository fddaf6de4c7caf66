"""Routing metrics against a direct count, with padding, beside the stock routers on the same hidden states."""

import torch

from aarlib.aar.config import AARConfig
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.record import record
from aarlib.runtime.routing import RoutingCounts, _count, counting, routing_metrics
from aarlib.training.methods import build_method
from tests.tiny import tiny_inputs, tiny_model


def measured(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> RoutingCounts:
    with torch.no_grad(), counting(model, inputs["attention_mask"]) as counts:
        model(**inputs)
        return counts()


def test_stock_routers_change_no_picks() -> None:
    model = tiny_model("deepseek_v2")
    inputs = tiny_inputs(model, padding="left")
    layers = anatomy(model).moe_layers
    metrics = routing_metrics(measured(model, inputs), layers)
    assert metrics["routing/picks_changed"] == 0
    assert set(layers) == {int(key.rpartition("_")[2]) for key in metrics if "picks_changed/layer_" in key}


def counts_of(layers: list[RouterOutput], num_experts: int) -> RoutingCounts:
    kept = torch.ones(len(layers[0].expert_ids), dtype=torch.bool)
    rows = [_count(output, output.expert_ids, kept, num_experts) for output in layers]
    return RoutingCounts(*(torch.stack(column) for column in zip(*rows, strict=True)))


def test_the_margin_of_hand_made_logits() -> None:
    """k = 2: third from second is 1 - 0.25 and 3 - 1; in the second layer 0 and 4."""
    first = torch.tensor([[1.0, 0.25, 2.0, -5.0], [3.0, 0.0, 1.0, 7.0]])
    second = torch.tensor([[5.0, 5.0, 5.0, -1.0], [0.0, 4.0, 8.0, -1.0]])
    layers = [RouterOutput(logits, torch.ones(2, 2), logits.topk(2).indices) for logits in (first, second)]
    metrics = routing_metrics(counts_of(layers, 4), (3, 7))
    assert metrics["routing/margin/layer_3"] == (0.75 + 2) / 2
    assert metrics["routing/margin/layer_7"] == (0 + 4) / 2
    assert metrics["routing/margin"] == (1.375 + 2) / 2
    everyone = RouterOutput(first, torch.ones(2, 4), first.topk(4).indices)
    assert not [key for key in routing_metrics(counts_of([everyone], 4), (0,)) if "margin" in key]


def test_opposite_imbalances_of_two_layers_do_not_cancel() -> None:
    """8 tokens on expert 0 in one layer and on expert 1 in the next: summed over layers they would look balanced."""
    logits = torch.tensor([[1.0, 0.0]]).expand(8, 2)
    layers = [
        RouterOutput(values, torch.ones(8, 1), values.argmax(-1, keepdim=True)) for values in (logits, logits.flip(1))
    ]
    counts = counts_of(layers, 2)
    assert counts.load_LE.tolist() == [[8, 0], [0, 8]]
    metrics = routing_metrics(counts, (0, 1))
    for key in ("", "/layer_0", "/layer_1"):
        assert metrics[f"routing/expert_load_max_share{key}"] == 1.0


def test_counts_are_those_of_record() -> None:
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model, padding="right")
    handle = build_method(AARConfig(layers=(1, 2), window=4), 0).attach(model)
    for name, parameter in handle.trainable():
        if "attention_" in name:
            parameter.data.mul_(10)
    with torch.no_grad(), record(model, dispatch=True, router_logits=True) as seen:
        model(**inputs)
    counts = measured(model, inputs)
    kept = inputs["attention_mask"].bool()
    for index in range(3):
        weights, ids = seen.dispatch[index]
        log_p = seen.router_logits[index][kept].log_softmax(-1)
        torch.testing.assert_close(counts.load_LE[index], torch.bincount(ids[kept].flatten(), minlength=8).double())
        torch.testing.assert_close(counts.mass_L[index], weights[kept].double().sum())
        torch.testing.assert_close(counts.entropy_L[index].float(), -(log_p.exp() * log_p).sum())
    metrics = routing_metrics(counts, (0, 1, 2))
    assert metrics["routing/picks_changed/layer_0"] == 0
    assert metrics["routing/picks_changed/layer_1"] > 0.1
    handle.detach()

"""Routing metrics against a direct count, with padding, beside the stock routers on the same hidden states."""

import torch

from aarlib.aar.config import AARConfig
from aarlib.moe.anatomy import anatomy
from aarlib.moe.record import record
from aarlib.runtime.routing import RoutingCounts, counting, routing_metrics
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

"""AARV by hand, real ablation against removed weights, early prediction, IOI."""

import pytest
import torch

from aarlib import identities
from aarlib.lens import aarv, decompose
from aarlib.lens.ablation import (
    Expert,
    coexistence,
    effect,
    outcome,
    without_attention,
    without_experts,
)
from aarlib.lens.influence import expert_sums, head_sums, layer_sums
from aarlib.lens.ranking import moments_and_aarv, ranks
from aarlib.lens.uses import ce_without_attention, pick_counts, prefetch_recall
from aarlib.moe.record import record
from tests.aar.reference import select
from tests.tiny import FAMILIES, tiny_inputs, tiny_model


def test_ranks_by_hand():
    logits = torch.tensor([[0.1, 3.0, 3.0, -1.0]])
    assert ranks(logits, torch.tensor([[1, 2, 0, 3]])).tolist() == [[0, 1, 2, 3]]


def slow_aarv(found, receiver, name):
    kept = found.reading.capture
    logits = found.logits(receiver)[kept.mask]
    without = logits - found.scores(receiver, name)[kept.mask]
    total = []
    for token, ids in enumerate(kept.routed(receiver).expert_ids.tolist()):
        before = logits[token].argsort(descending=True, stable=True).tolist()
        after = without[token].argsort(descending=True, stable=True).tolist()
        total += [abs(before.index(expert) - after.index(expert)) for expert in ids]
    return sum(total) / len(total)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("aar", [False, True], ids=["stock", "aar"])
def test_aarv_is_the_mean_change_of_rank_of_the_chosen_experts(family, aar):
    """By layer, head and expert, at the first receiver and the last."""
    model = tiny_model(family)
    if aar:
        identities.default_attach(model)
    inputs = tiny_inputs(model, length=8, padding="left")
    for by, sums_of in (("layer", layer_sums), ("head", head_sums), ("expert", expert_sums)):
        found = decompose(model, **inputs, by=by)
        sums = sums_of(found.reading, moments_and_aarv(found.reading))
        means = sums.mean()[..., 3]
        for column in (0, -1):
            receiver, values = found.receivers[column], []
            names = [name for name in found.components(receiver) if name in sums.senders]
            for name in names[:: 1 + len(names) // 12]:
                expected = slow_aarv(found, receiver, name)
                assert aarv(found, receiver, name) == pytest.approx(expected, abs=1e-6)
                assert means[sums.senders.index(name), column] == pytest.approx(expected, abs=1e-6)
                values.append(expected)
            assert not values or max(values) > 0.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["zero", "route_around"])
def test_removed_experts_do_nothing_and_nothing_is_left_behind(family, how):
    model = tiny_model(family)
    inputs = tiny_inputs(model, padding="left")
    layer = decompose(model, **inputs).receivers[0]
    stock = outcome(model, **inputs)
    gone = [Expert(layer, 0), Expert(layer, 3)]
    with without_experts(model, gone, how), record(model, dispatch=True) as kept:
        changed = outcome(model, **inputs)
        dispatch = kept.dispatch[layer]
    hit = torch.isin(dispatch.expert_ids, torch.tensor([0, 3]))
    assert torch.isin(stock.expert_ids[layer], torch.tensor([0, 3])).any()
    weights, ids = select(model.config, stock.logits[layer].flatten(0, 1))
    if how == "zero":
        assert hit.any() and not dispatch.weights[hit].any()
        weights = weights.masked_fill(torch.isin(ids, torch.tensor([0, 3])), 0)
    else:
        assert not hit.any()
        left = torch.tensor([expert for expert in range(8) if expert not in (0, 3)])
        weights, ids = select(model.config, stock.logits[layer].flatten(0, 1)[:, left])
        ids = left[ids]
    expected, found = (
        torch.zeros(len(chosen), 8).scatter_(1, chosen, values)
        for values, chosen in ((weights, ids), (dispatch.weights.flatten(0, 1), dispatch.expert_ids.flatten(0, 1)))
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    found = effect(stock, changed, inputs["attention_mask"])
    assert found.ce_delta.abs().max() > 1e-4
    assert found.logits_moved[max(stock.logits)].max() > 1e-2
    again = effect(stock, outcome(model, **inputs), inputs["attention_mask"])
    assert again.ce_delta.abs().max() == 0 and not again.picks_changed[layer].any()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_zeroing_an_expert_equals_a_model_whose_expert_is_zero():
    model, other = tiny_model("olmoe"), tiny_model("olmoe")
    inputs = tiny_inputs(model)
    other.model.layers[1].mlp.experts.down_proj[5] = 0
    with without_experts(model, [Expert(1, 5)], "zero"):
        found = outcome(model, **inputs)
    expected = outcome(other, **inputs)
    torch.testing.assert_close(found.ce_sums, expected.ce_sums, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found.logits[2], expected.logits[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["zero", "route_around"])
def test_coexistence_is_the_removal_of_each_and_of_both(how):
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model, padding="right")
    first, second = Expert(0, 1), Expert(1, 2)
    found = coexistence(model, inputs["input_ids"], inputs["attention_mask"], first, second, how)
    stock, mask = outcome(model, **inputs), inputs["attention_mask"].bool()
    for name, experts in {"first": [first], "second": [second], "both": [first, second]}.items():
        with without_experts(model, experts, how):
            expected = effect(stock, outcome(model, **inputs), mask)
        assert torch.equal(found[name].ce_delta, expected.ce_delta)
        for layer in (0, 1, 2):
            assert torch.equal(found[name].picks_changed[layer], expected.picks_changed[layer])
            assert torch.equal(found[name].logits_moved[layer], expected.logits_moved[layer])
    deltas = torch.stack([found[name].ce_delta for name in ("first", "second", "both")])
    assert (deltas[:, None] - deltas[None])[~torch.eye(3, dtype=torch.bool)].abs().min() > 1e-5
    assert not found["second"].picks_changed[0].any() and found["first"].logits_moved[1].min() > 1e-3


def test_wrong_experts_and_layers_are_refused():
    model = tiny_model("deepseek_v2")
    for experts, message in (
        ([Expert(1, 8)], r"experts: layer 1 has no expert 8; it has 0\.\.7"),
        ([Expert(0, 1)], "layer 0 has no router"),
        ([Expert(1, e) for e in range(6)], "experts: without 6 of layer 1 fewer than top_k = 3 are left"),
    ):
        with pytest.raises(ValueError, match=message), without_experts(model, experts):
            pass
    with (
        pytest.raises(ValueError, match=r"layers = \[9\]: \[9\] do not exist; the model has 0\.\.3"),
        without_attention(model, [9]),
    ):
        pass


@pytest.mark.parametrize("family", ["olmoe", "flex_olmo", "qwen3_5_moe"])
def test_without_attention_the_component_is_zero(family):
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    with without_attention(model, [1]):
        assert not decompose(model, **inputs).scores(2, "attn.1").any()
    assert decompose(model, **inputs).scores(2, "attn.1").any()
    stock = outcome(model, **inputs)
    dropped = ce_without_attention(model, **inputs, layers=[1])
    assert (dropped - stock.ce_sums / stock.num_targets).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "gpt_oss"])
def test_recall_of_early_predictions(family):
    """Against the router applied to the residual stream of an earlier layer, taken from the model itself."""
    model = tiny_model(family)
    inputs = tiny_inputs(model, padding="left")
    found = decompose(model, **inputs)
    recalls = {(item.receiver, item.lag): item.sums for item in prefetch_recall(found.reading, (1, 2))}
    receiver = found.receivers[-1]
    kept, layer = found.reading.capture, model.model.layers[receiver]
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        router = layer.mlp.router if family == "gpt_oss" else layer.mlp.gate
        for lag in (1, 2):
            earlier = states[receiver - lag + 1][kept.mask]
            z = kept.layers[receiver].residual
            norm = layer.post_attention_layernorm
            scaled = earlier * norm.weight / (z.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
            logits = scaled @ router.weight.T + (router.bias if family == "gpt_oss" else 0)
            predicted = logits.topk(3).indices
            hits = (kept.routed(receiver).expert_ids[:, :, None] == predicted[:, None]).any(-1).float().mean(-1)
            assert recalls[receiver, lag].sum() == pytest.approx(float(hits.sum()), abs=1e-3)
            assert 0 < hits.mean() < 1
    counts = pick_counts(found.reading)
    assert counts.sum(1).tolist() == [3 * len(kept.first)] * len(found.receivers)

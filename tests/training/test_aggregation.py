"""The FDAA loss against the plain way, the unit rule, the frozen prefix and its cache."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from aarlib import identities
from aarlib.fdaa.config import FDAAConfig, StaticCalibratorConfig
from aarlib.moe.anatomy import anatomy
from aarlib.moe.patching import Rank, wrap_forward
from aarlib.training.aggregation import PREFIX, assignment
from aarlib.training.config import RunConfig
from aarlib.training.methods import build_method
from aarlib.training.prefix import FrozenPrefix, ResidualCache
from tests.tiny import FAMILIES, tiny_inputs, tiny_model


def batch_of(model, padding="right", seed=0):
    inputs = tiny_inputs(model, padding=padding, seed=seed)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, 5] = -100
    return {**inputs, "labels": labels}


def method_of(model, layers, name="fdaa", **options):
    kind = FDAAConfig if name == "fdaa" else StaticCalibratorConfig
    method = build_method(kind(layers=layers, kl_weight=0.3, score_weight=0.2, **options), seed=1)
    handle = method.attach(model)
    identities.randomise_head(handle, scale=0.5)
    return method, handle


def gradients(handle, terms):
    handle.module.zero_grad()
    sum(term.sum for term in terms.values()).backward()
    return {name: parameter.grad.clone() for name, parameter in handle.trainable()}


def plain_loss(model, handle, batch, layer):
    """Logits of the whole patched model, penalties from their definitions."""
    handle.acting = (layer,)
    with handle.scoring() as scored:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    handle.acting = handle.layers
    ce = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    weights, scores = scored[layer]
    p = weights / weights.sum(-1, keepdim=True)
    q = (p.log() + scores).softmax(-1)
    keep = torch.zeros_like(batch["labels"], dtype=torch.bool)
    keep[:, :-1] = batch["labels"][:, 1:] != -100
    kl = (torch.xlogy(q, q) - q * p.log()).sum(-1)[keep.flatten()].sum()
    return {"ce": ce, "kl_penalty": 0.3 * kl, "score_penalty": 0.2 * (scores**2).sum(-1)[keep.flatten()].sum()}


@pytest.mark.parametrize("with_aar", [False, True], ids=["stock", "aar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_terms_and_gradients_equal_the_plain_way(family, with_aar):
    model = tiny_model(family)
    if with_aar:
        identities.default_attach(model)
    layers = anatomy(model).moe_layers
    method, handle = method_of(model, layers)
    batch = batch_of(model)
    for index, layer in enumerate(layers):
        terms = method.loss(model, batch, step=index)
        ours = gradients(handle, terms)
        expected = plain_loss(model, handle, batch, layer)
        handle.module.zero_grad()
        sum(expected.values()).backward()
        for name, term in terms.items():
            assert term.count == (batch["labels"][:, 1:] != -100).sum()
            assert float(term.sum.detach()) > 1e-2
            assert abs(float((term.sum - expected[name]).detach())) <= 1e-5 * max(1.0, abs(float(expected[name])))
        for name, parameter in handle.trainable():
            scale = parameter.grad.abs().max().clamp_min(1.0)
            assert float((ours[name] - parameter.grad).abs().max() / scale) < 1e-5
        assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-3


def test_activation_checkpointing_is_refused():
    values = {
        "name": "a", "data": {"domains": {"a": {"text": ["a.txt"]}}}, "optim": {"activation_checkpointing": True},
    }  # fmt: skip
    assert RunConfig.from_mapping({**values, "method": {"sft": {"name": "router_sft"}}}).optim.activation_checkpointing
    for name in ("fdaa", "static_calibrator"):
        method = {"head": {"name": name, "layers": [1]}}
        with pytest.raises(ValueError, match="optim.activation_checkpointing: method.head acts on a frozen prefix"):
            RunConfig.from_mapping({**values, "method": method})


def test_the_static_calibrator_trains_under_the_same_loss():
    model = tiny_model("olmoe")
    method, handle = method_of(model, (1, 2), "static_calibrator")
    batch = batch_of(model)
    found = gradients(handle, method.loss(model, batch, step=1))["head.table"]
    assert float(found[1].abs().max()) > 1e-3 and float(found[0].abs().max()) == 0
    expected = plain_loss(model, handle, batch, 2)
    assert abs(float(expected["ce"] - method.loss(model, batch, step=1)["ce"].sum)) < 1e-3


def test_terms_add_up_over_micro_batches():
    model = tiny_model("olmoe")
    method, _ = method_of(model, (1,))
    batch = batch_of(model)
    whole = method.loss(model, batch, 0)
    parts = [method.loss(model, {k: v[row : row + 1] for k, v in batch.items()}, 0) for row in range(2)]
    for name, term in whole.items():
        assert abs(float(term.sum - sum(part[name].sum for part in parts))) < 1e-3
        assert term.count == sum(part[name].count for part in parts)


def test_the_unit_rule():
    found = [assignment(unit, 2, (3, 7, 11)) for unit in range(8)]
    assert [a.domain for a in found] == [0, 1] * 4
    assert [a.layer for a in found] == [3, 3, 7, 7, 11, 11, 3, 3]
    model = tiny_model("olmoe")
    method, _ = method_of(model, (0, 1))
    batch = {**batch_of(model), "num_domains": 2}
    assert method.acting_layer({**batch, "unit": torch.tensor([2, 3])}, step=9) == 1
    assert method.acting_layer(batch, step=9) == 0
    with pytest.raises(ValueError, match=r"units \[1, 2\] of one batch train layers \[0, 1\]"):
        method.acting_layer({**batch, "unit": torch.tensor([1, 2])}, step=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_residual_stream_gives_the_same_loss_without_the_lower_layers(family, tmp_path):
    model = tiny_model(family)
    parts = anatomy(model)
    layer = parts.moe_layers[-1]
    method, handle = method_of(model, (layer,))
    batch, ids = batch_of(model), ["a", "b"]
    expected = gradients(handle, method.loss(model, batch, 0))
    calls = []
    remove = wrap_forward(parts.layers[0].attention_norm, lambda inner, *a: calls.append(1) or inner(*a), Rank.RECORD)
    cache = ResidualCache(tmp_path, budget=1 << 20)
    frozen = FrozenPrefix(parts, layer, cache)
    for expected_calls in (1, 1):
        handle.enabled = False
        prefix = frozen(batch, layer, ids)
        handle.enabled = True
        found = gradients(handle, method.loss(model, {**batch, PREFIX: prefix}, 0))
        for name, value in found.items():
            assert float((value - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1)) < 1e-5
        assert len(calls) == expected_calls
    assert (frozen.num_runs, frozen.num_cached, len(cache)) == (1, 1, 2)
    remove()
    cache.close()
    assert not list(tmp_path.iterdir())


def test_the_cache_keeps_to_its_budget_and_to_the_dtype(tmp_path):
    rows = torch.randn(3, 6, 4).to(torch.bfloat16)
    cache = ResidualCache(tmp_path, budget=2 * 6 * 4 * 2)
    cache.store(["a", "b", "c"], [6, 5, 6], rows)
    assert len(cache) == 2 and cache.size <= cache.budget
    assert cache.load(["a", "c"], 6, torch.device("cpu")) is None
    found = cache.load(["b", "a"], 6, torch.device("cpu"))
    assert torch.equal(found[1], rows[0]) and torch.equal(found[0, :5], rows[1, :5])
    assert found.dtype == torch.bfloat16 and not found[0, 5].any()
    cache.close()


def test_nothing_below_the_head_has_a_graph():
    model = tiny_model("olmoe")
    model.get_input_embeddings().weight.requires_grad_(True)
    method, _ = method_of(model, (2,))
    method.loss(model, batch_of(model), 0)["ce"].sum.backward()
    assert model.get_input_embeddings().weight.grad is None

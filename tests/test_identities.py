"""The golden identities of DESIGN 7 on tiny random models of all eight families, float32, CPU."""

import pytest
import torch

from aarlib import identities
from aarlib.moe.anatomy import anatomy
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

PADDINGS = ("none", "left", "right")
families = pytest.mark.parametrize("family", FAMILIES)
paddings = pytest.mark.parametrize("padding", PADDINGS)


def attached(family, **overrides):
    model = tiny_model(family, **overrides)
    handle = identities.default_attach(model)
    return model, handle


@families
def test_the_intervention_bites(family):
    model, handle = attached(family)
    assert len([router for router in handle.routers.values() if router.views]) >= 2
    bite = identities.bite(model, handle, tiny_inputs(model))
    assert bite.picks_changed > 0.1
    assert bite.logits_moved > 1e-2


@families
def test_disabled_and_detached_are_the_stock_model_bitwise(family):
    model = tiny_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert identities.disabled_is_stock(model, identities.default_attach, tiny_inputs(model, padding="left")) == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@families
def test_disabled_is_stock_also_after_training(family):
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        stock = model(**inputs).logits
    handle = identities.default_attach(model)
    optimizer = torch.optim.AdamW([parameter for _, parameter in handle.trainable()], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert (model(**inputs).logits - stock).abs().max() > 1e-2
        handle.enabled = False
        assert torch.equal(model(**inputs).logits, stock)
        handle.detach()
        assert torch.equal(model(**inputs).logits, stock)
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert all("forward" not in module.__dict__ for module in model.modules())


@families
@paddings
@pytest.mark.parametrize("window", [2, 40])
def test_windows_equal_materialised_attention(family, padding, window):
    model = tiny_model(family)
    assert identities.windows_against_eager(model, window, tiny_inputs(model, padding=padding)) < 1e-5


@families
@paddings
def test_logits_equal_those_fed_from_materialised_attention(family, padding):
    model, handle = attached(family)
    assert identities.logits_against_eager(model, handle, tiny_inputs(model, padding=padding)) < 1e-5


@families
@paddings
def test_gradients_equal_autograd_through_materialised_attention(family, padding):
    model, handle = attached(family)
    assert identities.gradients_against_eager(model, handle, tiny_inputs(model, padding=padding)) < 1e-5


@families
@pytest.mark.parametrize(("chunk", "padding"), [(1, "left"), (7, "left"), (7, "none")])
def test_prefill_equals_decode(family, chunk, padding):
    model, _ = attached(family)
    inputs = tiny_inputs(model, length=16, padding=padding)
    assert identities.prefill_against_decode(model, inputs, chunk) < 1e-5


@families
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batch_equals_one_by_one(family, padding):
    model, _ = attached(family)
    assert identities.batch_against_single(model, tiny_inputs(model, batch=3, padding=padding)) < 1e-5


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_5_moe"])
def test_packed_documents_equal_each_alone(family):
    model, _ = attached(family)
    assert identities.packed_against_single(model, tiny_inputs(model)["input_ids"][:1], [9, 4, 11]) < 1e-5


def test_packing_is_refused_on_linear_attention():
    model, _ = attached("qwen3_5_moe")
    with pytest.raises(ValueError, match="linear attention, whose state crosses documents"):
        identities.packed_against_single(model, tiny_inputs(model)["input_ids"][:1], [9, 4, 11])


@pytest.mark.parametrize("sliding_window", [4, 8])
def test_sliding_attention_of_mixtral(sliding_window):
    stock = tiny_model("mixtral", sliding_window=sliding_window)
    inputs = tiny_inputs(stock, padding="left")
    assert identities.windows_against_eager(stock, 10, inputs) < 1e-5
    model, handle = attached("mixtral", sliding_window=sliding_window)
    assert identities.logits_against_eager(model, handle, inputs) < 1e-5
    assert identities.prefill_against_decode(model, inputs, 1) < 1e-5


@families
def test_selection_equals_the_stock_gate_exactly(family):
    model = tiny_model(family)
    assert identities.selection_against_gate(model, tiny_inputs(model)) == 0.0


@families
def test_selection_equals_the_stock_gate_exactly_in_bfloat16(family):
    model = tiny_model(family).to(torch.bfloat16)
    assert identities.selection_against_gate(model, tiny_inputs(model)) == 0.0


def test_selection_keeps_group_limits():
    model = tiny_model("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2)
    assert identities.selection_against_gate(model, tiny_inputs(model)) == 0.0


@families
def test_expert_outputs_sum_to_the_block(family):
    model = tiny_model(family)
    assert identities.expert_sum_against_block(model, tiny_inputs(model)) < 1e-6


@families
def test_aar_layers_are_those_with_router_and_attention(family):
    parts = anatomy(tiny_model(family))
    assert len(parts.aar_layers) >= 2
    assert set(parts.aar_layers) <= set(parts.moe_layers)

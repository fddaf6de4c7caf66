"""The aggregation head in models of all eight families: step 0, fixed dispatch, stock again, KV cache, beside AAR."""

import pytest
import torch

from aarlib import identities
from aarlib.fdaa.attach import attach_fdaa
from aarlib.fdaa.config import FDAAConfig, StaticCalibratorConfig
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.loading import load_config, meta_model
from aarlib.moe.patching import Rank, wrap_forward
from aarlib.moe.record import intervene, record
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)
routers = pytest.mark.parametrize("with_aar", [False, True], ids=["stock", "aar"])


def model_of(family, with_aar):
    model = tiny_model(family)
    if with_aar:
        identities.default_attach(model)
    return model


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


@families
@routers
def test_step_0_is_the_native_model(family, with_aar):
    model = model_of(family, with_aar)
    model.set_experts_implementation("grouped_mm")  # the default of load_model; the weighted sum is the same arithmetic
    assert identities.step0_against_stock(model, tiny_inputs(model)) < 1e-6


@families
@routers
def test_selection_and_mass_stay_while_weights_move(family, with_aar):
    model = model_of(family, with_aar)
    handle, inputs = identities.attach_random_head(model), tiny_inputs(model)
    bite = identities.head_bite(model, handle, inputs)
    assert bite.picks_changed > 0.1 and bite.logits_moved > 1e-2
    found = identities.fixed_dispatch(model, handle, inputs)
    assert found.weights_moved > 1e-2
    assert found.mass_error < 1e-6
    assert found.ids_changed == 0


@families
@routers
def test_disabled_and_detached_are_the_model_before_bitwise(family, with_aar):
    model = model_of(family, with_aar)
    inputs = tiny_inputs(model)
    expected = logits(model, inputs)
    handle = identities.attach_random_head(model)
    assert not torch.equal(logits(model, inputs), expected)
    handle.enabled = False
    assert torch.equal(logits(model, inputs), expected)
    handle.enabled = True
    handle.detach()
    assert torch.equal(logits(model, inputs), expected)
    with pytest.raises(ValueError, match="attach again"):
        handle.enabled = True


@families
@routers
def test_the_kv_cache_gives_the_full_forward(family, with_aar):
    model = model_of(family, with_aar)
    handle = identities.attach_random_head(model, scale=1.0)
    length = 12 if (family, with_aar) == ("qwen3_5_moe", True) else 24  # at 24 in float64: the test below
    for padding in ("none", "left"):
        inputs = tiny_inputs(model, length=length, padding=padding)
        assert identities.head_bite(model, handle, inputs).logits_moved > 1e-2
        assert identities.prefill_against_decode(model, inputs, chunk=1) < 1e-5


def test_in_float64_the_kv_cache_gives_the_full_forward_to_12_digits(monkeypatch):
    """Where float32 rounding alone passes 1e-5: linear attention, routers and head all compute in float32 otherwise."""
    model = tiny_model("qwen3_5_moe").double()
    stock_to = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return stock_to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    try:
        identities.default_attach(model).module.double()
        handle = identities.attach_random_head(model, scale=1.0)
        handle.module.double()
        for padding in ("none", "left"):
            inputs = tiny_inputs(model, length=24, padding=padding)
            assert identities.head_bite(model, handle, inputs).logits_moved > 1e-2
            assert identities.prefill_against_decode(model, inputs, chunk=1) < 1e-12
    finally:
        torch.set_default_dtype(torch.float32)


@families
def test_the_routed_output_is_the_reweighted_sum_and_experts_run_once(family):
    model = tiny_model(family)
    handle = identities.attach_random_head(model)
    layer = handle.layers[-1]
    experts = anatomy(model).moe_layer(layer).experts
    calls, outputs = [], []

    def stock(inner, hidden, expert_ids, weights):
        calls.append(expert_ids.numel())
        return inner(hidden, expert_ids, weights)

    def outer(inner, *args):
        outputs.append(inner(*args))
        return outputs[-1]

    remove = (wrap_forward(experts, stock, Rank.ROUTER), wrap_forward(experts, outer, Rank.INTERVENTION))
    inputs = tiny_inputs(model)
    logits(model, inputs)
    assert calls == [inputs["input_ids"].numel() * anatomy(model).top_k]
    for undo in remove:
        undo()
    with torch.no_grad(), record(model, [layer], dispatch=True, expert_outputs=True) as rec:
        model(**inputs)
    expected = (rec.dispatch[layer].weights[..., None] * rec.expert_outputs[layer]).sum(-2)
    assert identities.error(outputs[0].reshape(expected.shape), expected) < 1e-6


@families
@routers
def test_generation_with_the_cache_equals_generation_without(family, with_aar):
    model = model_of(family, with_aar)
    inputs = tiny_inputs(model, length=10, padding="left")
    options = {**inputs, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    without_head = model.generate(**options)
    identities.attach_random_head(model, scale=1.0)
    with_cache = model.generate(use_cache=True, **options)
    assert torch.equal(with_cache, model.generate(use_cache=False, **options))
    assert not torch.equal(with_cache, without_head)


def test_interventions_act_on_the_new_weights_and_may_change_the_selection():
    model = tiny_model("olmoe")
    handle = identities.attach_random_head(model)
    layer, inputs = handle.layers[-1], tiny_inputs(model)
    seen = []

    def keep(output, hidden):
        seen.append(output.weights)
        return output

    with intervene(model, {layer: keep}):
        expected = logits(model, inputs)
    handle.enabled = False

    def replace(output, hidden):
        return RouterOutput(output.router_logits, seen[0], output.expert_ids)

    handle.acting, handle.enabled = handle.layers[:-1], True
    with intervene(model, {layer: replace}):
        assert identities.error(logits(model, inputs), expected) < 1e-6
    handle.acting = handle.layers

    def rotate(output, hidden):
        return RouterOutput(output.router_logits, output.weights, (output.expert_ids + 1) % 8)

    with intervene(model, {layer: rotate}):
        assert (logits(model, inputs) - expected).abs().max() > 1e-2


def test_only_acting_layers_change():
    model = tiny_model("olmoe")
    stock = logits(model, tiny_inputs(model))
    handle = identities.attach_random_head(model)
    handle.acting = ()
    assert torch.equal(logits(model, tiny_inputs(model)), stock)
    handle.acting = (1,)
    one = logits(model, tiny_inputs(model))
    handle.acting = handle.layers
    assert not torch.equal(one, stock) and not torch.equal(one, logits(model, tiny_inputs(model)))


def test_bfloat16_bases_keep_a_float32_head():
    model = tiny_model("olmoe").to(torch.bfloat16)
    handle = identities.attach_random_head(model)
    assert {parameter.dtype for _, parameter in handle.trainable()} == {torch.float32}
    assert identities.fixed_dispatch(model, handle, tiny_inputs(model)).mass_error < 1e-6
    assert logits(model, tiny_inputs(model)).dtype == torch.bfloat16


@pytest.mark.parametrize(("layers", "expected"), [((3, 7, 11, 15), 301_313), ((15,), 301_217)])
def test_counts_on_olmoe_geometry_on_the_meta_device(layers, expected):
    model = meta_model(load_config("olmoe", geometry="pipelines/configs/geometry/olmoe_1b_7b.json"))
    assert attach_fdaa(model, FDAAConfig(layers=layers)).num_trainable == expected
    calibrator = attach_fdaa(tiny_model("olmoe"), StaticCalibratorConfig(layers=(1, 2)))
    assert calibrator.num_trainable == 2 * 8


def test_bad_layers_and_models_are_refused():
    with pytest.raises(ValueError, match=r"layer 0 has no router; MoE layers of this model: 1"):
        attach_fdaa(tiny_model("deepseek_v2"), FDAAConfig(layers=(0,)))
    with pytest.raises(ValueError, match=r"num_experts_per_tok = 1: .* use a model with top_k >= 2"):
        attach_fdaa(tiny_model("olmoe", num_experts_per_tok=1), FDAAConfig(layers=(1,)))
    with pytest.raises(ValueError, match="layers must be distinct"):
        FDAAConfig(layers=(1, 1))
    model = tiny_model("olmoe")
    handle = attach_fdaa(model, FDAAConfig(layers=(1,)))
    with pytest.raises(ValueError, match=r"layers \[1\]: another aggregation head is enabled there"):
        attach_fdaa(model, StaticCalibratorConfig(layers=(0, 1)))
    handle.enabled = False
    attach_fdaa(model, StaticCalibratorConfig(layers=(0, 1)))

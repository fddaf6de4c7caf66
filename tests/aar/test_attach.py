import gc

import pytest
import torch

from aarlib import identities
from aarlib.aar.attach import attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.moe.anatomy import anatomy
from aarlib.moe.loading import meta_model
from tests.tiny import FAMILIES, tiny_config, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)


def loss_of(model, inputs):
    return model(**inputs, labels=inputs["input_ids"], use_cache=False).loss


@families
def test_router_sft_starts_as_the_stock_model(family):
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        stock = model(**inputs).logits
        handle = attach_aar(model, RouterSFTConfig())
        assert identities.error(model(**inputs).logits, stock) < 1e-6
        identities.randomise(handle)
        assert (model(**inputs).logits - stock).abs().max() > 1e-2


@families
def test_gradients_reach_every_trained_tensor_and_nothing_else(family):
    model = tiny_model(family)
    handle = identities.default_attach(model)
    loss_of(model, tiny_inputs(model)).backward()
    assert all(parameter.grad.abs().max() > 0 for _, parameter in handle.trainable())
    assert all(parameter.grad is None for parameter in model.parameters())


@families
def test_activation_checkpointing_gives_the_same_gradients(family):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(family)
        handle = identities.default_attach(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.get_decoder().layers:
                layer.training = True
        model.enable_input_require_grads()
        loss_of(model, tiny_inputs(model, padding="right")).backward()
        gradients.append({name: parameter.grad for name, parameter in handle.trainable()})
    for name, expected in gradients[0].items():
        assert identities.error(gradients[1][name], expected) < 1e-6, name


def test_window_grad_off_makes_windows_constants():
    gradients = {}
    for window_grad in (True, False):
        model = tiny_model("olmoe")
        handle = attach_aar(model, AARConfig(layers=(1, 2), window=10, window_grad=window_grad))
        identities.randomise(handle)
        loss_of(model, tiny_inputs(model)).backward()
        gradients[window_grad] = handle.routers[0].weight.grad
    assert (gradients[True] - gradients[False]).abs().max() > 1e-4


def test_routers_aar_trains_the_aar_layers_only():
    model = tiny_model("olmoe")
    handle = attach_aar(model, AARConfig(layers=(1,), window=4, routers="aar"))
    assert list(handle.routers) == [1]
    assert all(name.startswith("1.") for name, _ in handle.trainable())


def test_a_seed_gives_the_same_values_and_another_seed_others():
    values = [
        dict(attach_aar(tiny_model("olmoe"), AARConfig(layers=(1,), window=4), seed=seed).trainable())
        for seed in (1, 1, 2)
    ]
    assert torch.equal(values[0]["1.gate_time"], values[1]["1.gate_time"])
    assert not torch.equal(values[0]["1.gate_time"], values[2]["1.gate_time"])


@families
def test_attaching_works_on_the_meta_device_with_the_same_names_and_shapes(family):
    model = tiny_model(family)
    config = AARConfig(layers=anatomy(model).aar_layers[-2:], window=10)
    shapes = {name: parameter.shape for name, parameter in attach_aar(model, config).trainable()}
    meta = attach_aar(meta_model(tiny_config(family)), config)
    assert {name: parameter.shape for name, parameter in meta.trainable()} == shapes
    assert all(parameter.device.type == "meta" for _, parameter in meta.trainable())


def test_window_longer_than_the_input_is_padded_with_zeros():
    model = tiny_model("olmoe")
    handle = attach_aar(model, AARConfig(layers=(1, 2), window=64))
    identities.randomise(handle)
    assert identities.logits_against_eager(model, handle, tiny_inputs(model, length=9)) < 1e-5


def live_tensors():
    gc.collect()
    return sum(type(item) in (torch.Tensor, torch.nn.Parameter) for item in gc.get_objects())


def test_no_tensor_outlives_its_step_also_when_a_forward_raises():
    model = tiny_model("olmoe")
    handle = identities.default_attach(model)
    inputs = tiny_inputs(model)

    def step():
        loss_of(model, inputs).backward()
        for _, parameter in handle.trainable():
            parameter.grad = None

    counts = []
    for _ in range(6):
        step()
        counts.append(live_tensors())
    assert counts[2] == counts[5]
    experts = model.model.layers[-1].mlp.experts
    hook = experts.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        loss_of(model, inputs)
    hook.remove()
    step()
    assert live_tensors() == counts[5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": ()}, "no layers given"),
        ({"layers": (1, 1)}, "layers must be distinct"),
        ({"layers": (1,), "window": 1}, "window = 1: Input should be greater than or equal to 2"),
        ({"layers": (1,), "views": ()}, "name 'time', 'spectrum' or both"),
        ({"layers": (1,), "windw": 3}, "unknown key 'windw'; did you mean 'window'"),
    ],
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        AARConfig.from_mapping(values)


def test_a_layer_without_attention_weights_is_refused_with_those_that_have_them():
    with pytest.raises(ValueError, match=r"layers = \[2\].*layers that have both: 1, 3"):
        attach_aar(tiny_model("qwen3_5_moe"), AARConfig(layers=(2,), window=4))


def test_a_dense_layer_is_refused():
    with pytest.raises(ValueError, match=r"\[0\] have no router or no attention weights; .* 1, 2, 3"):
        attach_aar(tiny_model("deepseek_v2"), AARConfig(layers=(0, 1), window=4))


def test_top_1_with_renormalised_weights_is_refused():
    model = tiny_model("mixtral", num_experts_per_tok=1)
    with pytest.raises(ValueError, match="no gradient reaches the router"):
        attach_aar(model, RouterSFTConfig())
    attach_aar(tiny_model("olmoe", num_experts_per_tok=1), RouterSFTConfig())


def test_of_several_handles_one_is_enabled_at_a_time():
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model)
    first = identities.default_attach(model)
    first.enabled = False
    second = attach_aar(model, RouterSFTConfig())
    with pytest.raises(ValueError, match="already attached to this model; detach\\(\\) the other handle, or set"):
        first.enabled = True
    with torch.no_grad():
        stock = model(**inputs).logits
        second.enabled = False
        first.enabled = True
        assert (model(**inputs).logits - stock).abs().max() > 1e-2


def test_attaching_twice_is_refused_and_works_after_detach():
    model = tiny_model("olmoe")
    handle = attach_aar(model, RouterSFTConfig())
    with pytest.raises(ValueError, match="already attached"):
        attach_aar(model, RouterSFTConfig())
    handle.detach()
    attach_aar(model, RouterSFTConfig())
    with pytest.raises(ValueError, match="this handle is detached"):
        handle.enabled = True


def test_flash_attention_models_are_refused_with_the_remedy():
    model = tiny_model("olmoe")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa'"):
        attach_aar(model, AARConfig(layers=(1,), window=4))

import pytest
import torch

from aarlib import identities
from aarlib.moe.anatomy import anatomy
from aarlib.moe.dispatch import RouterOutput
from aarlib.moe.record import intervene, record
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)


def untouched(model):
    return all("forward" not in module.__dict__ for module in model.modules()) and not any(
        type(getattr(module, "config", None)).__name__ == "_CapturingConfig" for module in model.modules()
    )


@families
def test_shapes_and_layers(family):
    model = tiny_model(family)
    parts, inputs = anatomy(model), tiny_inputs(model, padding="left")
    with (
        torch.no_grad(),
        record(model, windows=6, sink=True, router_logits=True, dispatch=True, expert_outputs=True) as rec,
    ):
        model(**inputs)
    batch, length = inputs["input_ids"].shape
    for layer in parts.moe_layers:
        assert rec.router_logits[layer].shape == (batch, length, parts.num_experts)
        assert rec.dispatch[layer].weights.shape == rec.dispatch[layer].expert_ids.shape == (batch, length, parts.top_k)
        assert rec.expert_outputs[layer].shape == (batch, length, parts.top_k, parts.hidden_size)
    for layer in (layer.index for layer in parts.layers if layer.attention is not None):
        assert rec.windows[layer].shape == (batch, length, 6)
        assert rec.sink[layer].shape == (batch, length)
    assert torch.equal(rec.mask, inputs["attention_mask"].bool())
    assert untouched(model)


@families
@pytest.mark.parametrize("padding", ["none", "left"])
def test_sink_is_the_weight_on_the_first_token(family, padding):
    model = tiny_model(family)
    inputs = tiny_inputs(model, padding=padding)
    with torch.no_grad(), record(model, sink=True) as rec:
        model(**inputs)
    with torch.no_grad(), identities.eager_attention(model):
        attentions = model(**inputs, output_attentions=True, use_cache=False).attentions
    layers = [layer.index for layer in anatomy(model).layers if layer.attention is not None]
    weights = [item for item in attentions if item is not None]
    valid = inputs["attention_mask"].bool()
    first = inputs["attention_mask"].argmax(1)
    for layer, weight in zip(layers, weights, strict=True):
        expected = torch.stack([weight[row].mean(0)[:, first[row]] for row in range(len(first))])
        assert identities.error(rec.sink[layer][valid], expected[valid]) < 1e-5
    assert max(rec.sink[layer].max() for layer in layers) > 0.1


def test_sink_of_packed_documents_is_each_document_s_own():
    model = tiny_model("olmoe")
    ids, lengths = tiny_inputs(model)["input_ids"][:1], [10, 14]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), record(model, sink=True) as packed:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    for layer in (0, 1, 2):
        for start, part in zip((0, 10), ids.split(lengths, dim=1), strict=True):
            with torch.no_grad(), record(model, sink=True) as alone:
                model(input_ids=part)
            stop = start + part.shape[1]
            assert identities.error(packed.sink[layer][:, start:stop], alone.sink[layer]) < 1e-5


@families
def test_recording_through_generation_keeps_the_last_step(family):
    model = tiny_model(family)
    inputs = tiny_inputs(model, length=8)
    with record(model, windows=5, sink=True, router_logits=True, dispatch=True) as rec:
        model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    parts = anatomy(model)
    assert rec.num_forwards == 5
    assert rec.router_logits[parts.moe_layers[0]].shape == (2, 1, parts.num_experts)
    assert rec.windows[parts.aar_layers[0]].shape == (2, 1, 5)


@families
def test_nothing_stays_after_a_forward_that_raises(family):
    model = tiny_model(family)
    inputs, layer = tiny_inputs(model), anatomy(model).moe_layers[-1]
    with torch.no_grad():
        before = model(**inputs).logits

    def stop(*_):
        raise RuntimeError("stop")

    everything = {"windows": 4, "sink": True, "router_logits": True, "dispatch": True, "expert_outputs": True}
    broken = anatomy(model).layers[layer].experts.register_forward_pre_hook(stop)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="stop"),
        intervene(model, {layer: lambda output, _: output}),
        record(model, **everything),
    ):
        assert not untouched(model)
        model(**inputs)
    broken.remove()
    assert untouched(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)


def test_two_records_at_once_and_one_inside_an_attached_model():
    model = tiny_model("olmoe")
    handle = identities.default_attach(model)
    inputs = tiny_inputs(model)
    with torch.no_grad(), record(model, (1, 2), windows=True) as attached, record(model, (1, 2), windows=4) as short:
        model(**inputs)
    assert torch.equal(attached.windows[2][..., -4:], short.windows[2])
    assert attached.windows[2].shape[-1] == 10
    handle.detach()
    assert untouched(model)


def test_a_record_opened_before_attaching_sees_the_attached_router():
    model = tiny_model("olmoe")
    with torch.no_grad(), record(model, router_logits=True) as rec:
        handle = identities.default_attach(model)
        model(**tiny_inputs(model))
    with torch.no_grad(), record(model, router_logits=True) as later:
        model(**tiny_inputs(model))
    assert torch.equal(rec.router_logits[2], later.router_logits[2])
    handle.detach()


def test_records_are_keyed_by_layer_index_on_a_partly_dense_model():
    model = tiny_model("deepseek_v2")
    with torch.no_grad(), record(model, router_logits=True) as rec:
        model(**tiny_inputs(model))
    assert sorted(rec.router_logits) == [1, 2, 3]
    with pytest.raises(KeyError, match=r"router_logits\[0\] was not recorded; layers recorded: 1, 2, 3"):
        rec.router_logits[0]


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("olmoe", {}, "nothing to record"),
        ("olmoe", {"layers": [7], "dispatch": True}, "layer 7 has no router; MoE layers of this model: 0, 1, 2"),
        ("deepseek_v2", {"layers": [0], "dispatch": True}, "layer 0 has no router"),
        ("qwen3_5_moe", {"layers": [0], "windows": 4}, "layer 0 has no attention weights; layers that have them: 1, 3"),
        ("olmoe", {"windows": True}, "needs a model with AAR attached"),
    ],
)
def test_bad_requests_are_refused(family, arguments, message):
    with pytest.raises(ValueError, match=message), record(tiny_model(family), **arguments):
        pass


def test_a_record_without_a_forward_is_an_error():
    with pytest.raises(RuntimeError, match="no forward of the model ran"), record(tiny_model("olmoe"), dispatch=True):
        pass


@pytest.mark.parametrize("what", ["router_logits", "dispatch", "expert_outputs", "windows", "sink"])
def test_a_layer_that_the_forward_bypasses_is_an_error(what):
    """The block or the attention of layer 1 hands its input on."""
    model = tiny_model("olmoe")
    layer = model.model.layers[1]
    asked = {what: 4 if what == "windows" else True}
    bypassed = layer.self_attn if what in ("windows", "sink") else layer.mlp

    def skip(hidden=None, **kwargs):
        hidden = kwargs.get("hidden_states", hidden)
        return (hidden, None) if bypassed is layer.self_attn else hidden

    bypassed.forward = skip
    for layers in (None, [1, 2]):
        with (
            pytest.raises(RuntimeError, match=rf"{what} of layers \[1\] were not reached by the last forward"),
            torch.no_grad(),
            record(model, layers, **asked),
        ):
            model(**tiny_inputs(model))
    with torch.no_grad(), record(model, [0, 2], **asked):
        model(**tiny_inputs(model))


@families
def test_an_intervention_changes_the_dispatch_and_goes(family):
    model = tiny_model(family)
    inputs, layer = tiny_inputs(model), anatomy(model).moe_layers[0]
    with torch.no_grad():
        stock = model(**inputs).logits

        def uniform(output, hidden):
            assert hidden.dim() == 2
            mass = output.weights.sum(-1, keepdim=True)
            return RouterOutput(
                output.router_logits, (mass / output.weights.shape[-1]).expand_as(output.weights), output.expert_ids
            )

        with intervene(model, {layer: uniform}), record(model, [layer], dispatch=True) as rec:
            changed = model(**inputs).logits
        assert (rec.dispatch[layer].weights.std(-1) < 1e-6).all()
        assert (changed - stock).abs().max() > 1e-2
        assert torch.equal(model(**inputs).logits, stock)
    assert untouched(model)

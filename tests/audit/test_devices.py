"""A model whose upper layers are on another device, as under `device_map`; that device is meta: shapes and places, no values."""

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aarlib.audit import replay
from aarlib.audit.actions import action_names, action_weights
from aarlib.audit.gradients import credits
from aarlib.audit.sites import documents, sites
from aarlib.moe.anatomy import anatomy
from aarlib.moe.record import record
from aarlib.training.objectives import next_token_ce
from tests.tiny import tiny_inputs, tiny_model

ABOVE = "meta"
COPIES = {"_to_copy", "copy_"}


class OneDevice(TorchDispatchMode):
    """Every operation but a copy takes its tensors, indices too, from one device, as GPUs ask for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1 and func.overloadpacket.__name__ not in COPIES:
            raise RuntimeError(f"{func} got tensors of {sorted(devices)}")
        return func(*args, **(kwargs or {}))


def split_model(family: str, first_above: int):
    """Layers from `first_above` on, final norm and output embedding are on ABOVE; hooks move what enters a module."""
    model = tiny_model(family)
    model.set_experts_implementation("batched_mm")
    decoder = model.get_decoder()
    above = [*decoder.layers[first_above:], decoder.norm, model.get_output_embeddings()]
    places = {decoder.embed_tokens: "cpu", **dict.fromkeys(decoder.layers, "cpu"), **dict.fromkeys(above, ABOVE)}
    names = {module: name for name, module in model.named_modules()}
    for module, place in places.items():
        module.to(place)
    attach_align_device_hook_on_blocks(
        model, execution_device={names[module]: torch.device(place) for module, place in places.items()}
    )
    return model


def test_the_rule_bites():
    values, rows = torch.zeros(3, 2, device=ABOVE), torch.tensor([1])
    with OneDevice():
        assert replay.take(values, rows).shape == (1, 2)
        with pytest.raises(RuntimeError, match=r"aten.index.Tensor got tensors of \['cpu', 'meta'\]"):
            values[rows]


@pytest.mark.parametrize("family", ["deepseek_v2", "olmoe"])
def test_replay_on_two_devices(family):
    model = split_model(family, first_above=2)
    parts = anatomy(model)
    ids = tiny_inputs(model, length=12)["input_ids"]
    layers = parts.moe_layers
    samples = [(row, position, layer) for row, position in ((0, 3), (1, 6)) for layer in layers]
    batch = sites(ids, documents(ids), samples, horizon=4)
    rows = torch.tensor([0, 1])
    with torch.no_grad(), OneDevice():
        suffix = replay.native_suffix(model, parts, batch)
        assert {native.wrote.device.type for native in suffix.native.values()} == {"cpu", ABOVE}
        for layer in layers:
            weights = action_weights(replay.take(suffix.native[layer].weights, rows))[:, -1]
            ce = replay.replay_rows(model, parts, suffix, layer, rows, weights)
            assert ce.shape == (2, 4) and ce.device.type == ABOVE
            assert weights.shape[-1] == parts.top_k and len(action_names(parts.top_k)) == 10


def test_gradients_and_records_on_two_devices():
    model = split_model("olmoe", first_above=1)
    inputs = tiny_inputs(model, length=12)
    with OneDevice():
        found = credits(model, **inputs, layers=[1, 2], horizon=3)
        with torch.no_grad(), record(model, sink=True, dispatch=True) as seen:
            model.get_decoder()(**inputs)
    assert found[2].gradient.shape == (22, 32) and found[2].gradient.device.type == ABOVE
    assert seen.sink[2].device.type == seen.dispatch[2].weights.device.type == ABOVE


def test_a_loss_on_two_devices():
    model = split_model("olmoe", first_above=1)
    inputs = tiny_inputs(model, length=12)
    shapes_only = torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True)
    with torch.no_grad(), OneDevice(), shapes_only:
        loss = next_token_ce(model, {**inputs, "labels": inputs["input_ids"]})
    assert loss.ce_sum.device.type == ABOVE and loss.num_targets.tolist() == [11, 11]

"""Components add up to the logits, finer ones to their parent; dtypes, padding and packing change nothing."""

import pytest
import torch

from aarlib import identities
from aarlib.identities.lens import parts_error
from aarlib.lens import Decomposition, decompose
from aarlib.lens.names import LEVELS, parse
from aarlib.lens.projection import Projection
from aarlib.lens.scores import read
from aarlib.moe.anatomy import anatomy
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)
with_aar = pytest.mark.parametrize("aar", [False, True], ids=["stock", "aar"])
NARROW = {"intermediate_size": 4, "moe_intermediate_size": 4}
"""Fewer neurons an expert."""


def by_level(model, input_ids, attention_mask=None, position_ids=None):
    """One forward, taken apart at every level."""
    reading = read(model, Projection(anatomy(model)), input_ids, attention_mask, position_ids, edges=True)
    return {by: Decomposition(reading, by) for by in LEVELS}


@families
@with_aar
def test_every_level_adds_up_to_the_logits_and_onto_every_parent_at_every_receiver(family, aar):
    """Linear-attention layers are parents of heads too; by edge they stay whole. With AAR the views are components."""
    model = tiny_model(family, **NARROW)
    handle = identities.default_attach(model) if aar else None
    levels = by_level(model, **tiny_inputs(model, length=5, padding="left"))
    for by, found in levels.items():
        assert found.receivers == anatomy(model).moe_layers
        assert found.closure_error < (1e-4 if aar else 1e-5)
        assert by == "layer" or parts_error(found) < 1e-4
        for receiver in found.receivers if by != "layer" else ():
            wanted, names = parents_of(model, by, receiver), found.components(receiver)
            assert {parse(name).parent for name in names} - set(names) == wanted
            assert all(found.scores(receiver, parent).abs().max() > 1e-2 for parent in wanted)
    if handle is not None:
        check_views(model, handle, levels)
    assert all("forward" not in module.__dict__ for module in model.modules())


def parents_of(model, by, receiver):
    if by in ("expert", "neuron"):
        return {f"moe.{layer}" for layer in anatomy(model).moe_layers if layer < receiver}
    whole = {0, 2} if by == "edge" and model.config.model_type == "qwen3_5_moe_text" else set()
    return {f"attn.{layer}" for layer in range(receiver + 1) if layer not in whole}


def check_views(model, handle, levels):
    handle.enabled = False
    stock = decompose(model, **tiny_inputs(model, length=5, padding="left"))
    receiver = max(index for index, router in handle.routers.items() if router.views)
    for found in levels.values():
        assert {"view.time", "view.spectrum"} <= set(found.components(receiver))
        assert found.scores(receiver, "view.time").abs().max() > 1e-2
        assert (found.logits(receiver) - stock.logits(receiver)).abs().max() > 1e-2
        assert (found.scores(receiver, "embedding") - stock.scores(receiver, "embedding")).abs().max() > 1e-3


def test_trained_copies_of_routers_without_views():
    from aarlib.aar import RouterSFTConfig, attach_aar

    model = tiny_model("gpt_oss")
    handle = attach_aar(model, RouterSFTConfig())
    identities.randomise(handle)
    found = decompose(model, **tiny_inputs(model))
    assert found.closure_error < 1e-5
    assert (
        found.scores(2, "embedding") - decompose(tiny_model("gpt_oss"), **tiny_inputs(model)).scores(2, "embedding")
    ).any()


@families
@with_aar
def test_a_bfloat16_model_is_decomposed_in_float32_and_left_as_it_was(family, aar):
    """The numbers are those of a float32 model with the rounded weights."""
    model, twin = tiny_model(family).bfloat16(), tiny_model(family).bfloat16().float()
    if aar:
        identities.default_attach(model), identities.default_attach(twin)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    inputs = tiny_inputs(model, length=7, padding="left")
    with torch.no_grad():
        logits = model(**inputs).logits
    rounded = by_level(twin, **inputs)
    for by, found in by_level(model, **inputs).items():
        expected = rounded[by]
        assert found.closure_error < (1e-4 if aar else 1e-5)
        last = found.receivers[-1]
        names = found.components(last)
        for name in names[:: 1 + len(names) // 8]:
            scores = found.scores(last, name)
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores, expected.scores(last, name), atol=1e-5, rtol=1e-4)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name][1].dtype and tensor.data_ptr() == before[name][0], name
        assert torch.equal(tensor, before[name][1])
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)


@families
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_and_batching_change_nothing(family, padding):
    model = tiny_model(family)
    inputs = tiny_inputs(model, length=9, padding=padding)
    row = inputs["attention_mask"][1].bool()
    pads = 5 if padding == "left" else 0
    both = by_level(model, **inputs), by_level(model, inputs["input_ids"][1:, row])
    for by, together, alone in zip(LEVELS, *(side.values() for side in both), strict=True):
        receiver = together.receivers[-1]
        names = alone.components(receiver)
        for name in names[:: 1 + len(names) // 20]:
            key = parse(name).key
            moved = name if key is None else name.removesuffix(f".{key}") + f".{key + pads}"
            scores = together.scores(receiver, moved)
            torch.testing.assert_close(scores[1, row], alone.scores(receiver, name)[0], atol=1e-5, rtol=1e-4)
            assert not scores[1, ~row].any()
        if by == "edge":
            column = torch.nonzero(~row)[0, 0]
            assert not together.scores(receiver, f"attn.1.head.0.key.{column}")[1].any(), "padding is no key"


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_packed_documents_are_kept_apart(family):
    model = tiny_model(family)
    ids = tiny_inputs(model, batch=1, length=12)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = decompose(model, ids, position_ids=positions, by="head")
    alone = decompose(model, ids[:, 5:], by="head")
    torch.testing.assert_close(
        packed.scores(2, "attn.1.head.0")[:, 5:], alone.scores(2, "attn.1.head.0"), atol=1e-5, rtol=1e-4
    )
    assert packed.closure_error < 1e-5
    assert packed.sums[0].tokens.tolist() == [5, 7]

"""Decompositions of tiny random models of all eight families against the plain way of tests/lens/reference.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from aarlib import identities
from aarlib.lens import decompose
from aarlib.lens.names import LEVELS
from tests.aar.reference import Reference
from tests.lens.reference import naive_scores
from tests.tiny import FAMILIES, tiny_config, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)
levels = pytest.mark.parametrize("by", LEVELS)
LENGTH = 9


@families
@levels
def test_scores_equal_hooks_and_loops(family, by):
    model = tiny_model(family)
    inputs = tiny_inputs(model, length=LENGTH, padding="right")
    found = decompose(model, **inputs, by=by)
    model.set_attn_implementation("eager")
    first, last = found.receivers[0], found.receivers[-1]
    expected = naive_scores(model, inputs, by, (first, last))
    mask = inputs["attention_mask"].bool()
    for receiver, count in ((first, 20), (last, 60)):
        names = list(expected[receiver])
        assert names == found.components(receiver)
        assert max(float(scores[mask].abs().max()) for scores in expected[receiver].values()) > 0.1
        for name in names[:: 1 + len(names) // count]:
            scores = found.scores(receiver, name)
            torch.testing.assert_close(scores[mask], expected[receiver][name][mask], atol=1e-5, rtol=1e-4)
            assert not scores[~mask].any()


def aar_model(family):
    model = tiny_model(family)
    handle = identities.default_attach(model)
    return model, handle


@families
@levels
def test_scores_of_patched_routers_equal_hooks_and_loops(family, by):
    """Every component carries (1 - mean alpha) of its receiver; the views are what is left. The first receiver has no views."""
    model = tiny_model(family)
    handle = identities.default_attach(model, window=6)
    ids = tiny_inputs(model, batch=1, length=LENGTH)["input_ids"]
    found = decompose(model, ids, by=by)
    tensors = {index: dict(router.named_parameters()) for index, router in handle.routers.items()}
    routers = Reference(tiny_model(family), tensors, 6)
    aware = [index for index, router in handle.routers.items() if router.views]
    receivers = (found.receivers[0], min(aware), max(aware))
    every = naive_scores(routers.model, {"input_ids": ids}, by, receivers, routers)
    stock = naive_scores(tiny_model(family), {"input_ids": ids}, "layer", receivers)
    for receiver, expected in every.items():
        names = list(expected)
        assert names == found.components(receiver)
        views = [name for name in names if name.startswith("view.")]
        assert views == (["view.time", "view.spectrum"] if receiver in aware else [])
        for name in [*names[:: 1 + len(names) // 30], *views]:
            torch.testing.assert_close(found.scores(receiver, name), expected[name], atol=1e-5, rtol=1e-4)
        total = sum(expected.values())[0]
        torch.testing.assert_close(total, routers.router_logits[receiver].detach(), atol=1e-4, rtol=0)
        assert (expected["embedding"] - stock[receiver]["embedding"]).abs().max() > 1e-2


def test_the_standard_part_of_an_aar_router_carries_its_factor():
    """By the formula of the router itself: (1 - mean alpha) times the score that the trained weight gives."""
    model, handle = aar_model("olmoe")
    inputs = tiny_inputs(model)
    found = decompose(model, **inputs)
    receiver = max(handle.routers)
    routed = found.reading.capture.routed(receiver)
    mean_alpha = sum(routed.terms.gates.values()) / 2
    kept = found.reading.capture
    normed = model.model.layers[receiver].post_attention_layernorm
    z = kept.layers[receiver].residual
    raw = (kept.embedding * normed.weight / (z.pow(2).mean(-1, keepdim=True) + normed.variance_epsilon).sqrt()) @ (
        handle.routers[receiver].weight.detach().T
    )
    expected = (1 - mean_alpha) * raw
    assert (1 - mean_alpha).std() > 1e-3
    torch.testing.assert_close(found.scores(receiver, "embedding")[kept.mask], expected, atol=1e-5, rtol=1e-4)


def test_receivers_can_be_chosen():
    model = tiny_model("olmoe")
    found = decompose(model, **tiny_inputs(model), receivers=[2])
    assert found.receivers == (2,) and list(found.variance.columns) == [2]
    whole = decompose(model, **tiny_inputs(model))
    torch.testing.assert_close(found.scores(2, "moe.1"), whole.scores(2, "moe.1"), atol=1e-6, rtol=1e-5)


def test_a_receiver_without_router_names_those_that_have_one():
    model = tiny_model("deepseek_v2")
    with pytest.raises(
        ValueError, match=r"receivers = \[0, 1\]: layers \[0\] have no router; layers that have one: 1, 2, 3"
    ):
        decompose(model, **tiny_inputs(model), receivers=[0, 1])


def test_an_unknown_component_lists_near_names():
    model = tiny_model("olmoe")
    found = decompose(model, **tiny_inputs(model))
    with pytest.raises(ValueError, match=r"component = 'att.1' is not a component .* near names: attn.1"):
        found.scores(2, "att.1")
    with pytest.raises(ValueError, match=r"component = 'moe.2' is not a component of the router of layer 2 by layer"):
        found.scores(2, "moe.2")
    with pytest.raises(ValueError, match=r"receiver = 7 was not decomposed; receivers here: 0, 1, 2"):
        found.scores(7, "attn.1")
    with pytest.raises(ValueError, match="by = 'heads' is no level; levels: layer, head, edge, expert, neuron"):
        decompose(model, **tiny_inputs(model), by="heads")


def test_edges_of_linear_attention_are_refused():
    model = tiny_model("qwen3_5_moe")
    found = decompose(model, **tiny_inputs(model), by="edge")
    with pytest.raises(ValueError, match=r"layer 0 is linear attention: .* layers that have them: 1, 3"):
        found.scores(3, "attn.0.head.0.key.1")
    with pytest.raises(ValueError, match="layer 2 is linear attention"):
        found.attention(2)
    linear = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_moe", layer_types=["linear_attention"] * 4))
    with pytest.raises(ValueError, match="by = 'edge': every layer is linear attention"):
        decompose(linear, **tiny_inputs(linear), by="edge")


def test_edges_need_their_level():
    model = tiny_model("olmoe")
    with pytest.raises(ValueError, match=r"by = 'head' keeps no attention weights; decompose by = 'edge'"):
        decompose(model, **tiny_inputs(model), by="head").scores(2, "attn.0.head.0.key.1")


def test_empty_documents_and_too_many_tokens_are_refused():
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model)
    with pytest.raises(
        ValueError, match=r"input_ids has shape \[1, 0\]; give \[batch, sequence\] with at least one token"
    ):
        decompose(model, torch.empty(1, 0, dtype=torch.int64))
    mask = inputs["attention_mask"].clone()
    mask[1] = 0
    with pytest.raises(ValueError, match="attention_mask: row 1 has no token; leave empty documents out"):
        decompose(model, inputs["input_ids"], mask)
    with pytest.raises(
        ValueError, match="input_ids has 300 tokens a row and the model's context is 256; cut the documents"
    ):
        decompose(model, torch.ones(1, 300, dtype=torch.int64))

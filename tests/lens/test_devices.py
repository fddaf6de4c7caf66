"""A model spread over two devices decomposes as on one, and what the lens reads of it meets on one device."""

import pytest
import torch

from aarlib import identities
from aarlib.lens import decompose, ioi
from aarlib.lens.ablation import Expert, effect, outcome, without_experts
from aarlib.lens.influence import all_neuron_sums, expert_sums, head_sums, layer_sums
from aarlib.lens.projection import Projection
from aarlib.lens.ranking import moments_and_aarv
from aarlib.lens.scores import read
from aarlib.lens.uses import pick_counts, prefetch_recall
from aarlib.moe.anatomy import anatomy
from tests.placed import FIRST, devices, spread, to
from tests.tiny import tiny_inputs, tiny_model


def spread_model(family, aar=False):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    routers = list(identities.default_attach(model).routers.values()) if aar else []
    spread(model, [*model.model.layers[1:], model.model.norm, model.lm_head, *routers[1:]], routers[:1])
    return model


def test_devices_that_are_not_there_refuse_to_meet():
    with devices():
        one, other = torch.ones(2, 2).to("xla:0"), torch.ones(2, 2, device="xla:1")
        with pytest.raises(RuntimeError, match=r"aten.mm.default: tensors on \['xla:0', 'xla:1'\]"):
            one @ other
        with pytest.raises(RuntimeError, match=r"tensors on \['cpu', 'xla:0'\]"):
            one + torch.ones(2)
        assert (one @ other.to(one.device)).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("family", "by"),
    [
        *(("olmoe", "head"), ("olmoe", "neuron"), ("flex_olmo", "head")),
        *(("gpt_oss", "edge"), ("gpt_oss", "neuron"), ("qwen3_5_moe", "edge")),
    ],
)
def test_a_spread_model_decomposes_as_on_one_device(family, by):
    inputs = tiny_inputs(tiny_model(family), length=7, padding="left")
    expected = decompose(tiny_model(family), **inputs, by=by)
    last = expected.receivers[-1]
    names = expected.components(last)
    with devices():
        found = decompose(spread_model(family), **to(inputs, FIRST), by=by)
        assert found.components(last) == names and found.closure_error < 1e-5
        for name in names[:: 1 + len(names) // 20]:
            scores = found.scores(last, name)
            assert str(scores.device) == FIRST
            torch.testing.assert_close(scores.cpu(), expected.scores(last, name), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            torch.tensor(found.variance.to_numpy()),
            torch.tensor(expected.variance.to_numpy()),
            atol=1e-6,
            rtol=1e-4,
            equal_nan=True,
        )
        if by == "head":
            torch.testing.assert_close(found.bound(last, names[1]).cpu(), expected.bound(last, names[1]))


def measures(model, inputs):
    """What a run measures beside the moments."""
    reading = read(model, Projection(anatomy(model)), **inputs)
    measure = moments_and_aarv(reading)
    sums = [sums_of(reading, measure).all for sums_of in (layer_sums, head_sums, expert_sums)]
    return [
        *sums,
        all_neuron_sums(reading).all,
        *(item.sums for item in prefetch_recall(reading)),
        pick_counts(reading),
    ]


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_spread_model_with_aar_is_measured_as_on_one_device(family):
    inputs = tiny_inputs(tiny_model(family), length=7, padding="left")
    single = tiny_model(family)
    identities.default_attach(single)
    expected = measures(single, inputs)
    with devices():
        found = measures(spread_model(family, aar=True), to(inputs, FIRST))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4, equal_nan=True)


def of_heads(model, prompts):
    reading = read(model, Projection(anatomy(model)), prompts.input_ids, prompts.attention_mask, edges=True)
    effects = ioi.head_effects(model, reading, prompts)
    correlation = ioi.map_correlation(ioi.head_map(reading, 1, 1), prompts.attention_mask)
    return [*effects[1:], correlation, ioi.logit_differences(model, prompts)]


@pytest.mark.parametrize("family", ["flex_olmo", "gpt_oss"])
def test_indirect_objects_of_a_spread_model(family):
    inputs = tiny_inputs(tiny_model(family), length=7, padding="right")
    rows = torch.tensor([6, 1])
    prompts = ioi.Prompts(*inputs.values(), rows, torch.tensor([7, 8]), torch.tensor([10, 11]))
    expected = of_heads(tiny_model(family), prompts)
    with devices():
        found = of_heads(spread_model(family), ioi.Prompts(*to(tuple(prompts), FIRST)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)


def removed(model, inputs):
    stock = outcome(model, **inputs)
    with without_experts(model, [Expert(2, 1)]):
        return effect(stock, outcome(model, **inputs), inputs["attention_mask"].bool())


def test_experts_of_a_spread_model_are_taken_away(family="gpt_oss"):
    inputs = tiny_inputs(tiny_model(family), length=7, padding="right")
    expected = removed(tiny_model(family), inputs)
    with devices():
        found = removed(spread_model(family), to(inputs, FIRST))
        torch.testing.assert_close(found.ce_delta.cpu(), expected.ce_delta, atol=1e-5, rtol=1e-4)
        assert found.logits_moved.keys() == expected.logits_moved.keys()
        last = max(expected.logits_moved)
        torch.testing.assert_close(found.logits_moved[last].cpu(), expected.logits_moved[last], atol=1e-5, rtol=1e-4)

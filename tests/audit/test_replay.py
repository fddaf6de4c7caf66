import numpy as np
import pytest
import torch

from aarlib import identities
from aarlib.audit import oracle
from aarlib.audit.actions import action_names, action_weights
from aarlib.audit.replay import MAX_TOKENS, site_batches
from aarlib.audit.sites import documents, sites
from aarlib.moe.anatomy import anatomy
from aarlib.moe.patching import Rank, wrap_forward
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)
LENGTH = 16


def every_layer(model, places):
    return [(*place, layer) for place in places for layer in anatomy(model).moe_layers]


def every_other_layer(model, places):
    return [(*place, layer) for place in places for layer in anatomy(model).moe_layers[::2]]


def in_documents(inputs, samples):
    return sites(inputs["input_ids"], documents(**inputs), samples, horizon=None)


@families
def test_replay_equals_a_full_forward_per_action(family):
    model = tiny_model(family)
    inputs = {"input_ids": tiny_inputs(model, length=LENGTH)["input_ids"]}
    samples = every_layer(model, [(0, 0), (1, 9)])
    found = identities.replay_against_full_forward(model, inputs, samples)
    assert found.bite > 1e-2
    assert found.largest < 3e-6


@families
def test_replay_in_a_left_padded_batch_with_aar_attached(family):
    model = tiny_model(family)
    identities.default_attach(model)
    inputs = tiny_inputs(model, length=LENGTH, padding="left")
    samples = every_layer(model, [(0, 3), (1, 12)])
    found = identities.replay_against_full_forward(model, inputs, samples, horizon=3, isolation="batched")
    assert found.bite > 1e-2
    assert found.largest < 3e-6


@families
@pytest.mark.parametrize(
    ("horizon", "isolation", "places"),
    [(None, "batched", [(0, 10), (1, 11)]), (3, "exact", [(1, 9)]), (None, "exact", [(1, 9)])],
)
def test_with_aar_attached_and_the_other_horizons_and_isolations(family, horizon, isolation, places):
    model = tiny_model(family)
    identities.default_attach(model)
    inputs = tiny_inputs(model, length=LENGTH, padding="left")
    samples = every_other_layer(model, places)
    found = identities.replay_against_full_forward(model, inputs, samples, horizon, isolation)
    assert found.bite > 1e-2
    assert found.largest < 3e-6


@families
def test_rows_of_unequal_suffixes_share_a_batch(family):
    model = tiny_model(family)
    inputs = tiny_inputs(model, length=LENGTH, padding="right")
    samples = every_other_layer(model, [(0, 8), (1, 8)])
    batches = list(site_batches(in_documents(inputs, samples), anatomy(model).top_k, MAX_TOKENS))
    assert [[site.num_targets for site in batch] for batch in batches] == [[2, 7]]
    found = identities.replay_against_full_forward(model, inputs, samples, isolation="batched")
    assert found.bite > 1e-2
    assert found.largest < 3e-6


@families
def test_mass_selection_and_expert_outputs_are_those_of_the_native_model(family):
    model = tiny_model(family)
    layer = anatomy(model).moe_layer(anatomy(model).moe_layers[1])
    calls, shared = [], []

    def around_experts(inner, hidden, expert_ids, weights):
        calls.append((hidden.flatten(0, -2), expert_ids, weights))
        return inner(hidden, expert_ids, weights)

    def around_shared(inner, *args):
        shared.append(inner(*args))
        return shared[-1]

    wrap_forward(layer.experts, around_experts, Rank.RECORD)
    if layer.shared_expert is not None:
        wrap_forward(layer.shared_expert, around_shared, Rank.RECORD)
    ids = tiny_inputs(model, length=LENGTH)["input_ids"][:1]
    oracle(model, ids, [(0, 5, layer.index)], isolation="batched")
    (hidden, expert_ids, weights), (acted_hidden, acted_ids, acted_weights) = calls[1], calls[-1]
    num_actions = len(action_names(anatomy(model).top_k))
    assert acted_hidden.shape[0] == num_actions
    assert torch.equal(acted_ids, expert_ids[:1].expand_as(acted_ids))
    torch.testing.assert_close(acted_hidden, hidden[:1].expand_as(acted_hidden), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(acted_weights, action_weights(weights[0]), atol=1e-6, rtol=1e-6)
    mass = weights[0].sum()
    torch.testing.assert_close(acted_weights.sum(-1), mass.expand(num_actions), atol=1e-6, rtol=1e-6)
    for output in shared[-1:]:
        native = shared[1].flatten(0, -2)[:1]
        torch.testing.assert_close(output.flatten(0, -2), native.expand(num_actions, -1), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_packed_documents_are_audited_as_if_alone(family):
    model = tiny_model(family)
    ids = tiny_inputs(model, length=20)["input_ids"][:1]
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    samples = every_layer(model, [(0, 4), (0, 15)])
    inputs = {"input_ids": ids, "position_ids": positions}
    assert identities.replay_against_full_forward(model, inputs, samples, isolation="batched").largest < 3e-6
    packed = oracle(model, ids, samples, position_ids=positions)
    alone = oracle(model, ids[:, 12:], [(0, 3, layer) for _, position, layer in samples if position == 15])
    np.testing.assert_allclose(packed["ce"][packed["position"] == 15].to_numpy(), alone["ce"].to_numpy(), atol=3e-6)


def test_frame_and_native_action():
    model = tiny_model("olmoe")
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    samples = [(1, 7, 2), (0, 3, 0), (1, 7, 0)]
    frame = oracle(model, ids, samples, isolation="batched")
    names = action_names(3)
    assert list(frame.columns) == ["row", "position", "layer", "action", "ce", "delta_ce"]
    keys = frame[["row", "position", "layer"]].itertuples(index=False, name=None)
    assert list(keys) == [sample for sample in samples for _ in names]
    assert frame["action"].tolist() == list(names) * 3
    assert (frame.loc[frame["action"] == "native", "delta_ce"] == 0).all()
    with torch.no_grad():
        logits = model(ids[1:2]).logits[0]
    stock = torch.nn.functional.cross_entropy(logits[7:-1], ids[1, 8:])
    native = frame[(frame["action"] == "native") & (frame["position"] == 7)]["ce"].to_numpy()
    np.testing.assert_allclose(native, float(stock), atol=3e-6)


def test_slots_are_in_the_order_of_the_familys_router():
    """DeepSeek's top-k is unsorted: vertex_k is the k-th of what the router returned, whatever its weight."""
    model = tiny_model("deepseek_v2")
    ids = tiny_inputs(model, length=LENGTH)["input_ids"][:1]
    found = identities.replay_against_full_forward(model, {"input_ids": ids}, [(0, 6, 1)])
    assert found.largest < 3e-6


def test_chunks_of_any_size_give_the_same_losses():
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model, length=LENGTH, padding="left")
    samples = every_layer(model, [(0, 3), (1, 9)])
    whole, chunked = (
        oracle(model, **inputs, samples=samples, isolation="batched", max_tokens=size) for size in (10_000, 40)
    )
    np.testing.assert_allclose(whole["ce"].to_numpy(), chunked["ce"].to_numpy(), atol=3e-6)


def test_nothing_stays_on_the_model():
    model = tiny_model("olmoe")
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    oracle(model, ids, [(0, 3, 0)])
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("samples", "changes", "message"),
    [
        ([(0, 3, 9)], {}, "layer 9 has no router"),
        ([(0, 99, 1)], {}, "outside input_ids"),
        ([(2, 3, 1)], {}, "outside input_ids"),
        ([(1, 2, 1)], {}, "is padding"),
        ([(0, LENGTH - 1, 1)], {}, "has no target"),
        ([(0, 3, 1)], {"horizon": 0}, "horizon = 0"),
        ([(0, 3, 1), (0, 3, 1)], {}, "a layer occurs twice"),
        ([], {}, "samples is empty"),
    ],
)
def test_bad_samples_are_refused(samples, changes, message):
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model, length=LENGTH, padding="left")
    with pytest.raises(ValueError, match=message):
        oracle(model, **inputs, samples=samples, **changes)


def test_a_dense_layer_a_gap_in_the_mask_and_one_expert_are_refused():
    model = tiny_model("qwen2_moe")
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    with pytest.raises(ValueError, match="layer 0 has no router; MoE layers of this model: 1, 2, 3"):
        oracle(model, ids, [(0, 3, 0)])
    mask = torch.ones_like(ids)
    mask[0, 4] = 0
    with pytest.raises(ValueError, match="has a gap"):
        oracle(model, ids, [(0, 3, 1)], mask)
    with pytest.raises(ValueError, match="num_experts_per_tok = 1"):
        oracle(tiny_model("olmoe", num_experts_per_tok=1), ids, [(0, 3, 1)])

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aarlib.audit.actions import FIXED, action_names, action_weights, temperature


@pytest.mark.parametrize("top_k", [2, 4, 6, 8])
def test_every_action_keeps_the_mass_and_stays_on_the_simplex(top_k):
    weights = torch.rand(5, 3, top_k, generator=torch.Generator().manual_seed(0)) * 1.7
    actions = action_weights(weights)
    assert actions.shape == (5, 3, len(action_names(top_k)), top_k) == (5, 3, 4 + 2 * top_k, top_k)
    assert (actions >= 0).all()
    torch.testing.assert_close(actions.sum(-1), weights.sum(-1)[..., None].expand(actions.shape[:-1]))


@given(st.lists(st.floats(2.0**-100, 8.0, width=32), min_size=2, max_size=8))
def test_any_weights_keep_their_mass_and_order(values):
    weights = torch.tensor(values)
    actions = action_weights(weights)
    assert torch.isfinite(actions).all() and (actions >= 0).all()
    torch.testing.assert_close(actions.sum(-1), weights.sum().expand(actions.shape[0]))
    for name in ("temperature_0.5", "temperature_2.0"):
        changed = actions[action_names(len(values)).index(name)]
        assert (changed[weights.argsort()].diff() >= 0).all()


def test_eight_experts_have_the_twenty_actions_of_the_paper():
    assert len(action_names(8)) == 20
    assert action_names(2) == (*FIXED, "mix_0", "mix_1", "vertex_0", "vertex_1")


def test_values_by_hand():
    named = dict(zip(action_names(2), action_weights(torch.tensor([0.6, 0.2])), strict=True))
    expected = {
        "native": [0.6, 0.2],
        "uniform": [0.4, 0.4],
        "temperature_0.5": [0.72, 0.08],  # p = (3/4, 1/4), squared: 9 to 1
        "temperature_2.0": [0.8 * 3**0.5 / (3**0.5 + 1), 0.8 / (3**0.5 + 1)],
        "mix_0": [0.7, 0.1],
        "mix_1": [0.3, 0.5],
        "vertex_0": [0.8, 0.0],
        "vertex_1": [0.0, 0.8],
    }
    for name, values in expected.items():
        torch.testing.assert_close(named[name], torch.tensor(values))


def test_native_is_the_weights_themselves_bitwise():
    weights = torch.rand(7, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(action_weights(weights)[:, 0], weights)


def test_small_weights_do_not_underflow():
    torch.testing.assert_close(temperature(torch.tensor([1e-30, 1e-30]), 0.5), torch.tensor([1e-30, 1e-30]))


def test_one_selected_expert_is_refused():
    with pytest.raises(ValueError, match="num_experts_per_tok = 1.*nothing to reweigh"):
        action_weights(torch.rand(3, 1))

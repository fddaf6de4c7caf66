import pytest
import torch

from aarlib import identities
from aarlib.aar import AARConfig, attach_aar
from aarlib.audit import gradient_utilities, oracle
from aarlib.moe.anatomy import anatomy
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)
LENGTH = 16


def every_layer(model, places):
    return [(*place, layer) for place in places for layer in anatomy(model).moe_layers]


def agree(found):
    return found.bite > 1e-2 and found.largest < 1e-5 and found.relative < 1e-4


@pytest.fixture
def backwards(monkeypatch):
    """One entry for every backward through torch.autograd."""
    calls = []
    for module, name in ((torch.autograd, "grad"), (torch.autograd, "backward")):
        stock = getattr(module, name)

        def counted(*args, stock=stock, **kwargs):
            calls.append(1)
            return stock(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return calls


@families
@pytest.mark.parametrize("horizon", [None, 3])
def test_gradient_utilities_equal_autograd_per_sample(family, horizon):
    model = tiny_model(family)
    inputs = {"input_ids": tiny_inputs(model, length=LENGTH)["input_ids"]}
    samples = every_layer(model, [(0, 0), (1, 7), (0, LENGTH - 2)])
    assert agree(identities.gradients_against_autograd(model, inputs, samples, horizon))


@families
@pytest.mark.parametrize(("horizon", "padding"), [(None, "left"), (4, "right")])
def test_the_same_with_aar_attached_and_padding(family, horizon, padding):
    model = tiny_model(family)
    identities.default_attach(model)
    inputs = tiny_inputs(model, length=LENGTH, padding=padding)
    samples = every_layer(model, [(0, 2), (1, 8)])
    assert agree(identities.gradients_against_autograd(model, inputs, samples, horizon))


@families
def test_one_backward_gives_every_token_and_layer_at_the_full_horizon(family, backwards):
    model = tiny_model(family)
    layers = anatomy(model).moe_layers
    inputs = tiny_inputs(model, length=LENGTH, padding="left")
    found = gradient_utilities(model, **inputs, layers=layers)
    assert len(backwards) == 1
    real = inputs["attention_mask"].bool()
    real[:, -1] = False
    for layer in layers:
        assert torch.equal(found[layer].isfinite().all(-1), real)
        assert (found[layer][real].abs().amax(-1) > 0).all()


def test_a_limited_horizon_takes_one_backward_for_each_distinct_end(backwards):
    model = tiny_model("olmoe")
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    for places, ends in (
        ([(0, 3)], 1),
        ([(0, 3), (1, 3), (1, 9)], 2),  # rows share a backward; column 7 and 13
        ([(0, 2), (0, 5), (0, 12), (0, 13)], 3),  # 6, 9 and twice the last target
    ):
        backwards.clear()
        gradient_utilities(model, ids, [0, 1, 2], horizon=4, positions=places)
        assert len(backwards) == ends
    backwards.clear()
    gradient_utilities(model, ids, [0, 1, 2], horizon=4)
    assert len(backwards) == LENGTH - 4  # the ends 4 .. 15


def test_packed_documents_keep_to_themselves():
    model = tiny_model("olmoe")
    ids = tiny_inputs(model, length=20)["input_ids"][:1]
    inputs = {"input_ids": ids, "position_ids": torch.cat([torch.arange(12), torch.arange(8)])[None]}
    samples = every_layer(model, [(0, 4), (0, 10), (0, 15)])
    for horizon in (None, 3):
        assert agree(identities.gradients_against_autograd(model, inputs, samples, horizon))


def test_utilities_predict_the_oracle_to_first_order():
    """Close to the native weights the loss falls by G: scaled-down experts make every action a small one."""
    model = tiny_model("olmoe")
    with torch.no_grad():
        for layer in anatomy(model).layers:
            layer.experts.get_parameter("down_proj").mul_(1e-2)
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    frame = oracle(model, ids, [(0, 5, 0)])
    exact = -torch.tensor(frame[frame["action"].str.startswith("vertex")]["delta_ce"].to_numpy())
    found = gradient_utilities(model, ids, [0], positions=[(0, 5)])[0][0, 5].double()
    assert exact.abs().max() > 1e-4
    torch.testing.assert_close(found, exact, rtol=5e-2, atol=float(exact.abs().max()) * 5e-2)


def test_positions_restrict_and_others_are_nan():
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model, length=LENGTH, padding="left")
    whole = gradient_utilities(model, **inputs, layers=[0, 2], horizon=4)
    chosen = gradient_utilities(model, **inputs, layers=[0, 2], horizon=4, positions=[(0, 3), (1, 9)])
    column = gradient_utilities(model, **inputs, layers=[0], positions=[9], horizon=4)[0]
    for layer in (0, 2):
        assert whole[layer].shape == (2, LENGTH, 3)
        assert whole[layer][:, -1].isnan().all() and whole[layer][1, :5].isnan().all()
        assert whole[layer][0, :-1].isfinite().all()
        assert (~chosen[layer].isnan()).any(-1).nonzero().tolist() == [[0, 3], [1, 9]]
        torch.testing.assert_close(chosen[layer][0, 3], whole[layer][0, 3], atol=1e-6, rtol=1e-5)
    assert (~column.isnan()).any(-1).nonzero().tolist() == [[0, 9], [1, 9]]


def test_bad_input_is_refused():
    model = tiny_model("olmoe")
    ids = tiny_inputs(model, length=LENGTH)["input_ids"]
    with pytest.raises(ValueError, match="layer 7 has no router"):
        gradient_utilities(model, ids, [7])
    with pytest.raises(ValueError, match="horizon = 0"):
        gradient_utilities(model, ids, [0], horizon=0)
    with pytest.raises(ValueError, match="positions: 16 is outside"):
        gradient_utilities(model, ids, [0], positions=[16])
    packed = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand_as(ids)
    with pytest.raises(ValueError, match="attention_mask: rows of packed documents take none"):
        gradient_utilities(model, ids, [0], torch.ones_like(ids), position_ids=packed)
    with pytest.raises(ValueError, match="num_experts_per_tok = 1"):
        gradient_utilities(tiny_model("olmoe", num_experts_per_tok=1), ids, [0])


def test_constant_windows_are_refused():
    model = tiny_model("olmoe")
    attach_aar(model, AARConfig(layers=(1, 2), window=4, window_grad=False))
    with pytest.raises(ValueError, match="window_grad = False"):
        gradient_utilities(model, tiny_inputs(model)["input_ids"], [0])

"""The lens's identities as functions, as doctor calls them, and that they bite."""

import pytest
import torch

from aarlib import identities
from tests.tiny import tiny_inputs, tiny_model


@pytest.mark.parametrize("by", ["head", "expert"])
def test_identities_hold_with_aar_attached(by):
    model = tiny_model("qwen2_moe")
    identities.default_attach(model)
    inputs = tiny_inputs(model, length=8, padding="left")
    assert identities.closure(model, inputs) < 1e-4
    assert identities.closure(model, inputs, by) < 1e-4
    assert identities.parts_against_whole(model, inputs, by) < 1e-4


def test_a_forgotten_component_is_seen():
    """A part of the residual stream that no component stands for: closure fails."""
    model = tiny_model("olmoe")
    layer = model.model.layers[0]
    stock = layer.forward
    layer.forward = lambda hidden, *args, **kwargs: stock(hidden, *args, **kwargs) + torch.full_like(hidden, 0.3)
    assert identities.closure(model, tiny_inputs(model)) > 1e-2

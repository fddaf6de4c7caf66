"""The two sides of the lens bench give the same numbers, and a wrong one is seen."""

import pytest
import torch

from aarlib.bench import lens
from aarlib.bench.measure import mid_model


@pytest.fixture(scope="module")
def model():
    shape = {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    return mid_model(num_hidden_layers=3, **shape)


def test_folded_and_looped_variances_are_equal(model):
    assert lens.largest_difference(model, lens.batches(2)[0]) < 1e-4


def test_a_variance_that_is_off_is_seen(model, monkeypatch):
    stock = lens.folded
    monkeypatch.setattr(lens, "folded", lambda *args: {name: 1.1 * values for name, values in stock(*args).items()})
    assert lens.largest_difference(model, lens.batches(2)[0]) > 0.05


def test_documents_come_in_batches_of_32():
    assert [batch.shape for batch in lens.batches(40)] == [torch.Size([32, 32]), torch.Size([8, 32])]

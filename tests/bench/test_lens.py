"""The two sides of the lens bench give the same numbers, and a wrong one is seen."""

import pytest
import torch

from aarlib.bench import lens
from aarlib.bench.measure import mid_model


@pytest.fixture(scope="module")
def model():
    shape = {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    return mid_model(num_hidden_layers=3, **shape)


def test_folded_and_looped_variances_are_equal_at_every_receiver(model):
    checked = lens.equal_numbers(model, lens.batches(2)[0])
    assert all(item.error < 1e-5 for item in checked)
    assert (
        sum("by layer" in item.what for item in checked) == 3 and sum("by neuron" in item.what for item in checked) == 2
    )


@pytest.mark.parametrize("level", lens.LEVELS)
def test_a_variance_that_is_off_is_seen(model, monkeypatch, level):
    stock = lens.folded

    def off(*args):
        return {n: values * (1.1 if lens.level_of(n) == level else 1.0) for n, values in stock(*args).items()}

    monkeypatch.setattr(lens, "folded", off)
    with pytest.raises(
        RuntimeError, match=f"variances by {level} at receiver . the two ways differ".replace(" . ", " .: ")
    ):
        lens.equal_numbers(model, lens.batches(2)[0])


def test_documents_come_in_batches_of_32():
    assert [batch.shape for batch in lens.batches(40)] == [torch.Size([32, 32]), torch.Size([8, 32])]

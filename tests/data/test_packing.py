"""Packing keeps documents apart, bit for bit, and changes neither a step's targets nor its gradient."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aarlib.aar.config import AARConfig
from aarlib.data.chat import Encoded, collate
from aarlib.data.packing import best_fit, collate_packed, pack
from aarlib.moe.anatomy import anatomy
from aarlib.moe.packing import check_packing, packed_inputs
from aarlib.training.methods import build_method
from aarlib.training.objectives import next_token_ce
from tests.tiny import FAMILIES, tiny_model

PACKABLE = [family for family in FAMILIES if family != "qwen3_5_moe"]
LENGTH = 40


def rows(count: int = 9, seed: int = 0) -> list[Encoded]:
    generator = random.Random(seed)
    made = []
    for index in range(count):
        ids = [generator.randrange(3, 97) for _ in range(generator.randint(2, 30))]
        made.append(Encoded(f"r{index}", ids, [generator.random() < 0.6 for _ in ids], False))
    return made


def test_best_fit_fills_the_fullest_row_that_still_holds_a_document() -> None:
    assert best_fit([5, 7, 3, 4, 1], 10) == [[1, 2], [0, 3, 4]]
    assert best_fit([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []
    with pytest.raises(ValueError, match="a row of 11 tokens does not fit a packed row of 10"):
        best_fit([11], 10)


def test_best_fit_wastes_little_and_loses_nothing() -> None:
    generator = random.Random(1)
    lengths = [min(512, int(generator.lognormvariate(5.3, 0.8)) + 2) for _ in range(1024)]
    bins = best_fit(lengths, 512)
    assert sorted(index for members in bins for index in members) == list(range(1024))
    assert max(sum(lengths[index] for index in members) for members in bins) <= 512
    assert sum(lengths) / (512 * len(bins)) > 0.97


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 100))
def test_best_fit_of_any_lengths(lengths: list[int], capacity: int) -> None:
    bins = best_fit(lengths, capacity)
    fill = sorted(sum(lengths[index] for index in members) for members in bins)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert not fill or fill[-1] <= capacity
    assert len(fill) < 2 or fill[0] + fill[1] > capacity, "the two emptiest rows fit into one"


def test_every_document_is_there_once_with_its_targets() -> None:
    packed = pack(rows(), LENGTH)
    assert len(packed) < 9 and max(len(row.documents) for row in packed) > 1
    assert sorted(name for row in packed for name in row.row_id.split("+")) == sorted(row.row_id for row in rows())
    assert sum(row.num_targets for row in packed) == sum(row.num_targets for row in rows()) > 0
    assert pack(rows()[::-1], LENGTH) == packed
    batch = collate_packed(packed, 0, sequence_length=LENGTH)
    starts = batch["position_ids"] == 0
    assert int((starts & batch["attention_mask"].bool()).sum()) == 9
    assert batch["labels"][starts].eq(-100).all()


@pytest.mark.parametrize("family", PACKABLE)
def test_changing_document_1_leaves_document_2_bit_identical(family: str) -> None:
    """With trained routers attached, whose windows must not reach into the other document either.

    Experts one token at a time: the rounding of a grouped product depends on how many tokens of document 1 chose the same expert.
    """
    model, handle = _attached(family)
    model.set_experts_implementation("batched_mm")
    first, second = (row for row in pack(rows(), LENGTH)[0].documents[:2])
    batch = collate_packed(pack(rows(), LENGTH)[:1], 0)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, :first] = (other["input_ids"][0, :first] + 17) % 90 + 3
    with torch.no_grad():
        logits = [model(**packed_inputs(model, b["input_ids"], b["position_ids"])).logits[0] for b in (batch, other)]
    assert float((logits[0][:first] - logits[1][:first]).abs().max()) > 1e-2
    assert torch.equal(logits[0][first : first + second], logits[1][first : first + second])
    handle.detach()


@pytest.mark.parametrize("family", PACKABLE)
def test_a_packed_step_has_the_gradient_of_the_unpacked_one(family: str) -> None:
    gradients, sums = [], []
    for batch in (collate(rows(), 0), collate_packed(pack(rows(), LENGTH), 0, sequence_length=LENGTH)):
        model, handle = _attached(family)
        result = next_token_ce(model, batch)
        sums.append((float(result.ce_sum.sum()), int(result.num_targets.sum())))
        (result.ce_sum.sum() / result.num_targets.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in handle.trainable()})
    assert sums[0][1] == sums[1][1] and abs(sums[0][0] / sums[1][0] - 1) < 1e-5
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 1e-3
    for name, gradient in gradients[0].items():
        assert float((gradient - gradients[1][name]).abs().max()) < 1e-5, name


def test_linear_attention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"packing: layers \[0, 2\] are linear attention"):
        check_packing(anatomy(tiny_model("qwen3_5_moe")))


def _attached(family: str) -> tuple[Any, Any]:
    """The tiny model with AAR on its last two layers, A and G random at O(1)."""
    model = tiny_model(family)
    last = len(anatomy(model).layers) - 1
    handle = build_method(AARConfig(layers=(last - 1, last), window=6), 0).attach(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in handle.trainable():
            if "attention" in name or "gate" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, handle

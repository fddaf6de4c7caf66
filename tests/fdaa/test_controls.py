import math

import pytest
import torch

from aarlib.audit.actions import temperature, uniform
from aarlib.fdaa.attach import attach_fdaa
from aarlib.fdaa.config import FixedConfig
from aarlib.fdaa.controls import StaticCalibrator, permuted_scores, window_permutations
from aarlib.moe.record import record
from tests.tiny import tiny_inputs, tiny_model


def test_fixed_controls_are_the_audits_actions():
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model)
    with torch.no_grad(), record(model, [1], dispatch=True) as native:
        model(**inputs)
    weights = native.dispatch[1].weights
    for tau, expected in ((1.0, weights), (2.0, temperature(weights, 2.0)), (math.inf, uniform(weights))):
        handle = attach_fdaa(model, FixedConfig(layers=(1,), tau=tau))
        with torch.no_grad(), record(model, [1], dispatch=True) as rec:
            model(**inputs)
        handle.detach()
        torch.testing.assert_close(rec.dispatch[1].weights, expected, atol=1e-6, rtol=0)
        assert (tau == 1) == torch.equal(rec.dispatch[1].weights, weights)


def test_permuted_scores_move_whole_score_vectors_by_rank():
    generator = torch.Generator().manual_seed(0)
    weights, scores = (torch.rand(2, 5, 3, generator=generator) for _ in range(2))
    permutation = torch.stack([torch.randperm(5, generator=generator) for _ in range(2)])
    moved = permuted_scores(weights, scores, permutation)
    for row in range(2):
        for position in range(5):
            ours, theirs = weights[row, position].argsort(descending=True), permutation[row, position]
            source = weights[row, theirs].argsort(descending=True)
            assert torch.equal(moved[row, position, ours], scores[row, theirs, source])
    still = torch.arange(5).repeat(2, 1)
    assert torch.equal(permuted_scores(weights, scores, still), scores)


def test_permutations_are_seeded_by_the_window_and_leave_padding():
    first = window_permutations(["a", "b"], [6, 4], 6)
    assert torch.equal(first, window_permutations(["a", "b"], [6, 4], 6))
    assert torch.equal(first[1:], window_permutations(["b"], [4], 6))
    assert not torch.equal(first[0], torch.arange(6)) and sorted(first[0].tolist()) == list(range(6))
    assert first[1, 4:].tolist() == [4, 5] and sorted(first[1, :4].tolist()) == [0, 1, 2, 3]


def test_the_calibrator_reads_its_table_by_layer_and_expert():
    calibrator = StaticCalibrator(4, (1, 3))
    with torch.no_grad():
        calibrator.table.copy_(torch.arange(8.0).view(2, 4))
    ids = torch.tensor([[2, 0]])
    found = calibrator(torch.zeros(1, 2), torch.zeros(1, 2, 2), torch.ones(1, 2), ids, 3)
    assert found.tolist() == [[6.0, 4.0]]


def test_a_permutation_on_the_handle_changes_the_model_and_only_while_it_is_set():
    from aarlib import identities

    model = tiny_model("olmoe")
    inputs = tiny_inputs(model)
    handle = identities.attach_random_head(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        handle.permutation = window_permutations(["a", "b"], [24, 24], 24)
        permuted = model(**inputs).logits
        handle.permutation = None
        assert torch.equal(model(**inputs).logits, expected)
    assert (permuted - expected).abs().max() > 1e-2


def test_masks_act_on_the_handle():
    from aarlib import identities

    model = tiny_model("olmoe")
    handle = identities.attach_random_head(model)
    found = {}
    for masked in ((), ("outputs",), ("hidden",), ("hidden", "outputs")):
        handle.masked = masked
        with torch.no_grad():
            found[masked] = model(**tiny_inputs(model)).logits
    values = list(found.values())
    assert all(not torch.equal(values[i], values[j]) for i in range(4) for j in range(i))


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="greater than 0"):
        FixedConfig(layers=(1,), tau=0.0)

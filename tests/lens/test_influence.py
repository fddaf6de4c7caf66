"""Variance, APS and ANS from folded matrices and constants against the scores themselves, and the bound."""

import pytest
import torch

from aarlib import identities
from aarlib.lens import Decomposition, decompose
from aarlib.lens.influence import moments
from aarlib.lens.names import LEVELS
from aarlib.lens.projection import Projection
from aarlib.lens.scores import read
from aarlib.moe.anatomy import anatomy
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

levels = pytest.mark.parametrize("by", LEVELS)


def patched(family, with_aar):
    model = tiny_model(family)
    if with_aar:
        identities.default_attach(model)
    return model


def test_moments_by_hand():
    variance, aps, ans = moments(torch.tensor([[3.0, -1.0, 2.0, 0.0]]))[0]
    assert variance == pytest.approx(2.5)
    assert aps == pytest.approx(1.25)
    assert ans == pytest.approx(-0.25)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_aar", [False, True])
@levels
def test_frames_are_means_over_tokens_of_the_scores_moments(family, with_aar, by):
    model = patched(family, with_aar)
    inputs = tiny_inputs(model, length=8, padding="left")
    found = decompose(model, **inputs, by=by)
    mask = inputs["attention_mask"].bool()
    receiver = found.receivers[-1]
    frames = {"variance": found.variance, "aps": found.aps, "ans": found.ans}
    names = found.components(receiver)
    assert set(names) <= set(found.variance.index) and found.variance.index.is_unique
    for name in names[:: 1 + len(names) // 50]:
        expected = moments(found.scores(receiver, name)[mask]).double().mean(0)
        for value, (moment, frame) in zip(expected.tolist(), frames.items(), strict=True):
            assert frame.loc[name, receiver] == pytest.approx(value, abs=1e-6, rel=1e-4), (name, moment)
    first = found.receivers[0]
    assert found.variance[first].dropna().index.isin(found.variance[receiver].dropna().index).all()
    assert found.variance[first].isna().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_first_position(family):
    """At every level; the first token of a row stands behind its left padding."""
    model = tiny_model(family)
    inputs = tiny_inputs(model, length=8, padding="left")
    reading = read(model, Projection(anatomy(model)), **inputs, edges=True)
    mask = inputs["attention_mask"].bool()
    mask[[0, 1], [0, 5]] = False
    for by in LEVELS:
        found = Decomposition(reading, by)
        last, sums = found.receivers[-1], found.sums[min(1, len(found.sums) - 1)]
        for row in sums.first[:, :, -1, 0].sum(0).nan_to_num().topk(3).indices.tolist():
            expected = moments(found.scores(last, sums.senders[row])[mask]).double().mean(0)
            assert sums.mean("without_first")[row, -1].tolist() == pytest.approx(expected.tolist(), abs=1e-7, rel=1e-4)
            assert abs(sums.mean()[row, -1, 0] - sums.mean("without_first")[row, -1, 0]) > 1e-6


def test_sums_are_per_document_and_experts_count_their_selections():
    model = patched("olmoe", False)
    inputs = tiny_inputs(model, padding="right")
    found = decompose(model, **inputs, by="expert")
    alone = decompose(model, inputs["input_ids"][1:, :19], by="expert")
    for together, single in zip(found.sums, alone.sums, strict=True):
        torch.testing.assert_close(together.all[1], single.all[0], atol=1e-4, rtol=1e-4, equal_nan=True)
    experts = found.sums[-1]
    ids = found.reading.capture.routed(1).expert_ids
    row = experts.senders.index("moe.1.expert.3")
    assert experts.selected is not None and int(experts.selected[:, row].sum()) == int((ids == 3).sum()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_holds_and_is_not_idle(family):
    model = tiny_model(family)
    inputs = tiny_inputs(model, padding="left")
    mask = inputs["attention_mask"].bool()
    found = decompose(model, **inputs, by="head")
    receiver, closest = found.receivers[-1], 0.0
    for name in found.components(receiver):
        if name == "bias":
            continue
        variance = moments(found.scores(receiver, name))[..., 0][mask]
        bound = found.bound(receiver, name)[mask]
        assert (variance <= bound * (1 + 1e-5)).all(), name
        closest = max(closest, float((variance / bound).max()))
    assert closest > 0.2  # a bound five times lower would be broken


def test_the_bound_is_for_stock_routers():
    model = patched("olmoe", True)
    found = decompose(model, **tiny_inputs(model))
    with pytest.raises(ValueError, match=r"receiver = 2: its AAR factor is per expert, and the bound is for stock"):
        found.bound(2, "attn.1")

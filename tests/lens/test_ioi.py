"""IOI on the bundled model and on tiny ones: prompts, direct effects that add up, maps."""

import pytest
import torch
from scipy.stats import spearmanr

from aarlib.lens import ioi
from aarlib.lens.projection import Projection
from aarlib.lens.scores import read
from aarlib.moe.anatomy import anatomy
from aarlib.moe.loading import load_model, load_tokenizer
from tests.lens.reference import Seen, gamma, naive_parts, rms
from tests.tiny import FAMILIES, tiny_model


@pytest.fixture(scope="module")
def nano():
    return load_model("nano")


@pytest.fixture(scope="module")
def prompts(nano):
    return ioi.collate(nano[1], ioi.draw_prompts(nano[1], 24))


def test_prompts_repeat_one_name_and_end_before_the_other(nano, prompts):
    drawn = ioi.draw_prompts(nano[1], 24)
    assert drawn == ioi.draw_prompts(nano[1], 24) != ioi.draw_prompts(nano[1], 24, seed=1)
    for prompt in drawn:
        ids = nano[1](prompt.text)["input_ids"]
        assert (
            ids.count(prompt.repeated)
            + (ids[0] != prompt.repeated and prompt.text.startswith(nano[1].decode([prompt.repeated]).strip()))
            == 2
        )
        assert prompt.answer != prompt.repeated
    assert prompts.attention_mask.sum(1).tolist() == [int(last) + 1 for last in prompts.last]


def test_the_bundled_model_solves_it(nano, prompts):
    assert (ioi.logit_differences(nano[0], prompts) > 0).float().mean() > 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_effects_are_parts_of_the_logit_difference(family):
    """Each head's is its own contribution to the residual stream read by the output layer; with all the rest they add up."""
    model = tiny_model(family)
    ids = torch.randint(3, 97, (3, 6), generator=torch.Generator().manual_seed(0))
    batch = ioi.Prompts(
        ids, torch.ones_like(ids), torch.tensor([5, 5, 5]), torch.tensor([7, 8, 9]), torch.tensor([10, 11, 12])
    )
    reading = read(model, Projection(anatomy(model)), ids)
    found = ioi.head_effects(model, reading, batch)
    norm, final = model.model.norm, reading.capture.final.unflatten(0, (3, 6))[:, -1]
    direction = (model.lm_head.weight[batch.answer] - model.lm_head.weight[batch.repeated]) * gamma(norm)
    parts = naive_parts(model, Seen(model, {"input_ids": ids}), "head")
    written = {name: (part[:, -1] * direction).sum(-1) / rms(final, norm)[:, 0] for _, name, part in parts}
    total = sum(written.values())
    torch.testing.assert_close(total, ioi.logit_differences(model, batch), atol=1e-4, rtol=1e-4)
    assert set(found.names) == {name for name in written if ".head." in name}
    for column, name in enumerate(found.names):
        torch.testing.assert_close(found.direct[:, column], written[name], atol=1e-5, rtol=1e-4)
    assert found.direct.abs().amax(0).min() > 1e-3 and (found.direct.sum(1) - total).abs().min() > 1e-2


def test_maps_of_one_head(nano, prompts):
    model, _ = nano
    reading = read(model, Projection(anatomy(model)), prompts.input_ids, prompts.attention_mask, edges=True)
    maps = ioi.head_map(reading, 3, 1)
    assert maps.attention.shape == maps.variance.shape
    rows = maps.attention[prompts.attention_mask.bool()]
    torch.testing.assert_close(rows.sum(-1), torch.ones(len(rows)), atol=1e-4, rtol=0)
    assert (maps.variance >= 0).all() and maps.variance.max() > 0
    correlation = ioi.map_correlation(maps, prompts.attention_mask)
    assert correlation.shape == (24,) and (correlation.abs() <= 1).all() and correlation.mean() > 0


def test_equal_values_share_their_rank():
    attention = torch.tensor([[0.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.0, 0.0, 1.0, 0], [0.25, 0.25, 0.25, 0.25]])
    variance = torch.tensor([[9.0, 0, 0, 0], [3.0, 1.0, 0, 0], [2.0, 2.0, 4.0, 0], [1.0, 1.0, 2.0, 3.0]])
    maps = ioi.HeadMap(attention[None].repeat(2, 1, 1), variance[None].repeat(2, 1, 1))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    for found, length in zip(ioi.map_correlation(maps, mask).tolist(), (4, 3), strict=True):
        rows, columns = torch.tril_indices(length, length)[:, 1:]
        expected = spearmanr(attention[rows, columns], variance[rows, columns]).statistic
        assert 0.1 < found < 0.9 and found == pytest.approx(expected, abs=1e-6)


def test_a_tokenizer_without_the_names_is_refused():
    class Letters:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [ord(character) for character in text]}

    with pytest.raises(ValueError, match="the tokenizer has 0 of 29 names as one token; IOI needs at least two"):
        ioi.draw_prompts(Letters(), 4)


def test_the_tokenizer_alone_is_enough_to_draw():
    assert len(ioi.draw_prompts(load_tokenizer("nano"), 3)) == 3

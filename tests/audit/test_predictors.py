import numpy as np
import pandas as pd
import pytest
import torch

from aarlib.audit.gradients import utilities
from aarlib.audit.predictions import development_examples
from aarlib.audit.predictors import (
    Examples,
    SlotScorer,
    credit_coordinates,
    credit_utilities,
    displacements,
    fit,
    predict,
)
from aarlib.studies.audit import row_spearman


def examples(num=64, top_k=4, d_model=16, layers=(1, 3), seed=0) -> Examples:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    weights = draw(num, top_k).softmax(-1) * 0.7
    outputs, gradient = draw(num, top_k, d_model), draw(num, d_model)
    return Examples(
        draw(num, d_model),
        outputs,
        weights,
        torch.stack([torch.randperm(8, generator=generator)[:top_k] for _ in range(num)]),
        torch.tensor(layers)[torch.arange(num) % len(layers)],
        gradient,
        draw(num, d_model),
        utilities(gradient, outputs, weights),
    )


def test_the_credit_subspace_is_lossless():
    data = examples()
    displacement = displacements(data.outputs, data.weights)
    found = credit_utilities(credit_coordinates(data.gradient, displacement), displacement)
    torch.testing.assert_close(found.float(), data.utility, atol=1e-5, rtol=1e-5)
    assert found.std(-1).min() > 1e-3
    shares = data.weights / data.weights.sum(-1, keepdim=True)
    combined = (shares[..., None] * displacement).sum(1)
    torch.testing.assert_close(combined, torch.zeros_like(combined), atol=1e-6, rtol=0)


def test_the_reranker_has_the_papers_size_on_olmoe():
    shape = examples(num=4, top_k=2, d_model=2048, layers=(3, 7, 11, 15))
    assert sum(part.numel() for part in SlotScorer(shape, 64, seed=0).parameters()) == 810_113


@pytest.mark.parametrize("kind", ["reranker", "gradient_field", "credit_subspace", "leaked"])
def test_predictors_can_learn_their_own_samples(kind):
    data = examples(num=32)
    before = row_spearman(
        predict(fit(kind, data, 8, 0, num_steps=1), data).double().numpy(), data.utility.double().numpy()
    )
    predictor = fit(kind, data, 8, seed=0, num_steps=80)
    after = row_spearman(predict(predictor, data).double().numpy(), data.utility.double().numpy())
    assert np.nanmean(before) < 0.45 < 0.6 < np.nanmean(after)


def test_slots_may_come_in_any_order():
    data = examples(num=8)
    order = torch.tensor([2, 0, 3, 1])
    moved = data._replace(
        outputs=data.outputs[:, order], weights=data.weights[:, order], expert_ids=data.expert_ids[:, order]
    )
    for kind in ("reranker", "gradient_field"):
        predictor = fit(kind, data, 8, seed=0, num_steps=3)
        torch.testing.assert_close(predict(predictor, moved), predict(predictor, data)[:, order], atol=1e-5, rtol=1e-4)


def test_locked_records_are_refused_for_fitting():
    with pytest.raises(ValueError, match="fitted on development records, not on"):
        development_examples(pd.DataFrame({"split": ["development", "locked"]}))

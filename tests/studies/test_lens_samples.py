"""Intervals of the lens's statistics: what is drawn again, rank correlations of it, and cells of the matrices."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from aarlib.stats import spearman
from aarlib.studies import lens_matrices, lens_samples
from tests.studies.test_lens import record
from tests.studies.test_lens import value as cell_of


def test_a_sender_is_drawn_with_all_its_receivers():
    """Five senders, ten cells each, nearly equal within a sender: the interval over cells alone would be far too narrow."""
    generator = np.random.default_rng(3)
    groups = np.repeat(np.arange(5), 10)
    first, second = (generator.normal(size=5)[groups] + 0.01 * generator.normal(size=50) for _ in range(2))
    alone, together = lens_samples.rank_correlation(first, second), lens_samples.rank_correlation(first, second, groups)
    assert alone.mean == together.mean == pytest.approx(spearmanr(first, second).statistic)
    assert together.high - together.low > 2 * (alone.high - alone.low)
    draws = np.random.default_rng(0).integers(0, 5, size=(2000, 5))
    cells = [np.concatenate([np.flatnonzero(groups == group) for group in draw]) for draw in draws]
    by_hand = np.nanpercentile([spearman(first[cell], second[cell]) for cell in cells], [2.5, 97.5])
    assert by_hand == pytest.approx([together.low, together.high], abs=1e-9)


def test_ranks_are_shared_by_equal_values_and_count_what_is_drawn_twice():
    values, weights = np.array([3.0, 1.0, 3.0, 2.0]), np.array([[2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    found = lens_samples._weighted_ranks(values, weights)
    assert found[1].tolist() == [3.5, 1.0, 3.5, 2.0]
    assert found[0].tolist() == [3.5, 1.0, 3.5, 2.0], "3, 3, 1, 2"


def test_every_cell_of_the_matrices_has_an_interval_over_documents():
    cells = [("embedding", 1), ("moe.0", 1), ("embedding", 2), ("moe.0", 2), ("moe.1", 2)]
    rows = [record(document, *cell, variance=2.0 * (1 + 0.1 * document)) for document in range(5) for cell in cells]
    several = pd.DataFrame(rows)
    table = lens_matrices.matrices(several)
    assert list(table.columns) == list(lens_matrices.COLUMNS) and len(table) == 5 * 3 * 2
    cell = {"sender": "moe.0", "receiver": 2, "measure": "variance"}
    values = 2.0 * (1 + 0.1 * np.arange(5))
    expected = lens_samples.mean_interval(0.1 * values)
    for column, wanted in expected._asdict().items():
        name = "value" if column == "mean" else column
        assert cell_of(table, name, positions="all", **cell) == pytest.approx(wanted)
    assert expected.low < expected.mean < expected.high
    assert cell_of(table, positions="without_first", **cell) == pytest.approx(0.9 * values.sum() / (5 * 9))
    frame = lens_samples.senders_of(several, "text", "layer").frame()
    kept = table[(table["measure"] == "variance") & (table["positions"] == "all")]
    pivot = kept.pivot(index="sender", columns="receiver", values="value").loc[frame.index]
    np.testing.assert_allclose(pivot, frame)


def test_many_cells_are_drawn_in_blocks(monkeypatch):
    sums, tokens = np.random.default_rng(0).random((6, 7)), np.arange(1.0, 7.0)
    whole = lens_matrices.cell_intervals(sums, tokens)
    monkeypatch.setattr(lens_matrices, "CELLS_AT_ONCE", 3)
    for one, other in zip(lens_matrices.cell_intervals(sums, tokens), whole, strict=True):
        np.testing.assert_allclose(one, other)


def test_units_of_one_document_are_one_sample():
    rows = [record(0, "moe.0.expert.1", 1, 1.0, level="expert", selected=1, largest=1.0) for _ in range(3)]
    frame = pd.DataFrame(rows).assign(document=np.nan, unit=["text-0000", "text-0001", "text-0002"])
    frame["text"] = ["doc:0", "doc:0", None]
    found = lens_samples.senders_of(frame, "text", "expert")
    assert found.samples == ("doc:0", "text-0002") and found.tokens.tolist() == [20, 10]
    assert found.sums["variance"].tolist() == [[[2.0]], [[1.0]]]

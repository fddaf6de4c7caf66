"""The sample and the held-out split: stable, uniform, independent of each other."""

import pytest

from aarlib.data.sampling import in_fraction, row_hash

IDS = [f"rows.jsonl:{number}" for number in range(1, 20_001)]


def test_the_hash_is_that_of_sha256sum_on_any_machine():
    assert row_hash("rows.jsonl:1", "sample") == 0x74C1B0CAE3833A46
    assert row_hash("rows.jsonl:1", "held_out") == 0xDC00947D06655904
    assert [number for number, id in enumerate(IDS[:60], start=1) if in_fraction(id, 0.25, "sample")] == [
        21,
        25,
        26,
        28,
        31,
        37,
        41,
        46,
        48,
        49,
        56,
    ]


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.9])
def test_the_share_is_met_within_four_standard_deviations(fraction):
    share = sum(in_fraction(id, fraction, "sample") for id in IDS) / len(IDS)
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / len(IDS)) ** 0.5


def test_salts_are_independent_and_shares_nested():
    sample = {id for id in IDS if in_fraction(id, 0.25, "sample")}
    held_out = sum(in_fraction(id, 0.2, "held_out") for id in sample) / len(sample)
    assert 0.17 < held_out < 0.23
    assert sample < {id for id in IDS if in_fraction(id, 0.5, "sample")}


def test_everything_and_nothing():
    assert all(in_fraction(id, 1.0, "sample") for id in IDS)
    assert not any(in_fraction(id, 0.0, "sample") for id in IDS)
    with pytest.raises(ValueError, match=r"fraction = 25.0 is not in \[0, 1\]"):
        in_fraction("a", 25.0, "sample")

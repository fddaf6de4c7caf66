import pytest

from aarlib.bench import audit as bench
from aarlib.bench.measure import measure, mid_model
from aarlib.bench.process import peak_gib

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}


def test_both_ways_give_equal_numbers_and_unequal_ones_are_noticed(monkeypatch):
    model = mid_model(initializer_range=0.2, **SMALL)
    bench.equal_numbers(model, window=24, layers=(1, 7), horizon=5)
    losses = bench.whole_forward(model, bench.tokens(model, 24), 12, 1, 5)
    assert (losses - losses[0]).abs().max() > 1e-3
    stock = bench.whole_forward
    monkeypatch.setattr(bench, "whole_forward", lambda *args: stock(*args) + 1e-3)
    with pytest.raises(RuntimeError, match="losses of the actions, exact: the two ways differ by"):
        bench.equal_numbers(model, window=24, layers=(1, 7), horizon=5)


def test_the_plain_way_times_the_samples_it_says():
    settings = bench.Settings()
    positions = bench.positions_of(settings)
    assert len(positions) == settings.positions == len(set(positions)) == 64
    assert max(positions) < settings.window - settings.horizon


def example_variant(size: int):
    return lambda: sum(range(size))


@pytest.mark.slow
def test_a_variant_runs_in_a_process_of_its_own_and_its_failure_is_told():
    ballast = bytearray(2**30)
    ballast[:: 2**12] = b"x" * 2**18
    found = measure("tests.audit.test_bench:example_variant", {"size": 1000}, repeats=3)
    assert 0 < found.min_s <= found.median_s <= found.max_s
    assert 0 < found.peak_gib < peak_gib() - 0.5, "what the parent holds is not the child's"
    with pytest.raises(RuntimeError, match="has no attribute 'nothing'"):
        measure("tests.audit.test_bench:nothing", {})

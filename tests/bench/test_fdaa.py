import pytest
from torch.profiler import ProfilerActivity, profile

from aarlib.bench import fdaa
from aarlib.bench.measure import measure

TINY = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
SETTINGS = fdaa.Settings(rows=2, length=16, num_heads=2, shape=TINY)


def test_all_ways_give_the_same_gradients_for_every_head():
    checked = fdaa.check(**SETTINGS._asdict())
    assert len(checked) == 3 * 2 and all(item.error <= 1e-5 for item in checked)


def test_a_way_with_other_gradients_is_caught(monkeypatch):
    stock = fdaa.prefix_step
    monkeypatch.setattr(fdaa, "full_step", lambda case, index: stock(case, lambda *_: wrong(case)))

    def wrong(case):
        batch = {**case.batch, "input_ids": case.batch["input_ids"].flip(1)}
        return fdaa.FrozenPrefix(case.handles[0].anatomy, fdaa.LAYER)(batch, fdaa.LAYER)

    with pytest.raises(RuntimeError, match="gradients of head 0, first pass and full backward: the two ways differ"):
        fdaa.check(**SETTINGS._asdict())


def num_operations(variant):
    """Of the second call: the first one warms up, and fills the cache."""
    call = getattr(fdaa, variant)(**SETTINGS._asdict())
    call()
    with profile(activities=[ProfilerActivity.CPU]) as again:
        call()
    return sum(event.count for event in again.key_averages())


def test_a_later_way_computes_less():
    full, first, cached = map(num_operations, ("full_backward", "first_pass", "cached_pass"))
    assert full > first > cached > 0


@pytest.mark.slow
def test_a_variant_is_measured_in_a_process_of_its_own():
    assert measure("aarlib.bench.fdaa:first_pass", SETTINGS._asdict(), repeats=1).median_s > 0

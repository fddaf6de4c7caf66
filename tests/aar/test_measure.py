"""Measures by hand, and on a tiny model against the routers and attention that give them."""

import pytest
import torch

from aarlib import aar, identities
from aarlib.aar.measure import (
    autocorrelation,
    correlation_length,
    picks_changed,
    routing_change,
    sink_mass,
    whole_windows,
)
from aarlib.moe.record import record
from tests.tiny import tiny_inputs, tiny_model


def test_autocorrelation_by_hand():
    """x = (1, -1, 1, -1): r = 1, -3/4, 2/4, -1/4; x = (-2, 0, 2): r = 1, 0, -1/2. Constant windows do not count."""
    alternating = torch.tensor([[0.3, 0.1, 0.3, 0.1], [0.2, 0.2, 0.2, 0.2], [5.0, 3.0, 5.0, 3.0]])
    assert autocorrelation(alternating[[0, 2]]).tolist() == pytest.approx([1, -0.75, 0.5, -0.25])
    constant = torch.full((2, 4), 0.25)
    assert autocorrelation(torch.cat([alternating[2:], constant])).tolist() == pytest.approx([1, -0.75, 0.5, -0.25])
    assert autocorrelation(torch.tensor([[0.0, 2.0, 4.0]])).tolist() == pytest.approx([1, 0, -0.5])
    both = torch.tensor([[[0.0, 2.0, 4.0], [1.0, 0.0, 1.0]]])
    assert autocorrelation(both, torch.tensor([[True, False]])).tolist() == pytest.approx([1, 0, -0.5])
    with pytest.raises(ValueError, match="windows: none varies"):
        autocorrelation(constant)


def test_the_correlation_length_is_the_first_lag_below_the_threshold():
    acf = torch.tensor([1.0, 0.6, 0.1, 0.09, 0.3])
    assert correlation_length(acf) == 3
    assert correlation_length(acf, 0.05) == 5


def test_whole_windows_start_where_the_padding_has_left():
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    assert whole_windows(mask, 3).tolist() == [[False, False, True, True, False], [False, False, False, True, True]]


def test_picks_changed_and_sink_mass_by_hand():
    found, reference = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[1, 0], [2, 7], [6, 7]])
    assert picks_changed(found, reference) == pytest.approx(3 / 6)
    assert picks_changed(found, reference, torch.tensor([True, True, False])) == pytest.approx(1 / 4)
    sinks = {3: torch.tensor([[1.0, 0.5, 0.3]])}
    assert sink_mass(sinks) == {3: pytest.approx(0.6)}
    assert sink_mass(sinks, torch.tensor([[False, True, True]])) == {3: pytest.approx(0.4)}


def test_on_a_model_routing_changes_where_routers_are_and_sinks_only_after_them():
    """Routers at layers 1 and 2 of 3: layer 0 keeps its picks, attention of layer 1 its sinks; layer 2 shows both."""
    model = tiny_model("olmoe")
    inputs = tiny_inputs(model, padding="left")
    handle = aar.attach_aar(model, aar.AARConfig(layers=(1, 2), window=6, routers="aar"))
    identities.randomise(handle)
    recorded = {}
    for enabled in (True, False):
        handle.enabled = enabled
        with torch.no_grad(), record(model, windows=6, sink=True, dispatch=True) as rec:
            model(**inputs)
        recorded[enabled] = rec
    patched, stock = recorded[True], recorded[False]
    change = routing_change(patched.dispatch, stock.dispatch, stock.mask)
    assert change[0] == 0 and change[1] > 0.1 and change[2] > 0.1
    ours, theirs = sink_mass(patched.sink, stock.mask), sink_mass(stock.sink, stock.mask)
    assert ours[0] == theirs[0] and ours[1] == theirs[1] and abs(ours[2] - theirs[2]) > 1e-4
    whole = whole_windows(stock.mask, 6)
    acf = autocorrelation(stock.windows[1], whole)
    rows = stock.windows[1][whole].double()
    one = torch.stack([torch.corrcoef(rows[0].repeat(2, 1))[0, 1], acf[0]])
    assert acf.shape == (6,) and one.tolist() == pytest.approx([1, 1])
    assert acf.sum() == pytest.approx(0.5)  # centred: sum_k>=0 r_k = (sum x)^2 / (2 sum x^2) + 1/2
    assert aar.autocorrelation is autocorrelation and aar.routing_change is routing_change

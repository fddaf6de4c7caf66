"""docs/studies/lens.md shows what its results files say, and rendering refuses what is not there."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from aarlib.report.lens_figures import TITLES, figures, head_maps
from aarlib.report.lens_page import as_results, markdown, read_results, render
from aarlib.studies.lens_samples import senders_of
from tests.studies.test_lens import record

DOCS = Path(__file__).parents[2] / "docs" / "studies"


HEAD = "attn.0.head.1"
PAIRS = [
    {"name": HEAD, "query": q, "key": k, "token": "ab"[q], "attention": 0.5, "influence": 0.1 * (q + k)}
    for q, k in ((0, 0), (1, 0), (1, 1))
]


def test_the_page_is_what_its_results_give():
    page = (DOCS / "lens.md").read_text(encoding="utf-8")
    assert page.count("<!-- table ") > 8
    assert render(page, read_results(DOCS / "results")) == page


def test_rows_are_filtered_and_intervals_join_their_value():
    frame = pd.DataFrame(
        [
            {"source": "c4", "kind": "a", "value": 0.5, "low": 0.4, "high": 0.6},
            {"source": "c4", "kind": "b", "value": 0.001, "low": np.nan, "high": np.nan},
            {"source": "world", "kind": "a", "value": 2.0, "low": 1.0, "high": 3.0},
        ]
    )
    results = {"run": as_results({"kinds": frame}, {"model": "m"})}
    found = render("x\n<!-- table run kinds source=c4 -->\nold\n<!-- end -->\ny", results)
    assert found.splitlines()[2:6] == [
        "| kind | value |",
        "| --- | --- |",
        "| a | 0.5000 [0.4000, 0.6000] |",
        "| b | 1.00e-03 |",
    ]
    assert "old" not in found
    both = render("<!-- table run kinds source=c4,world kind=a -->\n<!-- end -->", results)
    assert both.splitlines()[1:4] == ["| source | value |", "| --- | --- |", "| c4 | 0.5000 [0.4000, 0.6000] |"]
    with pytest.raises(ValueError, match="table run other: no such results; runs: run"):
        render("<!-- table run other -->\n<!-- end -->", results)
    with pytest.raises(ValueError, match="table run kinds source=c5: no row"):
        render("<!-- table run kinds source=c5 -->\n<!-- end -->", results)


def test_booleans_and_whole_numbers_read_as_such():
    assert markdown([{"stripe": True, "of": 7, "share": None}]).splitlines()[-1] == "| yes | 7 |  |"


def test_figures_are_drawn_from_tables():
    rows = [
        record(d, n, r, 1.0 + r)
        for d in (0, 1)
        for n, r in (("embedding", 0), ("attn.0", 0), ("embedding", 1), ("moe.0", 1))
    ]
    layers = senders_of(pd.DataFrame(rows), "text", "layer")
    interval = {"low": 0.1, "high": 0.3, "value": 0.2, "source": "text"}
    tables = {
        "kinds": pd.DataFrame([{**interval, "receiver": 1, "measure": kind} for kind in ("moe", "attn")]),
        "recall": pd.DataFrame([{**interval, "receiver": 1, "lag": 1, "chance": 0.25, "commonest": 0.3}]),
        "top_heads": pd.DataFrame(
            [
                {**interval, "sender": "attn.0.head.1"},
                {**interval, "sender": "attn.1.head.0", "value": 0.1, "low": 0.05, "high": 0.12},
            ]
        ),
    }
    shown = {name: layers.frame(name) for name in TITLES}
    found = figures(shown, tables, "text")
    assert list(found) == ["sender_maps", "ranked_senders", "by_receiver"]
    heads = [
        {"head": name, "value": value, "last_variance": 0.1} for name, value in (("attn.0.head.0", 0.9), (HEAD, 0.2))
    ]
    tables |= {"ioi_heads": pd.DataFrame(heads)}
    assert (
        list(figures(shown, tables, "text", pairs=pd.DataFrame(PAIRS[:0], columns=list(PAIRS[0]))))[-1] == "ioi_heads"
    )
    mapped = figures(shown, tables, "text", pairs=pd.DataFrame(PAIRS))["ioi_maps"]
    assert mapped.axes[0].get_title(loc="left") == f"{HEAD}: attention weight", "linear attention has no map"
    maps = found["sender_maps"].axes[:3]
    assert [axis.get_title(loc="left") for axis in maps][1:] == [
        "Promotion: mean positive score",
        "Suppression: mean negative score",
    ]
    norms = [axis.images[0].norm for axis in maps[1:]]
    assert norms[0].vmin == norms[1].vmin == -norms[0].vmax and norms[0].vcenter == 0
    assert [label.get_text() for label in maps[0].get_yticklabels()] == list(layers.senders)
    for axis in maps:
        assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "1"]
        assert axis.get_xlabel() == "receiving router (layer)" and axis.images[0].get_array().shape == (3, 2)
    axis = found["ranked_senders"].axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["attn.0.head.1", "attn.1.head.0"]
    assert [bar.get_width() for bar in axis.patches] == [0.2, 0.1]
    ends = [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    assert ends == [([0.1, 0.3], [0, 0]), ([0.05, 0.12], [1, 1])]
    assert axis.get_xlim()[0] == 0 and axis.get_xlabel() == "variance, summed over receivers"
    bands = [band.get_paths()[0].vertices[:, 1] for band in found["by_receiver"].axes[0].collections]
    assert [(values.min(), values.max()) for values in bands] == [(0.1, 0.3), (0.1, 0.3)]


def test_a_head_has_its_attention_and_its_variance_side_by_side():
    left, right = head_maps(pd.DataFrame(PAIRS), HEAD).axes[:2]
    assert left.get_title(loc="left") == "attn.0.head.1: attention weight"
    assert right.images[0].get_array()[1, 1] == pytest.approx(0.2) and right.images[0].get_array().mask[0, 1]
    assert [label.get_text() for label in right.get_xticklabels()] == ["a", "b"]

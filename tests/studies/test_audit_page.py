import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer

from aarlib.report.audit_figures import figure_of, write_figures
from aarlib.studies.audit_markdown import frame_of, tables
from aarlib.studies.audit_page import fill, results, to_json
from aarlib.studies.intervals import select
from tests.studies.test_audit import records

STUDIES = Path(__file__).parents[2] / "docs" / "studies"


@pytest.fixture(scope="module")
def found():
    return json.loads(to_json(results(records(num_windows=6), None, {"config": {}})))


def test_tables_come_from_the_json_alone(found):
    shown = tables(found)
    for name in ("headroom", "router", "gradient", "conservative", "layers"):
        assert {f"{name}_full", f"{name}_4"} <= set(shown)
    measures = frame_of(found, "measures")
    row = measures[(measures["seed"] == "all") & (measures["layer"] == "pooled") & (measures["horizon"] == "full")]
    value = row[row["measure"] == "structured_oracle"]["value"].item()
    assert f"| structured oracle | {value:.4f} [" in shown["headroom_full"]
    assert shown["seeds"].count("\n") == 1 + 2 + 2


def test_noise_floor_and_constant_samples_stand_beside_the_tables(found):
    shown = tables(found)
    for name in ("headroom_full", "gradient_4", "conservative_4", "layers_full", "seeds", "ranks", "predictors"):
        if name in shown:
            assert "Noise floor of a delta CE" in shown[name] and "1.0e-07." in shown[name]
    assert "best of the vertices and native" in shown["headroom_4"]
    changed = json.loads(json.dumps(found))
    columns = changed["measures"]["columns"]
    for row in changed["measures"]["rows"]:
        row[columns.index("num_excluded")] = 3
    assert "left out of the Spearman: c4 3 of " in tables(changed)["router_full"]


def test_a_page_is_filled_again_and_again(found):
    page = "# T\n<!-- table: noise -->\nold\n<!-- end -->\nafter\n"
    once = fill(page, tables(found))
    assert "old" not in once and "1.0e-07" in once and once.endswith("<!-- end -->\nafter\n")
    assert fill(once, tables(found)) == once
    with pytest.raises(ValueError, match="asks for table 'nothing'"):
        fill("<!-- table: nothing --><!-- end -->", tables(found))


def test_figures(found, tmp_path):
    frames = frame_of(found, "measures"), frame_of(found, "by_rank")
    paths = write_figures(*frames, tmp_path / "figures")
    assert [path.name for path in paths] == ["audit_full.png", "audit_4.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    axes = figure_of(*frames, "4").axes
    assert [axis.get_title() for axis in axes] == ["Utility by router rank", "Captured share", "Headroom by layer"]
    assert [list(axis.get_legend_handles_labels()[1]) for axis in axes] == [
        ["c4"], ["vertices / structured", "gradient / vertices"], ["c4"],
    ]  # fmt: skip
    table = select(frames[0], horizon="4", seed="all", measure="structured_oracle").set_index("layer")
    (drawn,) = axes[2].containers
    assert drawn.lines[0].get_xydata().tolist() == [[1, table.loc["1", "value"]], [3, table.loc["3", "value"]]]
    for axis, points in zip(axes, (3, 1, 2), strict=True):
        for container in axis.containers:
            assert isinstance(container, ErrorbarContainer) and container.has_yerr
            bars = np.array(container.lines[2][0].get_segments())
            assert len(bars) == points and (bars[:, 1, 1] - bars[:, 0, 1] > 0).all()
    interval = np.array(drawn.lines[2][0].get_segments())[:, :, 1]
    np.testing.assert_allclose(interval, table.loc[["1", "3"], ["low", "high"]].to_numpy())


def test_the_published_page_shows_the_published_results():
    page = (STUDIES / "audit.md").read_text(encoding="utf-8")
    published = json.loads((STUDIES / "results" / "audit.json").read_text(encoding="utf-8"))
    assert page.count("<!-- table:") >= 8
    assert fill(page, tables(published)) == page
    assert {"date", "aarlib", "torch", "transformers"} < published["about"].keys()
    assert "![" in page and all((STUDIES / name).is_file() for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page))

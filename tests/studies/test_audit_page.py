import json
from pathlib import Path

import pytest

from aarlib.report.audit_figures import write_figures
from aarlib.studies.audit_page import fill, frame_of, results, tables, to_json
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
    pytest.importorskip("matplotlib")
    paths = write_figures(frame_of(found, "measures"), frame_of(found, "by_rank"), tmp_path / "figures")
    assert [path.name for path in paths] == ["audit_full.png", "audit_4.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_the_published_page_shows_the_published_results():
    page = (STUDIES / "audit.md").read_text(encoding="utf-8")
    published = json.loads((STUDIES / "results" / "audit.json").read_text(encoding="utf-8"))
    assert page.count("<!-- table:") >= 8
    assert fill(page, tables(published)) == page

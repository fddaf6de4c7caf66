"""README's tables are what the summaries of runs give."""

import json
from pathlib import Path

import pytest

from aarlib.report.readme import filled, named_blocks, read_summaries, rendered
from pipelines import report
from tests.report.run_folder import write_run, write_scores

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "studies" / "results"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run's summary and a page that shows it."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "hand")
    write_scores(folder)
    page = folder.parent / "README.md"
    page.write_text("# R\n<!-- run hand -->\nold\n<!-- end run -->\nafter\n")
    summary = folder.parent / "results" / "hand.json"
    assert report.main([str(folder), "--summary", str(summary), "--page", str(page)]) == 0
    return json.loads(summary.read_text()), page


def test_a_table_has_a_row_a_method_and_its_numbers_come_from_the_summary(written):
    summary, page = written
    text = page.read_text()
    assert "old" not in text and text.endswith("<!-- end run -->\nafter\n")
    lines = rendered(summary).splitlines()
    assert lines[0].startswith("| method | seeds | held-out CE |") and "quiz acc (n=80)" in lines[0]
    untouched, sft, aar = lines[2:5] if "SFT" in lines[3] else (lines[2], lines[4], lines[3])
    assert untouched.startswith("| untouched |  | 2.0000 |") and "0.250" in untouched
    assert sft.startswith("| routing-only SFT | 2 | 1.8500 +- 0.0707 | -0.1500 [")
    assert (
        aar.startswith("| AAR, M 6 | 2 | 1.6000 +- 0.1414 | -0.4000 [") and "0.688 +- 0.088" in aar and "| 300 |" in aar
    )
    assert lines[-1].startswith("40 held-out conversations; 5 steps; seeds 0, 1;")


def test_a_changed_number_is_noticed_and_a_run_without_summary_refused(written):
    summary, page = written
    text = page.read_text()
    assert filled(text, {"hand": summary}) == text
    changed = json.loads(json.dumps(summary))
    changed["held_out"][0]["ce"] += 0.1
    assert filled(text, {"hand": changed}) != text
    with pytest.raises(ValueError, match="the page shows run 'hand', of which there is no summary"):
        filled(text, {})


def test_the_readme_shows_the_stored_summaries():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("<!-- run ") == len(named_blocks(readme))
    assert filled(readme, read_summaries(RESULTS, named_blocks(readme))) == readme
    assert {name for name in ("demo", "gsm8k") if (RESULTS / f"{name}.json").is_file()} <= set(named_blocks(readme))

"""docs/studies/fdaa.md shows what docs/studies/results/fdaa.json holds."""

import json
from pathlib import Path

import pytest

from aarlib.studies.fdaa import merged
from aarlib.studies.fdaa_page import filled, paper, tables

DOCS = Path(__file__).parents[2] / "docs" / "studies"


def blocks() -> dict[str, str]:
    results = json.loads((DOCS / "results" / "fdaa.json").read_text(encoding="utf-8"))
    return {**tables(results), "paper": paper()}


def test_the_page_shows_the_results():
    page = (DOCS / "fdaa.md").read_text(encoding="utf-8")
    assert set(blocks()) == {"runs", "domains", "masks", "layers", "paper"}
    assert filled(page, blocks()) == page


def test_studies_are_joined_under_names_without_their_common_beginning():
    first = {"domains": [{"run": "nano_fdaa_web", "mean": 1.0}], "runs": [{"run": "nano_fdaa_web"}]}
    second = {"domains": [{"run": "nano_fdaa_words", "mean": 2.0}]}
    assert merged([first, second]) == {
        "domains": [{"run": "web", "mean": 1.0}, {"run": "words", "mean": 2.0}],
        "runs": [{"run": "web"}],
    }


def test_a_changed_number_is_noticed():
    page = (DOCS / "fdaa.md").read_text(encoding="utf-8")
    found = blocks()
    found["domains"] = found["domains"].replace("-0.", "-1.", 1)
    assert filled(page, found) != page
    with pytest.raises(ValueError, match="has no place for the table 'other'"):
        filled(page, {"other": "x"})

"""Three families through the real verbs; `make families` takes all eight and writes a page."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from tests import families  # noqa: E402
from tests.tiny import FAMILIES  # noqa: E402


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmoe", "qwen3_5_moe", "gpt_oss"])
def test_every_verb_on_a_saved_checkpoint(family: str, local_ray: Any, tmp_path: Path) -> None:
    assert families.run(family, tmp_path) == {verb.name: True for verb in families.VERBS}


def test_the_page_of_all_families_is_written_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(family: str, folder: Path) -> dict[str, bool]:
        return {verb.name: (family, verb.name) != ("gpt_oss", "audit") for verb in families.VERBS}

    monkeypatch.setattr(families, "run", run)
    monkeypatch.setattr(families, "PAGE", tmp_path / "families.md")
    assert families.main(["olmoe"]) == 0 and not families.PAGE.exists()
    assert families.main([]) == 1
    written = families.PAGE.read_text()
    assert "| family | train | evaluate | audit | decompose |" in written
    assert all(f"\n| {family} | yes | yes | " in written for family in FAMILIES)
    assert "| olmoe | yes | yes | yes | yes |" in written and "| gpt_oss | yes | yes | no | yes |" in written
    assert "transformers 5." in written and "deepspeed " in written

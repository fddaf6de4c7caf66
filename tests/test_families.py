"""Three families through the real verbs; `make families` takes all eight and writes README's table."""

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
    assert families.run(family, tmp_path) == dict.fromkeys(
        [families.IDENTITIES, *(verb.name for verb in families.VERBS)], True
    )


def test_the_table_of_all_families_is_written_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [families.IDENTITIES, *(verb.name for verb in families.VERBS)]

    def run(family: str, folder: Path) -> dict[str, bool]:
        return {name: (family, name) != ("gpt_oss", "audit") for name in names}

    before = families.README.read_text()
    page = tmp_path / "README.md"
    page.write_text(before)
    monkeypatch.setattr(families, "run", run)
    monkeypatch.setattr(families, "README", page)
    assert families.main(["olmoe"]) == 0 and page.read_text() == before
    assert families.main([]) == 1
    written = page.read_text()
    assert "| family | identities | train | evaluate | audit | decompose | note |" in written
    assert all(f"\n| {family} | yes | yes | yes | " in written for family in FAMILIES)
    assert (
        "| olmoe | yes | yes | yes | yes | yes |" in written and "| gpt_oss | yes | yes | yes | no | yes |" in written
    )
    assert "transformers 5." in written and "deepspeed " in written
    assert families.BLOCK.sub("", written) == families.BLOCK.sub("", before)

"""Three families through the real verbs; `make families` takes all eight."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]
pytest.importorskip("ray")


@pytest.mark.parametrize("family", ["olmoe", "qwen3_5_moe", "gpt_oss"])
def test_every_verb_on_a_saved_checkpoint(family: str, local_ray: Any, tmp_path: Path) -> None:
    from tests.families import VERBS, run

    assert run(family, tmp_path) == {verb.name: True for verb in VERBS}

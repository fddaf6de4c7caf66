"""docs/adding_a_family.md, run as it stands, for a family that is not in the table: nothing in the library is touched."""

import re
import textwrap
from pathlib import Path

import pytest

from aarlib import identities
from aarlib.aar.attach import attach_aar
from aarlib.aar.config import RouterSFTConfig
from aarlib.identities.doctor import IDENTITIES, examine
from aarlib.moe.anatomy import anatomy
from tests.tiny import tiny_inputs

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_family.md"


@pytest.fixture(scope="module")
def names():
    """What the page's Python blocks define, run one after another."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    defined = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), PAGE.name, "exec"), defined)
    return defined


def test_the_page_finds_the_layers_and_proves_the_row(names):
    assert names["parts"].moe_layers == names["parts"].aar_layers == (1, 2)
    assert len(names["findings"]) == len(IDENTITIES) and all(finding.passed for finding in names["findings"])
    assert names["rec"].windows[2].shape == (1, 37, 20)


def test_without_a_row_the_family_is_refused(names):
    with pytest.raises(ValueError, match="'glm4_moe' is not a supported MoE family"):
        anatomy(names["model"])


def test_a_wrong_row_fails_the_examination(names):
    wrong = names["Family"](model_types=("glm4_moe",), router="gatte")
    with pytest.raises(ValueError, match="no decoder layer of this glm4_moe model has a router at mlp.gatte"):
        anatomy(names["model"], wrong)
    wrong_dtype = names["Family"](model_types=("glm4_moe",), shared_expert="shared_experts")
    half = names["model"].bfloat16()
    failed = [finding.name for finding in examine(half, family=wrong_dtype) if not finding.passed]
    names["model"].float()
    assert failed == ["selection == the model's own gate"]


def test_aar_on_the_row(names):
    model, family = names["model"], names["glm4"]
    inputs = tiny_inputs(model, padding="left")
    handle = identities.default_attach(model, family=family)
    bite = identities.bite(model, handle, inputs)
    assert bite.picks_changed > 0.1 and bite.logits_moved > 1e-2
    assert identities.gradients_against_eager(model, handle, inputs) < 1e-5
    handle.detach()
    attach_aar(model, RouterSFTConfig(), family=family).detach()

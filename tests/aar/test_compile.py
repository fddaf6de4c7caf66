"""torch.compile of a patched model, inductor on CPU: the same logits; minutes where nothing is in its cache."""

import jaxtyping
import pytest
import torch

from aarlib import identities
from aarlib.moe import backends
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

SHORT = ("olmoe", "qwen3_moe", "mixtral")
OTHERS = [pytest.param(family, marks=pytest.mark.long) for family in FAMILIES if family not in SHORT]
"""Half a minute each."""


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SHORT, *OTHERS])
def test_a_compiled_patched_model_gives_the_same_logits(family: str) -> None:
    whole = family in ("qwen3_5_moe", "gpt_oss")  # their layers are of two kinds
    model = tiny_model(family, **({} if whole else {"num_hidden_layers": 2}))
    model.set_experts_implementation("grouped_mm")
    inputs = tiny_inputs(model, padding="left")
    jaxtyping.config.update("jaxtyping_disable", True)  # Dynamo cannot trace the tests' own annotation checks
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            stock = model(**inputs, use_cache=False).logits
            handle = identities.default_attach(model)
            expected = model(**inputs, use_cache=False).logits
            backends.calls.clear()
            compiled = torch.compile(model)
            found = [compiled(**inputs, use_cache=False).logits for _ in range(2)]
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
        torch._dynamo.reset()
    aware = sum(bool(router.views) for router in handle.routers.values())
    assert aware >= 1 and backends.calls["cpu_flash"] == 2 * aware, "the windows of these layers in two forwards"
    valid = inputs["attention_mask"].bool()
    assert (expected - stock)[valid].abs().max() > 1e-2
    assert all(identities.error(logits[valid], expected[valid]) < 1e-5 for logits in found)

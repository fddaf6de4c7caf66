"""torch.compile of a patched model, inductor on CPU: the same logits; minutes where nothing is in its cache."""

import jaxtyping
import pytest
import torch

from aarlib import identities
from aarlib.moe import backends
from tests.tiny import tiny_inputs, tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_a_compiled_patched_model_gives_the_same_logits(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=2)
    model.set_experts_implementation("grouped_mm")
    inputs = tiny_inputs(model, padding="left")
    jaxtyping.config.update("jaxtyping_disable", True)  # Dynamo cannot trace the tests' own annotation checks
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            stock = model(**inputs, use_cache=False).logits
            identities.default_attach(model)
            expected = model(**inputs, use_cache=False).logits
            backends.calls.clear()
            compiled = torch.compile(model)
            found = [compiled(**inputs, use_cache=False).logits for _ in range(2)]
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
        torch._dynamo.reset()
    assert backends.calls["cpu_flash"] == 4, "the windows of two layers in two forwards"
    valid = inputs["attention_mask"].bool()
    assert (expected - stock)[valid].abs().max() > 1e-2
    assert all(identities.error(logits[valid], expected[valid]) < 1e-5 for logits in found)

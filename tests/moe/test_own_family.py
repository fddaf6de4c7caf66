"""docs/adding_a_family.md, followed for a family that is not in the table: nothing in the library is touched."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aarlib import identities
from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family
from tests.tiny import COMMON, tiny_inputs

GLM4 = Family(model_types=("glm4_moe",), shared_expert="shared_experts", weights_dtype="float32")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "glm4_moe",
        **{**COMMON, "num_hidden_layers": 3, "head_dim": 8},
        intermediate_size=24,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
    )
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if "norm" not in name and tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.2)
    made.eval()
    made.requires_grad_(False)
    made.set_experts_implementation("eager")
    return made


def test_without_a_row_the_family_is_refused(model):
    with pytest.raises(ValueError, match="'glm4_moe' is not a supported MoE family"):
        anatomy(model)


def test_identities_of_the_row(model):
    inputs = tiny_inputs(model, padding="left")
    assert anatomy(model, GLM4).moe_layers == (1, 2)
    assert identities.selection_against_gate(model, inputs, GLM4) == 0.0
    assert identities.expert_sum_against_block(model, inputs, GLM4) < 1e-6
    assert identities.windows_against_eager(model, 10, inputs, GLM4) < 1e-5


def test_aar_on_the_row(model):
    inputs = tiny_inputs(model, padding="left")
    handle = identities.default_attach(model, family=GLM4)
    bite = identities.bite(model, handle, inputs)
    assert bite.picks_changed > 0.1 and bite.logits_moved > 1e-2
    assert identities.logits_against_eager(model, handle, inputs) < 1e-5
    assert identities.gradients_against_eager(model, handle, inputs) < 1e-5
    assert identities.prefill_against_decode(model, inputs, 3) < 1e-5
    handle.detach()

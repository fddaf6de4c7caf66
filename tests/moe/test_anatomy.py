import pytest
import torch

from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family
from aarlib.moe.loading import load_config, load_model
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_the_seam_of_the_installed_transformers(family):
    model = tiny_model(family)
    parts = anatomy(model)
    assert parts.moe_layers == (
        (1, 2, 3) if family in ("qwen2_moe", "deepseek_v2") else tuple(range(len(parts.layers)))
    )
    layer = parts.layers[parts.moe_layers[0]]
    hidden = torch.randn(5, parts.hidden_size)
    logits, weights, expert_ids = layer.router(hidden)
    assert logits.shape == (5, parts.num_experts)
    assert weights.shape == expert_ids.shape == (5, parts.top_k)
    assert layer.experts(hidden, expert_ids, weights).shape == (5, parts.hidden_size)
    sums = weights.float().sum(-1)
    assert torch.allclose(sums, torch.ones(5)) == parts.renormalises


@families
def test_router_logits_are_raw(family):
    parts = anatomy(tiny_model(family))
    logits, _, _ = parts.layers[parts.moe_layers[0]].router(torch.randn(5, parts.hidden_size))
    assert (logits < 0).any()


def test_an_unknown_family_lists_the_supported_ones():
    model = tiny_model("olmoe")
    model.config.model_type = "dense_llm"
    with pytest.raises(ValueError, match="'dense_llm' is not a supported MoE family; supported: olmoe, flex_olmo"):
        anatomy(model)


def test_a_row_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ValueError, match=r"no decoder layer of this olmoe model has a router at mlp.router"):
        anatomy(tiny_model("olmoe"), Family(model_types=("olmoe",), router="router"))
    with pytest.raises(ValueError, match="layer 0 lacks norm 'input_layernorm' or 'no_norm'"):
        anatomy(tiny_model("olmoe"), Family(model_types=("olmoe",), moe_norm="no_norm"))


@families
def test_a_saved_model_loads_frozen_with_equal_logits(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    loaded, tokenizer = load_model(str(tmp_path))
    inputs = tiny_inputs(model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-5)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert tokenizer.pad_token == "<pad>"


def test_missing_weights_are_fatal(tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny_model("olmoe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys: model.layers.1.self_attn.q_proj.weight"):
        load_model(str(tmp_path))


def test_quantised_checkpoints_and_dense_models_are_refused_before_weights_are_read(tmp_path):
    model = tiny_model("olmoe")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is quantised"):
        load_model(str(tmp_path))


def test_a_missing_geometry_is_named():
    with pytest.raises(ValueError, match=r"model.geometry = 'nowhere.json' does not exist"):
        load_config("any", geometry="nowhere.json")


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, 97)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )

import json

import pytest
import torch
from transformers import AutoConfig, Mxfp4Config

from aarlib.aar import AARConfig, attach_aar
from aarlib.fdaa import FDAAConfig, attach_fdaa
from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family
from aarlib.moe.loading import load_config, load_model
from aarlib.moe.record import record
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


@pytest.mark.parametrize("as_object", [False, True])
def test_quantised_models_are_refused_by_whatever_takes_a_model(as_object):
    """transformers keeps a dict before and an object after it has loaded the weights."""
    model = tiny_model("gpt_oss")
    model.config.quantization_config = Mxfp4Config() if as_object else {"quant_method": "mxfp4"}
    for use in (
        anatomy,
        lambda model: attach_aar(model, AARConfig(layers=(1,))),
        lambda model: attach_fdaa(model, FDAAConfig(layers=(1,))),
        lambda model: record(model, windows=4).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"is quantised \(mxfp4\): .* use a bfloat16 checkpoint"):
            use(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_code_in_a_model_folder_is_never_run(tmp_path, monkeypatch):
    """With auto_map and a module that raises on import, the native class is loaded."""
    model = tiny_model("olmoe")
    model.save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "OtherConfig", "AutoModelForCausalLM": "OtherForCausalLM"}
    config["auto_map"] = {key: f"modeling_other.{name}" for key, name in classes.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_other.py").write_text('raise RuntimeError("code of the model folder was run")\n')
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(RuntimeError, match="code of the model folder was run"):
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    loaded, _ = load_model(str(tmp_path))
    assert type(loaded) is type(model)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        assert torch.allclose(loaded(**inputs).logits, model(**inputs).logits, atol=1e-5)


@families
def test_train_mode_gives_the_logits_of_eval_mode(family):
    """No dropout in the families' default configs, so that a trainer which calls train() changes nothing; jitter would."""
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.train()
        assert torch.equal(model(**inputs).logits, expected)


def test_router_jitter_acts_in_train_mode_only():
    """Mixtral's config can ask for it: keep such a model in eval(), as load_model leaves it."""
    model = tiny_model("mixtral", router_jitter_noise=0.3)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(model(**inputs).logits, expected)
        model.train()
        assert (model(**inputs).logits - expected).abs().max() > 1e-2


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

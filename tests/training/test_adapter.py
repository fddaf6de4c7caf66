import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from aarlib import identities
from aarlib.aar.attach import attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.moe.anatomy import anatomy
from aarlib.training.adapter import METADATA, TENSORS, fingerprint, load_adapter, read_metadata, save_adapter
from tests.tiny import FAMILIES, tiny_inputs, tiny_model


@pytest.mark.parametrize("init", ["default", "closed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_round_trip_bitwise(family, init, tmp_path):
    model = tiny_model(family)
    layers = anatomy(model).aar_layers[-2:]
    handle = attach_aar(model, AARConfig(layers=layers, window=10, init=init))
    identities.randomise(handle)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
    save_adapter(handle, tmp_path / "adapter", metadata={"seed": 3})
    fresh = tiny_model(family)
    with torch.no_grad():
        stock = fresh(**inputs).logits
        loaded = load_adapter(fresh, tmp_path / "adapter")
        assert torch.equal(fresh(**inputs).logits, expected)
    assert not torch.equal(stock, expected)
    assert loaded.config == handle.config
    assert all(
        torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(handle.trainable(), loaded.trainable(), strict=True)
    )


def saved(tmp_path, config=None):
    handle = attach_aar(tiny_model("olmoe"), config or AARConfig(layers=(1, 2), window=4))
    return save_adapter(handle, tmp_path / "adapter", metadata={"base_revision": "abc"})


def test_metadata_names_base_layout_and_tensors(tmp_path):
    record = read_metadata(saved(tmp_path))
    assert record["family"] == "olmoe"
    assert record["num_experts"] == 8
    assert record["layout"] == "transformers-5"
    assert record["tensors"]["1.attention_time"] == [4, 8]
    assert record["metadata"] == {"base_revision": "abc"}
    assert "aarlib.load_adapter" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprint_ignores_dtype_and_sees_one_changed_element_of_any_tensor(family):
    model = tiny_model(family).to(torch.bfloat16)
    expected = fingerprint(model)
    assert fingerprint(model.float()) == expected
    for name, parameter in model.named_parameters():
        flat = parameter.detach().view(-1)
        index = 7919 % flat.numel()
        before = flat[index].item()
        flat[index] = before + 1
        assert fingerprint(model) != expected, name
        flat[index] = before
    assert fingerprint(model) == expected


def test_another_selection_rule_is_another_base(tmp_path):
    path = saved(tmp_path)
    for change in ({"norm_topk_prob": True}, {"num_experts_per_tok": 5}):
        with pytest.raises(ValueError, match="its base_fingerprint is"):
            load_adapter(tiny_model("olmoe", **change), path)


def test_another_base_is_refused(tmp_path):
    path = saved(tmp_path)
    other = tiny_model("olmoe")
    with torch.no_grad():
        other.model.norm.weight += 1
    with pytest.raises(ValueError, match="belongs to another base: its base_fingerprint is"):
        load_adapter(other, path)
    with pytest.raises(ValueError, match="belongs to another base: its family is 'olmoe', this model's is 'mixtral'"):
        load_adapter(tiny_model("mixtral"), path)


def test_a_damaged_adapter_is_refused(tmp_path):
    path = saved(tmp_path)
    blob = bytearray((path / TENSORS).read_bytes())
    blob[-1] ^= 1
    (path / TENSORS).write_bytes(blob)
    with pytest.raises(ValueError, match="is corrupt: its hash is not the one in adapter.json"):
        load_adapter(tiny_model("olmoe"), path)
    (path / METADATA).write_text('{"format": 1, ')
    with pytest.raises(ValueError, match=r"adapter.json is corrupt"):
        load_adapter(tiny_model("olmoe"), path)
    (path / METADATA).unlink()
    with pytest.raises(ValueError, match=r"is not an adapter: it has no adapter.json"):
        load_adapter(tiny_model("olmoe"), path)


def test_tensors_that_do_not_fit_the_config_are_refused_and_nothing_stays_attached(tmp_path):
    from aarlib.training.adapter import _sha256

    path = saved(tmp_path)
    tensors = load_file(path / TENSORS)
    tensors["1.attention_time"] = torch.zeros(5, 8)
    save_file(tensors, path / TENSORS)
    record = json.loads((path / METADATA).read_text())
    record["sha256"] = _sha256(path / TENSORS)
    (path / METADATA).write_text(json.dumps(record))
    model = tiny_model("olmoe")
    with pytest.raises(ValueError, match="does not fit its own config"):
        load_adapter(model, path)
    attach_aar(model, RouterSFTConfig())


def test_an_existing_adapter_is_never_overwritten_silently(tmp_path):
    path = saved(tmp_path)
    before = (path / TENSORS).read_bytes()
    with pytest.raises(ValueError, match="exists; choose another"):
        saved(tmp_path, RouterSFTConfig())
    assert (path / TENSORS).read_bytes() == before


def test_a_path_that_is_no_folder_is_named():
    with pytest.raises(ValueError, match="'/no/such/adapter' is neither a folder nor a hub id"):
        load_adapter(tiny_model("olmoe"), "/no/such/adapter")

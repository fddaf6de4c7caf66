"""Sharded checkpoints with an expert a tensor (transformers 4) and with fused experts (5) load to the same model; a key too many
or too few is fatal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aarlib import identities
from aarlib.moe.loading import load_model, load_tokenizer
from aarlib.moe.record import record
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

FUSED_ONLY = {"gpt_oss"}
"""Its experts were fused in transformers 4 already."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    folder = tmp_path_factory.mktemp("layouts")

    def save(family: str, layout: int) -> Path:
        path = folder / f"{family}-{layout}"
        if not path.is_dir():
            model = tiny_model(family)
            model.save_pretrained(path, save_original_format=layout == 4, max_shard_size="20KB")
            load_tokenizer("nano").save_pretrained(path)
        return path

    return save


def keys(path: Path) -> set[str]:
    return {key for file in path.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_load_to_the_same_logits(family: str, saved: Callable[[str, int], Path]) -> None:
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        for layout in (4, 5):
            path = saved(family, layout)
            assert len(list(path.glob("*.safetensors"))) > 5
            per_expert = any(".experts.0." in key for key in keys(path))
            assert per_expert == (layout == 4 and family not in FUSED_ONLY)
            loaded, _ = load_model(str(path), dtype="float32", experts_implementation="eager")
            assert torch.equal(loaded(**inputs).logits, expected), layout
    changed = model.model.layers[-1].mlp.experts.down_proj
    with torch.no_grad():
        changed.neg_()
        assert not torch.allclose(model(**inputs).logits, expected, atol=1e-2)


@pytest.mark.parametrize("layout", [4, 5])
@pytest.mark.parametrize("problem", ["missing", "unexpected"])
def test_a_key_too_few_or_too_many_is_fatal(layout: int, problem: str, saved: Any, tmp_path: Path) -> None:
    path = saved("olmoe", layout)
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = next(key for key in sorted(index["weight_map"]) if "layers.1" in key and "down_proj" in key)
    shard = tmp_path / index["weight_map"][name]
    tensors = load_file(shard)
    if problem == "missing":
        del tensors[name], index["weight_map"][name]
    else:
        extra = name.replace("layers.1", "layers.7")
        tensors[extra] = tensors[name].clone()
        index["weight_map"][extra] = shard.name
    save_file(tensors, shard, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, RuntimeError), match="did not load whole|raising an error. For details"):
        load_model(str(tmp_path), dtype="float32")


def test_a_device_map_places_the_model_and_changes_nothing(saved: Callable[[str, int], Path]) -> None:
    inputs = tiny_inputs(tiny_model("olmoe"))
    path = str(saved("olmoe", 5))
    with torch.no_grad():
        plain, mapped = (
            load_model(path, dtype="float32", device_map=device_map)[0] for device_map in (None, {"": "cpu"})
        )
        assert torch.equal(plain(**inputs).logits, mapped(**inputs).logits)


def test_the_hooks_of_a_split_model_change_nothing_under_attached_routers(saved: Callable[[str, int], Path]) -> None:
    """accelerate replaces forwards, as attaching does; its blocks are on one device here."""
    from accelerate import dispatch_model

    inputs, path = tiny_inputs(tiny_model("olmoe")), str(saved("olmoe", 5))
    plain, split = (load_model(path, dtype="float32")[0] for _ in range(2))
    blocks = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(len(split.model.layers))), "model.norm"]
    rest = {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    split = dispatch_model(split, {**dict.fromkeys(blocks, "cpu"), **rest}, force_hooks=True)
    assert hasattr(split.model.layers[1], "_hf_hook")
    found = []
    for model in (plain, split):
        stock = model(**inputs).logits
        handle = identities.default_attach(model)
        with torch.no_grad(), record(model, windows=4, dispatch=True, expert_outputs=True) as rec:
            logits = model(**inputs).logits
        assert not torch.equal(logits, stock)
        handle.detach()
        assert torch.equal(model(**inputs).logits, stock)
        found.append((logits, rec.windows[1], rec.dispatch[1].weights, rec.expert_outputs[1]))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))

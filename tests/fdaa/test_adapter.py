import pytest
import torch

import aarlib
from aarlib import identities
from aarlib.fdaa.attach import attach_fdaa
from aarlib.fdaa.config import FDAAConfig, StaticCalibratorConfig
from tests.tiny import FAMILIES, tiny_inputs, tiny_model


def logits(model):
    with torch.no_grad():
        return model(**tiny_inputs(model), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_round_trip_bitwise(family, tmp_path):
    model = tiny_model(family)
    handle = identities.attach_random_head(model)
    expected = logits(model)
    aarlib.save_adapter(handle, tmp_path / "head", metadata={"seed": 3})
    fresh = tiny_model(family)
    assert not torch.equal(logits(fresh), expected)
    loaded = aarlib.load_adapter(fresh, tmp_path / "head", method="fdaa")
    assert torch.equal(logits(fresh), expected)
    assert loaded.config == handle.config


def test_the_static_calibrator_is_an_adapter_too(tmp_path):
    model = tiny_model("olmoe")
    handle = attach_fdaa(model, StaticCalibratorConfig(layers=(0, 2)))
    identities.randomise_head(handle)
    aarlib.save_adapter(handle, tmp_path / "table")
    expected, fresh = logits(model), tiny_model("olmoe")
    aarlib.load_adapter(fresh, tmp_path / "table")
    assert torch.equal(logits(fresh), expected)


def test_another_base_method_or_router_is_refused(tmp_path):
    model = tiny_model("olmoe")
    aarlib.save_adapter(attach_fdaa(model, FDAAConfig(layers=(1,))), tmp_path / "head")
    with pytest.raises(ValueError, match="is of method 'fdaa', not 'static_calibrator'"):
        aarlib.load_adapter(tiny_model("olmoe"), tmp_path / "head", method="static_calibrator")
    with pytest.raises(ValueError, match="belongs to another base: its family is 'olmoe'"):
        aarlib.load_adapter(tiny_model("mixtral"), tmp_path / "head")
    routed = tiny_model("olmoe")
    identities.default_attach(routed)
    with pytest.raises(ValueError, match="was trained over the stock routers, and trained ones are attached"):
        aarlib.load_adapter(routed, tmp_path / "head")
    aarlib.save_adapter(attach_fdaa(routed, FDAAConfig(layers=(1,))), tmp_path / "over_aar")
    with pytest.raises(ValueError, match="was trained over other trained routers than are attached"):
        aarlib.load_adapter(tiny_model("olmoe"), tmp_path / "over_aar")
    again = tiny_model("olmoe")
    identities.default_attach(again)
    aarlib.load_adapter(again, tmp_path / "over_aar")

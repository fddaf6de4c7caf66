"""The typed configuration: files, overrides, and the message of every refusal."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from aarlib.config import apply_overrides, read_json_object, write_text_atomically
from aarlib.training.config import RunConfig

MINIMAL = """
name = "run"
seeds = [0, 1]
[data]
train = ["nano:chat"]
sequence_length = 64
[method.sft]
name = "router_sft"
[method.aar]
name = "aar"
layers = [3, 1]
window = 8
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        RunConfig.from_toml(path, overrides)
    assert not isinstance(error.value, ValidationError)
    return str(error.value)


def test_a_file_becomes_runs_seed_by_seed(toml: Path):
    config = RunConfig.from_toml(toml)
    assert [run.name for run in config.runs()] == ["sft-seed0", "aar-seed0", "sft-seed1", "aar-seed1"]
    assert getattr(config.method["aar"], "layers", None) == (1, 3)


def test_overrides_are_toml_values_or_bare_words(toml: Path):
    overrides = ("--optim.learning-rate=1e-3", "seeds=[7]", "--model.name=some/model", "--method.aar.views=['time']")
    config = RunConfig.from_toml(toml, overrides)
    assert config.optim.learning_rate == 1e-3
    assert config.seeds == (7,)
    assert config.model.name == "some/model"
    assert getattr(config.method["aar"], "views", None) == ("time",)


def test_the_resolved_json_gives_the_same_config(toml: Path):
    config = RunConfig.from_toml(toml)
    assert RunConfig.model_validate_json(config.to_json()) == config


def test_updated_returns_a_validated_copy(toml: Path):
    config = RunConfig.from_toml(toml)
    assert config.updated({"method.aar.window": 4}).method["aar"] != config.method["aar"]
    with pytest.raises(ValueError, match=r"method\.aar\.window = 1: Input should be greater than or equal to 2"):
        config.updated({"method.aar.window": 1})


def test_a_config_is_frozen(toml: Path):
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig.from_toml(toml).name = "other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--optim.learnin_rate=1", "unknown key 'optim.learnin_rate'; did you mean 'learning_rate'?"),
        ("--optimizer.x=1", "unknown key 'optimizer'; did you mean 'optim'?"),
        ("--method.aar.windw=8", "unknown key 'method.aar.windw'; did you mean 'window'?"),
        ("--method.sft.windw=8", "unknown key 'method.sft.windw'; known keys: name, routers"),
        ("--method.aar.window=1", "method.aar.window = 1: Input should be greater than or equal to 2"),
        (
            "--method.aar.window=65",
            "method.aar.window = 65 is longer than data.sequence_length = 64",
        ),
        (
            "--method.aar.layers=[]",
            "no layers given; name at least one MoE layer with attention weights, or use router_sft",
        ),
        ("--method.aar.layers=[1,1]", "layers must be distinct and not negative"),
        ("--method.aar.views=[]", "name 'time', 'spectrum' or both, each once"),
        ("--method.aar.name=ar", "'router_sft', 'aar'"),
        ("--method={}", "no method given; add a table such as [method.aar]"),
        ("--method.untouched={name='router_sft'}", "and not 'untouched'"),
        (
            "--optim.global_batch=1",
            "optim.global_batch = 1 is less than ray.num_workers = 2; every worker needs a row",
        ),
        ("--seeds=[]", "seeds = []: Tuple should have at least 1 item"),
        ("--seeds=[1, 1]", "seeds = [1, 1]: every seed is one training; give each once"),
        ("--seeds=[-1]", "seeds.0 = -1: Input should be greater than or equal to 0"),
        ("--seeds=3", "seeds = 3: give a list, quoted for the shell"),
        ("--name=../escape", "name = '../escape': the run directory is <ray.storage>/<name>"),
        ("--name=/abs", "name = '/abs': the run directory is <ray.storage>/<name>"),
        ("--optim.learning_rate=inf", "optim.learning_rate = inf: Input should be a finite number"),
        ("--optim.betas=[2, 3]", "optim.betas.0 = 2: Input should be less than 1"),
        ("--data.sample=0", "data.sample = 0: Input should be greater than 0"),
        ("--name", "override '--name' is not of the form --table.field=value"),
        ("--name.x=1", "override 'name.x': 'name' is not a table"),
    ],
)
def test_a_bad_value_names_field_value_and_remedy(toml: Path, override: str, message: str):
    assert message in refusal(toml, override)


def test_every_bad_field_is_named_at_once(toml: Path):
    message = refusal(toml, "--data.sample=2", "--optim.epochs=0")
    assert message.startswith(f"{toml}: ")
    assert "data.sample = 2" in message and "optim.epochs = 0" in message


def test_a_missing_or_malformed_file_is_named(tmp_path: Path):
    assert "does not exist; pass the path of a TOML file" in refusal(tmp_path / "no.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    assert f"{broken}: not valid TOML" in refusal(broken)
    assert "is a folder; pass the path of a TOML file" in refusal(tmp_path)
    broken.write_bytes(b"name = '\xff'")
    assert f"{broken}: not valid TOML" in refusal(broken)


def test_a_problem_of_the_whole_table_does_not_repeat_the_table(toml: Path):
    message = refusal(toml, "--data.sequence_length=7")
    assert "is longer than data.sequence_length = 7" in message and len(message) < 300


def test_a_damaged_json_file_is_named(tmp_path: Path):
    path = tmp_path / "config.json"
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"config.json is damaged: .*; restore it, or move its folder away"):
            read_json_object(path)


def test_overrides_leave_the_given_values_alone():
    values: dict[str, Any] = {"a": {"b": 1}}
    assert apply_overrides(values, ["a.b=2"]) == {"a": {"b": 2}}
    assert values == {"a": {"b": 1}}


def test_an_atomic_write_makes_folders_and_leaves_no_temporary(tmp_path: Path):
    path = tmp_path / "deep" / "config.json"
    write_text_atomically(path, "one")
    write_text_atomically(path, "two")
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]

"""The wheel alone, away from the source tree, gives a working library with its model and its configs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("aarlib", "pipelines", "tune_spaces")

USE_IT = """
import sys
from pathlib import Path
site = Path(sys.argv[1])
sys.path.insert(0, str(site))
import aarlib, pipelines, pipelines.command_line
for module in (aarlib, pipelines):
    assert Path(module.__file__).is_relative_to(site), module.__file__
assert (site / "aarlib" / "py.typed").is_file()
configs = site / "pipelines" / "configs"
assert (configs / "olmoe_tulu3.toml").is_file() and (configs / "geometry" / "olmoe_1b_7b.json").is_file()
model, tokenizer = aarlib.load_model("nano")
import torch
ids = tokenizer("hello", return_tensors="pt")["input_ids"]
assert torch.isfinite(model(input_ids=ids).logits).all()
print("nano", aarlib.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree and installed without dependencies into an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    [wheel] = folder.glob("aarlib-*.whl")
    run(*pip, "install", "--no-deps", "--target", folder / "site", wheel, cwd=folder)
    shutil.rmtree(source)
    return folder / "site"


@pytest.mark.slow
def test_the_installed_wheel_loads_nano_from_another_folder(installed: Path, tmp_path: Path):
    assert run(sys.executable, "-I", "-c", USE_IT, installed, cwd=tmp_path).startswith("nano ")


@pytest.mark.slow
def test_the_installed_wheel_holds_every_data_file_of_the_tree(installed: Path):
    for package in PACKAGES:
        files = [file for file in (ROOT / package).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        missing = [file for file in files if not (installed / file.relative_to(ROOT)).is_file()]
        assert not missing

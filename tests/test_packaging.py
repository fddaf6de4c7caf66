"""The wheel alone, away from the source tree, gives a working library with its model and its configs."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("aarlib", "pipelines", "tune_spaces")

USE_IT = """
import importlib.util, sys, sysconfig
from pathlib import Path
site = Path(sysconfig.get_path("purelib"))
for name in ("aarlib", "pipelines", "pipelines.command_line", "tune_spaces.aar_window"):
    origin = importlib.util.find_spec(name).origin
    assert Path(origin).is_relative_to(site), origin
import aarlib
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
    """The wheel, built from a copy of the tree, in a fresh environment that sees the dependencies and no source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    [wheel] = folder.glob("aarlib-*.whl")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')", cwd=folder))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    shutil.rmtree(source)
    return site


@pytest.mark.slow
def test_the_installed_wheel_loads_nano_from_another_folder(installed: Path, tmp_path: Path):
    python = installed.parents[2] / "bin" / "python"
    assert run(python, "-I", "-c", USE_IT, cwd=tmp_path).startswith("nano ")


@pytest.mark.slow
def test_the_installed_wheel_holds_every_data_file_of_the_tree(installed: Path):
    for package in PACKAGES:
        files = [file for file in (ROOT / package).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        missing = [file for file in files if not (installed / file.relative_to(ROOT)).is_file()]
        assert not missing

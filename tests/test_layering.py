"""Imports point one way, heavy ones stay where they belong, and the core runs without Ray and its companions."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
RUNTIME_ONLY = {"ray", "deepspeed", "mlflow", "lm_eval", "datasets"}

BASE = {"config", "lazy", "stats", "version"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "lazy": set(),
    "version": set(),
    "stats": {"config"},
    "moe": BASE,
    "data": BASE,
    "aar": BASE | {"moe"},
    "audit": BASE | {"moe", "aar"},
    "lens": BASE | {"moe", "aar"},
    "fdaa": BASE | {"moe", "aar", "audit"},
}
LIBRARY = set(ALLOWED)
ALLOWED["training"] = LIBRARY
UPPER = {"nano", "studies", "report", "bench", "identities"}
ALLOWED |= {name: LIBRARY | {"training"} for name in UPPER}
ALLOWED["runtime"] = LIBRARY | {"training"} | UPPER
"""What each part of aarlib may import, beside itself; pipelines and tune_spaces may import everything."""


class Import(NamedTuple):
    file: Path
    line: int
    module: str


def imports_of(file: Path) -> Iterator[Import]:
    """Every absolute module that `file` imports, anywhere in it; `from a import b` counts as a.b too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield from (Import(file, node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part_of(file: Path) -> str:
    return file.relative_to(ROOT / "aarlib").parts[0].removesuffix(".py")


def wrong_ways(files: list[Path]) -> list[str]:
    """Imports between parts of aarlib that ALLOWED does not list."""
    found = []
    for file in files:
        part = part_of(file)
        for item in imports_of(file):
            package, *rest = item.module.split(".")
            if package in ("pipelines", "tune_spaces", "tests", "examples"):
                found.append(f"{file.relative_to(ROOT)}:{item.line}: {item.module}")
            if package == "aarlib" and rest and rest[0] != part and rest[0] not in ALLOWED[part]:
                found.append(f"{file.relative_to(ROOT)}:{item.line}: {item.module}")
    return found


def library_files() -> list[Path]:
    return sorted(file for file in (ROOT / "aarlib").rglob("*.py") if part_of(file) != "__init__")


def test_every_part_of_the_library_has_its_place():
    assert {part_of(file) for file in library_files()} <= set(ALLOWED)


def test_imports_point_one_way():
    assert not wrong_ways(library_files())


def test_the_walk_sees_an_import_that_points_the_wrong_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "aarlib" / "moe" / "bad.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from aarlib import training\n    import pipelines.train\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert wrong_ways([file]) == [
        "aarlib/moe/bad.py:2: aarlib.training",
        "aarlib/moe/bad.py:3: pipelines.train",
    ]


def test_only_runtime_imports_ray_and_its_companions():
    """Search spaces are written in ray.tune's own vocabulary: tune_spaces may import that, and nothing else of Ray."""
    folders = [ROOT / name for name in ("aarlib", "pipelines", "tune_spaces", "examples")]
    runtime = ROOT / "aarlib" / "runtime"
    files = [file for folder in folders for file in folder.rglob("*.py") if runtime not in file.parents]
    heavy = [item for file in files for item in imports_of(file) if item.module.split(".")[0] in RUNTIME_ONLY]
    spaces = ROOT / "tune_spaces"
    heavy = [item for item in heavy if not (spaces in item.file.parents and item.module in ("ray", "ray.tune"))]
    assert len(files) > 10
    assert not [f"{item.file.relative_to(ROOT)}:{item.line}: {item.module}" for item in heavy]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_and_its_configs_loads_no_torch():
    configs = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in ROOT.glob("aarlib/**/config.py")]
    assert "aarlib.training.config" in configs
    names = ", ".join(["aarlib", "pipelines.command_line", *configs])
    heavy = {"torch", "transformers", "pandas", *RUNTIME_ONLY}
    assert run_python(f"import sys, {names}; print(sorted({heavy!r} & set(sys.modules)))") == "[]\n"


ABSENT = f"import importlib, sys; sys.modules.update(dict.fromkeys({RUNTIME_ONLY!r}))\n"
"""A module that is None in sys.modules cannot be imported or found."""


def test_the_core_imports_without_ray_and_its_companions():
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in library_files()
        if part_of(file) != "runtime"
    ]
    for name in ("aarlib.config", "aarlib.moe", "aarlib.training.config"):
        assert name in modules
    code = ABSENT + f"for name in {modules!r}: importlib.import_module(name)\n"
    code += "try:\n    import ray\nexcept ModuleNotFoundError:\n    print('blocked')\n"
    assert run_python(code) == "blocked\n"


LAZY_NAMES = """
import importlib, os, pkgutil, types, torch, transformers.masking_utils, transformers.modeling_utils
for package in ("aarlib", "aarlib.aar", "aarlib.audit", "aarlib.lens", "aarlib.moe", "aarlib.training"):
    if (child := os.fork()) == 0:
        package = importlib.import_module(package)
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        names = dir(package)
        wrong = [name for name in names if (name in modules) != isinstance(getattr(package, name), types.ModuleType)]
        print(package.__name__, len(names), wrong, flush=True)
        os._exit(bool(wrong) or not names)
    assert os.waitpid(child, 0)[1] == 0, package
"""
"""Of each package in a process that has imported nothing else of ours."""


def test_lazy_names_exist_and_no_module_hides_one():
    assert run_python(LAZY_NAMES).count("[]") == 6


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import aarlib

    with pytest.raises(AttributeError, match="module 'aarlib' has no attribute 'attach_arr'"):
        aarlib.attach_arr  # noqa: B018

"""Run directories have a copy elsewhere: in an object store (a local S3 server) and, the same code, in a folder."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from aarlib.runtime import mirror  # noqa: E402
from aarlib.runtime.mirror import STAMP, Mirror, kept_up, restore  # noqa: E402
from aarlib.runtime.run_directory import claim, held, run_directory  # noqa: E402
from aarlib.training.config import RunConfig  # noqa: E402
from tests.object_store import object_store  # noqa: E402


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_store("kept") as store:
        yield f"s3://kept/runs?{store.options}"


@pytest.fixture(params=["object store", "folder"])
def uri(request: pytest.FixtureRequest, bucket: str, tmp_path: Path) -> str:
    if request.param == "folder":
        return (tmp_path / "copy").as_uri()
    return bucket.replace("/runs?", f"/{tmp_path.name}?")


def config(storage: Path, uri: str) -> RunConfig:
    settings = {"storage": str(storage), "mirror": uri}
    method = {"sft": {"name": "router_sft"}}
    return RunConfig.from_mapping({"name": "one", "data": {"train": ["nano:sft:8"]}, "method": method, "ray": settings})


def names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name[0] != "."
    )


def test_a_run_goes_on_elsewhere_from_the_copy(tmp_path: Path, uri: str) -> None:
    first, second = config(tmp_path / "first", uri), config(tmp_path / "second", uri)
    with held(first) as folder:
        claim(first)
        (folder / "a" / "checkpoint-5").mkdir(parents=True)
        (folder / "a" / "checkpoint-5" / "state").write_bytes(b"5")
        (folder / "ray_train").mkdir()
        (folder / "ray_train" / "big").write_bytes(b"not copied")
    with held(second) as folder:
        assert names(folder) == ["a/checkpoint-5/state", "config.json"]
        (folder / "a" / "checkpoint-5" / "state").unlink()
        (folder / "a" / "result.json").write_text("{}")
    third = tmp_path / "third" / "one"
    restore(uri, third)
    assert names(third) == ["a/result.json", "config.json"]
    restore(uri, third)


def test_neither_side_overwrites_what_it_has_not_seen(tmp_path: Path, uri: str) -> None:
    first, second = config(tmp_path / "first", uri), config(tmp_path / "second", uri)
    for settings in (first, second):
        with held(settings):
            claim(settings)
    with pytest.raises(ValueError, match="was last written by .*, from another folder than"), held(first):
        pass
    other = second.updated({"seeds": [5]})
    with held(second):
        pass
    with pytest.raises(ValueError, match="exists with another config"), held(other):
        pass


def test_a_copy_in_use_elsewhere_is_refused(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path / "first", uri)
    with held(settings) as folder:
        claim(settings)
        monkeypatch.setattr(mirror, "_me", lambda: "process 1 on other")
        with pytest.raises(ValueError, match="is in use by process"):
            Mirror(uri, folder).open()


def test_it_is_pushed_while_held_and_a_refused_push_is_made_up(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "PUSH_EVERY_S", 0.05)
    failures = iter([OSError("no connection")])
    push = Mirror.push

    def sometimes(self: Mirror, last: bool = False) -> int:
        if (folder / "late").exists() and (error := next(failures, None)):
            raise error
        return push(self, last)

    monkeypatch.setattr(Mirror, "push", sometimes)
    folder = tmp_path / "one"
    folder.mkdir()
    with kept_up(uri, folder):
        (folder / "late").write_text("1")
        other = tmp_path / "elsewhere" / "one"
        deadline = time.monotonic() + 20
        while not (other / "late").is_file() and time.monotonic() < deadline:
            Mirror(uri, other).pull()
        assert (other / "late").read_text() == "1"
    assert "no connection" in caplog.text
    assert json.loads((folder / STAMP).read_text())["session"]


def test_a_bad_uri_names_the_field(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="ray.mirror = 'nowhere://x' cannot be opened"),
        held(config(tmp_path, "nowhere://x")),
    ):
        pass
    assert run_directory(config(tmp_path, "nowhere://x")).is_dir()

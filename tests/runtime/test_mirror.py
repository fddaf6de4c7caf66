"""Runs whose storage is a URI: an object store (local S3 and GCS servers) and, the same code, a folder. Machines are folders of
working copies."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from aarlib.runtime import mirror  # noqa: E402
from aarlib.runtime.mirror import STAMP, WRITER, Mirror  # noqa: E402
from aarlib.runtime.run_directory import claim, held, run_directory, update  # noqa: E402
from aarlib.runtime.storage import SCRATCH, StoredFolder, located, storage_folder  # noqa: E402
from aarlib.runtime.writer import mark_start, writer  # noqa: E402
from aarlib.training.config import RunConfig  # noqa: E402
from tests.object_store import SCHEMES, ObjectStore, object_store  # noqa: E402

Machine = Callable[[str], None]


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, ObjectStore]]:
    with object_store("s3", "kept") as s3, object_store("gs", "kept") as gs:
        yield {"s3": s3, "gs": gs}


@pytest.fixture(params=[*SCHEMES, "file"])
def uri(request: pytest.FixtureRequest, stores: dict[str, ObjectStore], tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    return stores[request.param].uri(f"kept/{tmp_path.name}")


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Go to a machine by name: its working copies are its own."""
    monkeypatch.setattr(mirror, "POLL_S", 0.05)

    def go(name: str) -> None:
        monkeypatch.setenv(SCRATCH, str(tmp_path / name))
        monkeypatch.setattr(mirror.socket, "gethostname", lambda: name)

    go("first")
    return go


def config(uri: str, **changes: object) -> RunConfig:
    method = {"sft": {"name": "router_sft"}}
    base = {"name": "one", "data": {"train": ["nano:sft:8"]}, "method": method, "ray": {"storage": uri}}
    return RunConfig.from_mapping(base).updated(changes)


def names(folder: Path) -> list[str]:
    return sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and "/." not in f"/{(name := path.relative_to(folder).as_posix())}"
    )


def stored(uri: str) -> list[str]:
    return Mirror(uri, "one")._stored()


def test_a_run_goes_on_on_another_machine(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
        (folder / "a" / "checkpoint-5").mkdir(parents=True)
        (folder / "a" / "checkpoint-5" / "state").write_bytes(b"5")
        (folder / "a" / ".checkpoint-6.tmp").mkdir()
        (folder / "a" / ".checkpoint-6.tmp" / "state").write_bytes(b"half")
        for left_out in mirror.LEFT_OUT:
            (folder / left_out).mkdir()
            (folder / left_out / "big").write_bytes(b"not copied")
    assert stored(uri) == ["a/checkpoint-5/state", "config.json"]
    on("second")
    with held(config(uri)) as folder:
        assert "second" in str(folder) and names(folder) == ["a/checkpoint-5/state", "config.json"]
        (folder / "a" / "checkpoint-5" / "state").unlink()
        (folder / "a" / "result.json").write_text("{}")
    on("third")
    assert names(update(config(uri))) == ["a/result.json", "config.json"]
    on("first")
    left_out = [f"{name}/big" for name in mirror.LEFT_OUT]
    with held(config(uri)) as folder:
        assert names(folder) == sorted(["a/result.json", "config.json", *left_out])
    assert stored(uri) == ["a/result.json", "config.json"]


def test_another_config_is_refused_wherever_the_run_was_begun(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
    on("second")
    with pytest.raises(ValueError, match=r"exists with another config \(seeds"), held(config(uri, seeds=[5])):
        pass


def test_what_a_killed_driver_had_not_pushed_is_kept(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
    (folder / "late").write_text("1")
    with held(config(uri)) as folder:
        assert (folder / "late").is_file()
    assert "late" in stored(uri)
    one = Mirror(uri, "one")
    one._note("of a start that ended before it reached the store", one.store.read_json(STAMP)["session"])  # pyright: ignore
    (folder / "later").write_text("1")
    with held(config(uri)):
        pass
    assert "later" in stored(uri)


def test_a_store_that_was_emptied_is_not_filled_again_unasked(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
    one = Mirror(uri, "one")
    for path in one.store.files():
        one.store.delete(path)
    with pytest.raises(ValueError, match="is gone, its working copy .* is not; remove that too"), held(config(uri)):
        pass


def test_a_run_that_another_machine_writes_is_refused(uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PUSH_EVERY_S", 0.1)
    with held(config(uri)):
        claim(config(uri))
        on("second")
        with pytest.raises(ValueError, match="is in use by process .* on first; wait for it"), held(config(uri)):
            pass
        on("first")


def test_a_session_that_is_not_renewed_has_ended(uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Mirror(uri, "one")
    lost.folder.mkdir(parents=True)
    (lost.folder / "config.json").write_text(config(uri).to_json())
    lost.open()
    on("second")
    monkeypatch.setattr(mirror, "EXPIRES_S", 0.3)
    with held(config(uri)) as folder:
        assert names(folder) == ["config.json"]
    with pytest.raises(ValueError, match="was taken over by another process"):
        lost.push()


def test_a_killed_driver_is_not_waited_for_on_its_own_machine(uri: str, on: Machine) -> None:
    killed = Mirror(uri, "one")
    killed._me = {**killed._me, "pid": 2**22 + 1}
    killed.open()
    begun = time.monotonic()
    Mirror(uri, "one").open()
    assert time.monotonic() - begun < mirror.EXPIRES_S / 10


def test_a_worker_group_elsewhere_pushes_and_the_driver_collects(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
    with held(config(uri)) as folder:
        token = mark_start(folder)
        with writer(located(uri), "one", token) as same:
            assert same.folder == folder
        on("node")
        stale = storage_folder(uri) / "one" / "a"
        stale.mkdir(parents=True)
        (stale / "result.json").write_text("of a run that was removed")
        with writer(located(uri), "one", token) as place:
            assert place.folder == stale.parent and names(place.folder) == ["config.json"]
            (place.folder / "a" / "state").write_text("5")
            place.push()
            assert stored(uri) == ["a/state", "config.json"]
            (place.folder / "a" / "state").unlink()
            (place.folder / "a" / "result.json").write_text("{}")
        on("first")
        mirror.collect(uri, "one")
        assert names(folder) == ["a/result.json", "config.json"]
    assert stored(uri) == ["a/result.json", "config.json"]
    assert Mirror(uri, "one").store.read_json(WRITER) is None


def test_what_a_group_elsewhere_pushed_outlives_its_driver(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
        token = mark_start(folder)
    on("node")
    with pytest.raises(ValueError, match="was taken over"), writer(located(uri), "one", token) as orphan:
        (orphan.folder / "state").write_text("5")
        orphan.push()
        on("first")
        with held(config(uri)):
            assert (folder / "state").read_text() == "5"
        (orphan.folder / "state").write_text("6")
    assert (Mirror(uri, "one").pull(), (folder / "state").read_text()) == (2, "5")


def test_of_two_groups_the_later_one_writes(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
        first, second = Mirror(uri, "one"), Mirror(uri, "one")
        first.take()
        second.take()
        (folder / "state").write_text("5")
        with pytest.raises(ValueError, match="was taken over"):
            first.push()
        assert second.push() == 1


def test_a_node_that_sees_neither_the_folder_nor_a_uri_says_so(tmp_path: Path) -> None:
    token = mark_start(tmp_path / "one")
    with writer(str(tmp_path), "one", token) as place:
        assert place.folder == tmp_path / "one"
    with (
        pytest.raises(ValueError, match="ray.storage = .* does not see the driver's .*one; give a folder that all"),
        writer(str(tmp_path), "one", "of another folder with this path"),
    ):
        pass


def test_it_is_pushed_while_held_and_a_refused_push_is_made_up(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "PUSH_EVERY_S", 0.05)
    failures = iter([OSError("no connection")])
    push, late = Mirror.push, run_directory(config(uri)) / "late"

    def sometimes(self: Mirror, last: bool = False) -> int:
        if late.exists() and (error := next(failures, None)):
            raise error
        return push(self, last)

    monkeypatch.setattr(Mirror, "push", sometimes)
    with held(config(uri)) as folder:
        late.write_text("1")
        deadline = time.monotonic() + 20
        while "late" not in stored(uri) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "late" in stored(uri)
    assert "no connection" in caplog.text
    assert json.loads((folder / STAMP).read_text())["session"]


def test_a_bad_uri_names_the_field(on: Machine) -> None:
    with pytest.raises(ValueError, match="ray.storage = 'nowhere://x' cannot be opened"), held(config("nowhere://x")):
        pass


def test_a_store_that_refuses_is_named_before_anything_starts(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: StoredFolder, name: str) -> None:
        raise PermissionError("access denied\nby a long answer")

    monkeypatch.setattr(StoredFolder, "read_json", refuses)
    for start in (lambda: update(config(uri)), lambda: held(config(uri)).__enter__()):
        with pytest.raises(
            ValueError, match="/one cannot be reached: access denied; check URI, network and credentials$"
        ):
            start()


def test_working_copies_of_different_uris_never_meet(on: Machine) -> None:
    one, other = (run_directory(config(f"s3://{bucket}/runs?region=a")) for bucket in ("one", "other"))
    assert one != other and one.name == other.name == "one"
    assert run_directory(config("s3://one/runs/?region=b")) == one

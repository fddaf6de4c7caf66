"""Runs whose storage is a URI, from machine to machine: sessions, pushes, copies that are behind."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ray")

from aarlib.runtime import mirror  # noqa: E402
from aarlib.runtime.mirror import STAMP, Mirror  # noqa: E402
from aarlib.runtime.run_directory import claim, held, run_directory, update  # noqa: E402
from aarlib.runtime.storage import StoredFolder  # noqa: E402
from aarlib.runtime.working_copy import LEFT_OUT  # noqa: E402
from tests.runtime.stored import Machine, config, names, stored, stores_of_every_kind  # noqa: E402


@stores_of_every_kind
def test_a_run_goes_on_on_another_machine(kind: str, locate: Callable[[str], str], on: Machine) -> None:
    store = locate(kind)
    with held(config(store)) as folder:
        claim(config(store))
        (folder / "a" / "checkpoint-5").mkdir(parents=True)
        (folder / "a" / "checkpoint-5" / "state").write_bytes(b"5")
        (folder / "a" / ".checkpoint-6.tmp").mkdir()
        (folder / "a" / ".checkpoint-6.tmp" / "state").write_bytes(b"half")
        for left_out in LEFT_OUT:
            (folder / left_out).mkdir()
            (folder / left_out / "big").write_bytes(b"not copied")
    assert stored(store) == ["a/checkpoint-5/state", "config.json"]
    on("second")
    with held(config(store)) as folder:
        assert "second" in str(folder) and names(folder) == ["a/checkpoint-5/state", "config.json"]
        (folder / "a" / "checkpoint-5" / "state").unlink()
        (folder / "a" / "result.json").write_text("{}")
    on("third")
    assert names(update(config(store))) == ["a/result.json", "config.json"]
    on("first")
    left_out = [f"{name}/big" for name in LEFT_OUT]
    with held(config(store)) as folder:
        assert names(folder) == sorted(["a/result.json", "config.json", *left_out])
    assert stored(store) == ["a/result.json", "config.json"]


def test_another_config_is_refused_wherever_the_run_was_begun(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
    on("second")
    with pytest.raises(ValueError, match=r"exists with another config \(seeds"), held(config(uri, seeds=[5])):
        pass


@stores_of_every_kind
def test_what_a_killed_driver_had_not_pushed_is_kept(kind: str, locate: Callable[[str], str], on: Machine) -> None:
    store = locate(kind)
    with held(config(store)) as folder:
        claim(config(store))
    (folder / "late").write_text("1")
    with held(config(store)) as folder:
        assert (folder / "late").is_file()
    assert "late" in stored(store)
    one = Mirror(store, "one")
    one._note("of a start that ended before it reached the store", one.store.read_json(STAMP)["session"])  # pyright: ignore
    (folder / "later").write_text("1")
    with held(config(store)):
        pass
    assert "later" in stored(store)


def test_a_store_that_was_emptied_is_not_filled_again_unasked(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
    one = Mirror(uri, "one")
    for path in one.store.sizes():
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


def test_a_session_that_began_while_another_start_was_reading_is_kept(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(config(uri)):
        claim(config(uri))
    on("second")
    stock, other = Mirror.update, json.dumps({"session": "other", "who": "process 1 on third", "time": 0.0}).encode()

    def slowly(self: Mirror) -> str | None:
        before = stock(self)
        self.store.write(STAMP, other)
        return before

    monkeypatch.setattr(Mirror, "update", slowly)
    with pytest.raises(ValueError, match="is in use by process 1 on third"), held(config(uri)):
        pass
    assert Mirror(uri, "one").store.read_json(STAMP) == json.loads(other)


def test_a_session_is_renewed_while_a_push_takes_long_and_not_after_its_end(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PUSH_EVERY_S", 0.05)
    times: list[float] = []
    copy = Mirror.copy

    def slowly(self: Mirror, name: str) -> bool:
        for _ in range(2 if name == "config.json" else 0):
            times.append(self.store.read_json(STAMP)["time"])  # pyright: ignore
            time.sleep(0.3)
        return copy(self, name)

    monkeypatch.setattr(Mirror, "copy", slowly)
    with held(config(uri)):
        claim(config(uri))
    assert times[1] > times[0]
    time.sleep(0.2)
    assert Mirror(uri, "one").store.read_json(STAMP)["time"] == 0.0  # pyright: ignore


def test_a_look_at_a_run_that_goes_on_is_not_taken_for_its_end(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
    with held(config(uri)) as folder:
        on("second")
        update(config(uri))
        on("first")
        (folder / "result.json").write_text("{}")
    on("second")
    with held(config(uri)) as copy:
        assert (copy / "result.json").is_file()
    assert "result.json" in stored(uri)


def test_a_copy_that_is_behind_sets_aside_what_only_it_has(
    uri: str, on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
    (folder / "thesis").write_text("not pushed")
    (folder / "state").write_text("4")
    on("second")
    with held(config(uri)) as other:
        (other / "state").write_text("5")
    on("first")
    assert names(update(config(uri))) == ["config.json", "state"]
    (aside,) = folder.glob(".aside-*")
    assert ((aside / "thesis").read_text(), (aside / "state").read_text()) == ("not pushed", "4")
    assert (folder / "state").read_text() == "5" and "2 files are set aside in" in caplog.text


def test_a_pull_that_ends_in_the_middle_changes_nothing(uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
        (folder / "state").write_text("4")
    on("second")
    with held(config(uri)) as other:
        (other / "state").write_text("5")
        (other / "zeta").write_text("5")
    on("first")
    stock = StoredFolder.fetch

    def breaks(self: StoredFolder, name: str, target: Path) -> None:
        if name == "zeta":
            raise OSError("no connection")
        stock(self, name, target)

    with monkeypatch.context() as broken:
        broken.setattr(StoredFolder, "fetch", breaks)
        with pytest.raises(ValueError, match="cannot be reached: no connection"):
            update(config(uri))
    assert (folder / "state").read_text() == "4" and not [*folder.glob(".pull-*"), *folder.glob(".aside-*")]
    assert (update(config(uri)) / "state").read_text() == "5"


def test_a_file_that_another_machine_added_is_never_deleted(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
    Mirror(uri, "one").store.write("trials/0/result.json", b"{}")
    with held(config(uri)):
        assert (folder / "trials" / "0" / "result.json").is_file()
    assert "trials/0/result.json" in stored(uri)


def test_a_driver_whose_run_was_taken_over_is_interrupted(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PUSH_EVERY_S", 0.05)
    interrupted = False
    with pytest.raises(ValueError, match="was taken over by another process"), held(config(uri)):
        Mirror(uri, "one").store.write(
            STAMP, json.dumps({"session": "another", "who": "x", "time": time.time()}).encode()
        )
        try:
            time.sleep(20)
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted


def test_of_two_drivers_that_begin_at_once_one_is_refused(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_begins(seconds: float) -> None:
        Mirror(uri, "one").store.write(
            STAMP, json.dumps({"session": "other", "who": "process 1 on other", "time": 1.0}).encode()
        )

    monkeypatch.setattr(mirror.time, "sleep", other_begins)
    with pytest.raises(ValueError, match="is in use by process 1 on other"):
        Mirror(uri, "one").open()


@pytest.mark.parametrize("name", ["a b", "50%", "\u00fc", "a?b", "a#b"])
def test_names_are_names(uri: str, on: Machine, name: str) -> None:
    with held(config(uri, name=name)):
        claim(config(uri, name=name))
    on("second")
    assert (update(config(uri, name=name)) / "config.json").is_file()


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

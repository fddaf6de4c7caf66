"""Runs whose storage is a URI, from a driver to its worker groups and back."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ray")

from aarlib.runtime import handover  # noqa: E402
from aarlib.runtime.mirror import STAMP, Mirror  # noqa: E402
from aarlib.runtime.run_directory import claim, held, update  # noqa: E402
from aarlib.runtime.storage import StoredFolder, located, storage_folder  # noqa: E402
from aarlib.runtime.working_copy import START, WRITER  # noqa: E402
from aarlib.runtime.writer import writer  # noqa: E402
from tests.runtime.stored import Machine, config, names, stored, stores_of_every_kind  # noqa: E402


@stores_of_every_kind
def test_a_worker_group_anywhere_pushes_and_the_driver_collects(
    kind: str, locate: Callable[[str], str], on: Machine
) -> None:
    store = locate(kind)
    for node in ("first", "node"):
        with held(config(store)) as folder:
            claim(config(store))
            token = handover.hand_over(store, "one")
            with handover.collected(store, "one", token):
                on(node)
                with writer(located(store), "one", token) as place:
                    assert (place.folder == folder) is (node == "first")
                    assert (place.folder / "config.json").is_file() and not (place.folder / "a" / "left").exists()
                    (place.folder / "a").mkdir(exist_ok=True)
                    (place.folder / "a" / "state").write_text("5")
                    place.push()
                    assert "a/state" in stored(store)
                    (place.folder / "a" / "state").unlink()
                    (place.folder / "a" / "result.json").write_text(node)
                on("first")
            assert (folder / "a" / "result.json").read_text() == node
        assert stored(store) == names(folder) == ["a/result.json", "config.json"]
        assert not {WRITER, START} & {path.rpartition("/")[2] for path in Mirror(store, "one").store.sizes()}
        on("node")
        (left := storage_folder(store) / "one" / "a" / "left").parent.mkdir(parents=True, exist_ok=True)
        left.write_text("of a run that was removed")
        on("first")


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_what_a_group_wrote_is_collected_also_after_an_error_or_ctrl_c(
    uri: str, on: Machine, error: type[BaseException]
) -> None:
    with held(config(uri)) as folder:
        token = handover.hand_over(uri, "one")
        with pytest.raises(error), handover.collected(uri, "one", token):
            on("node")
            with writer(uri, "one", token) as place:
                assert place.folder != folder
                (place.folder / "checkpoint").write_text("5")
            on("first")
            raise error
        assert (folder / "checkpoint").read_text() == "5"


def test_a_driver_leaves_alone_what_it_handed_over(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
        (folder / "trials" / "0").mkdir(parents=True)
        (folder / "trials" / "0" / "rows").write_text("1")
    driver = Mirror(uri, "one")
    driver.open()
    handover.hand_over(uri, "one/trials/0")
    (folder / "trials" / "0" / "rows").write_text("12")
    (folder / "trials" / "0" / "new").write_text("1")
    (folder / "study").write_text("1")
    assert driver.push() == 1 and "trials/0/new" not in stored(uri)
    (folder / "trials" / "0" / "rows").unlink()
    assert driver.push() == 0 and "trials/0/rows" in stored(uri)


def test_what_a_group_pushed_outlives_its_driver(uri: str, on: Machine) -> None:
    """What it had not pushed stays on its node: the history may be ahead of the checkpoint, or behind it."""
    with held(config(uri)):
        claim(config(uri))
        token = handover.hand_over(uri, "one")
    on("node")
    orphan, place = Mirror(uri, "one"), storage_folder(uri) / "one"
    orphan.take(token)
    (place / "state").write_text("5")
    orphan.push()
    (place / "state").write_text("60")
    on("first")
    with held(config(uri)) as folder:
        assert (folder / "state").read_text() == "5" and not (folder / START).exists()
        with pytest.raises(ValueError, match="was taken over"):
            orphan.push()
        token = handover.hand_over(uri, "one")
        on("node")
        with writer(located(uri), "one", token) as again:
            assert (again.folder / "state").read_text() == "5"
        assert [path.read_text() for path in place.glob(".aside-*/state")] == ["60"]
        on("first")


def test_what_a_dead_group_wrote_on_the_drivers_machine_and_could_not_push_is_not_lost(uri: str, on: Machine) -> None:
    with held(config(uri)) as folder:
        claim(config(uri))
        token = handover.hand_over(uri, "one")
        group = Mirror(uri, "one")
        group.take(token)
        (folder / "state").write_text("5")
        group.push()
        (folder / "state").unlink()
        (folder / "result.json").write_text("{}")
        with pytest.raises(ValueError, match="was taken over"), writer(located(uri), "one", token) as again:
            assert names(again.folder) == ["config.json", "result.json"] == stored(uri)
            (folder / "late").write_text("1")
            Mirror(uri, "one").collect(token)
        assert names(folder) == ["config.json", "late", "result.json"] == stored(uri)
    assert not list(folder.glob(".aside-*"))


def test_of_two_groups_the_later_one_writes_and_one_of_another_start_none(uri: str, on: Machine) -> None:
    first, second = Mirror(uri, "one"), Mirror(uri, "one")
    with held(config(uri)) as folder:
        claim(config(uri))
        token = handover.hand_over(uri, "one")
        with pytest.raises(ValueError, match="was handed to another worker group"):
            first.take("another")
        first.take(token)
        second.take(token)
        (folder / "state").write_text("5")
        with pytest.raises(ValueError, match="was taken over"):
            first.push()
        assert second.push() == 1
        second.collect("of another start")
        assert second.push() == 0
        second.collect(token)
        with pytest.raises(ValueError, match="was taken over"):
            second.push()


def test_a_driver_that_lost_its_run_hands_nothing_over(uri: str, on: Machine) -> None:
    with pytest.raises(ValueError, match="was taken over by another process"), held(config(uri)) as folder:
        (folder / "trials" / "0").mkdir(parents=True)
        Mirror(uri, "one").store.write(STAMP, json.dumps({"session": "other", "who": "x", "time": 0.0}).encode())
        with pytest.raises(ValueError, match="was taken over by another process"):
            handover.hand_over(uri, "one/trials/0")
        assert Mirror(uri, "one").store.read_json(f"trials/0/{WRITER}") is None


def test_a_store_that_fails_after_a_training_hides_no_error_of_the_training(
    uri: str, on: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(self: StoredFolder) -> dict[str, int]:
        raise OSError("no connection")

    with held(config(uri)):
        token = handover.hand_over(uri, "one")
        with monkeypatch.context() as broken:
            broken.setattr(StoredFolder, "sizes", refuses)
            with pytest.raises(KeyError, match="bad input"), handover.collected(uri, "one", token):
                raise KeyError("bad input")
            assert "no connection; run the same command again" in caplog.text
            with pytest.raises(OSError, match="no connection"), handover.collected(uri, "one", token):
                pass


def test_a_process_that_writes_a_copy_is_not_disturbed_by_a_look(uri: str, on: Machine) -> None:
    with held(config(uri)):
        claim(config(uri))
        token = handover.hand_over(uri, "one")
        on("node")
        with writer(located(uri), "one", token) as place:
            (place.folder / "state").write_text("5")
            assert update(config(uri)) == place.folder and (place.folder / "state").is_file()
        on("first")


def test_a_node_that_sees_neither_the_folder_nor_a_uri_says_so(tmp_path: Path) -> None:
    token = handover.hand_over(str(tmp_path), "one")
    with writer(str(tmp_path), "one", token) as place:
        assert place.folder == tmp_path / "one"
    with (
        pytest.raises(ValueError, match="ray.storage = .* does not see the driver's .*one; give a folder that all"),
        writer(str(tmp_path), "one", "of another folder with this path"),
    ):
        pass

"""A checkpoint is there whole or not at all: torn files are passed over, a full disk leaves the earlier one."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from aarlib.runtime.checkpoints import FOLDER, TENSORS, TrainingState, checkpoints, latest_state, read_state, save_state


def state(step: int, size: int = 100) -> TrainingState:
    return TrainingState("aar-seed0", step, 10 * step, 0.5 * step, {"1.weight/param": torch.full((size,), float(step))})


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        save_state(tmp_path, state(step))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000006", "step-000000009"]
    found = latest_state(tmp_path)
    assert found is not None and found[:4] == state(9)[:4]
    assert torch.equal(found.tensors["1.weight/param"], state(9).tensors["1.weight/param"])
    assert latest_state(tmp_path / "nothing") is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "no progress", "half a progress", "another version's"])
def test_a_torn_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 6):
        newest = save_state(tmp_path, state(step))
    whole = (newest / TENSORS).read_bytes()
    progress = newest / "progress.json"
    if damage == "cut":
        (newest / TENSORS).write_bytes(whole[:-7])
    elif damage == "flipped":
        (newest / TENSORS).write_bytes(whole[:-7] + b"\x01" + whole[-6:])
    elif damage == "no progress":
        progress.unlink()
    elif damage == "half a progress":
        progress.write_text(progress.read_text()[:20])
    else:
        progress.write_text(json.dumps({**json.loads(progress.read_text()), "epoch": 1}))
    with pytest.raises(ValueError, match="step-000000006 is torn"):
        read_state(newest)
    found = latest_state(tmp_path)
    assert found is not None and found.step == 3
    assert "step-000000006 is torn" in caplog.text


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(tmp_path: Path) -> None:
    save_state(tmp_path, state(3))
    with _files_of_at_most(100_000), pytest.raises((OSError, SafetensorError)):
        save_state(tmp_path, state(6, size=100_000))
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step-000000003"]
    save_state(tmp_path, state(6, size=100_000))
    found = latest_state(tmp_path)
    assert found is not None and found.step == 6


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

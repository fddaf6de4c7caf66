import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from aarlib.aar import RouterSFTConfig, attach_aar
from aarlib.audit import gradient_utilities, oracle
from aarlib.audit.config import FIRST_POSITION
from aarlib.moe.loading import load_model, load_tokenizer
from aarlib.runtime.audit import RECORD_COLUMNS, Auditor, audit, check
from aarlib.runtime.audit_config import AuditRunConfig
from aarlib.runtime.audit_units import draw_units, draw_windows
from aarlib.runtime.documents import domain_documents
from aarlib.studies.audit_markdown import tables
from aarlib.studies.audit_page import results, to_json
from aarlib.studies.audit_samples import document_of
from aarlib.training.adapter import save_adapter
from tests.tiny import tiny_model


def config(tmp_path: Path, **audit_changes) -> AuditRunConfig:
    settings = {
        "layers": [1, 7],
        "seeds": [0, 1],
        "window": 40,
        "horizons": ["full", 8],
        "development": 2,
        "locked": 3,
        "isolation": "batched",
        "windows_per_unit": 3,
        "noise_samples": 1,
        "domains": {"almanac": {"source": "nano:almanac", "joined": True}},
        **audit_changes,
    }
    values = {"name": "t", "model": {"dtype": "float32"}, "audit": settings, "ray": {"storage": str(tmp_path)}}
    return AuditRunConfig.from_mapping(values)


def auditor(chosen: AuditRunConfig, adapter: str | None = None) -> Auditor:
    return Auditor(
        chosen.model.model_dump(mode="json"), adapter, chosen.audit.model_dump(mode="json", exclude={"domains"}), 0
    )


def test_windows_are_disjoint_alike_on_every_machine_and_positions_fit(tmp_path):
    chosen = config(tmp_path).audit
    drawn = draw_windows("almanac", chosen.domains["almanac"], chosen, load_tokenizer("nano"))
    assert drawn == draw_windows("almanac", chosen.domains["almanac"], chosen, load_tokenizer("nano"))
    assert len(drawn) == 2 * (2 + 3)
    assert len({row["window"] for row in drawn}) == len(drawn)
    sides = {
        split: {document_of(r["window"]) for r in drawn if r["split"] == split} for split in ("development", "locked")
    }
    assert not sides["development"] & sides["locked"]
    for row in drawn:
        assert len(row["tokens"]) == 40
        assert FIRST_POSITION <= row["position"] <= 40 - 1 - 8


def test_no_document_of_a_joined_window_and_no_text_is_on_both_sides(tmp_path):
    """The texts of the second file are those of the first, under other ids."""
    rows = "\n".join(json.dumps({"text": f"Page {number} ends here."}) for number in range(1000, 1160))
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    domain = {"source": str(tmp_path / "*.jsonl"), "joined": True}
    chosen = config(tmp_path, seeds=[0], development=6, locked=12, domains={"pages": domain}).audit
    tokenizer = load_tokenizer("nano")
    drawn = draw_windows("pages", chosen.domains["pages"], chosen, tokenizer)
    pages = {split: set[str]() for split in ("development", "locked")}
    for row in drawn:
        inside = re.findall(r"Page (\d{4}) ends", tokenizer.decode(row["tokens"]))
        assert len(inside) > 1, "a window holds several documents"
        pages[row["split"]] |= set(inside)
    assert len(pages["development"]) > 6 and len(pages["locked"]) > 12
    assert not pages["development"] & pages["locked"]


def test_text_without_enough_windows_is_refused(tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"A text of number {i}. " * 4}) for i in range(6)))
    chosen = config(tmp_path, domains={"short": {"source": str(path)}}).audit
    with pytest.raises(ValueError, match=r"audit.domains.short: 2 seeds of .* windows of 40 tokens"):
        draw_windows("short", chosen.domains["short"], chosen, load_tokenizer("nano"))
    with pytest.raises(ValueError, match="audit.domains.text: .* names no"):
        list(domain_documents(str(tmp_path / "nothing.jsonl"), "audit.domains.text"))


def test_a_unit_holds_what_oracle_and_gradient_utilities_give(tmp_path):
    chosen = config(tmp_path)
    unit = draw_units(chosen)[0]
    frame = auditor(chosen)(unit)
    assert list(frame.columns) == list(RECORD_COLUMNS)
    assert len(frame) == 3 * 2 * 2
    model, _ = load_model("nano", dtype="float32")
    row = frame[(frame["layer"] == 1) & (frame["horizon"] == "8")].iloc[1]
    ids = torch.tensor([unit["windows"][1]["tokens"]])
    expected = oracle(model, ids, [(0, int(row["position"]), 1)], horizon=8)
    np.testing.assert_allclose(row["ce"], expected["ce"].to_numpy(), atol=3e-6)
    utility = gradient_utilities(model, ids, [1], horizon=8, positions=[int(row["position"])])[1]
    np.testing.assert_allclose(row["gradient_utility"], utility[0, int(row["position"])], atol=1e-6)
    assert frame["noise"].notna().sum() == 1 * 2 * 2 and frame["noise"].max() < 1e-5
    assert frame[frame["horizon"] == "full"]["hidden"].map(len).eq(128).all()
    assert frame[frame["horizon"] == "8"]["hidden"].isna().all()


def test_the_adapter_of_another_base_is_refused(tmp_path):
    handle = attach_aar(tiny_model("olmoe"), RouterSFTConfig())
    save_adapter(handle, tmp_path / "adapter")
    with pytest.raises(ValueError, match="base"):
        auditor(config(tmp_path), str(tmp_path / "adapter"))


def test_bad_configs_are_refused(tmp_path):
    for changes, message in (
        ({"layers": []}, "audit.layers"),
        ({"horizons": [0]}, "audit.horizons"),
        ({"horizons": [32]}, "does not fit after position 8 of a window of 40"),
        ({"development": 0}, "audit.development"),
        ({"domains": {}}, "no domain given"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **changes)
    with pytest.raises(ValueError, match="layer 8 has no router"):
        check(config(tmp_path, layers=[8]))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_one_actor_or_four_and_a_killed_one_give_the_same_rows(tmp_path, local_ray, caplog):
    chosen = config(tmp_path, windows_per_unit=1, development=3, locked=5)
    one = audit(chosen.updated({"ray.num_actors": 1}), tmp_path / "one")
    parts = tmp_path / "four" / "units" / "parts"
    with ThreadPoolExecutor(1) as pool, caplog.at_level("INFO", logger="aarlib"):
        killer = pool.submit(_kill_busy_actor, parts)
        four = audit(chosen.updated({"ray.num_actors": 4}), tmp_path / "four")
        killed = killer.result()
    assert not psutil.pid_exists(killed.pid)
    (death,) = [message for message in caplog.messages if "actor died during" in message]
    assert "'almanac-seed" in death, "it was busy with a unit"
    pd.testing.assert_frame_equal(one, four, check_exact=True)
    before = _stored(parts)
    assert len(before) == 16 and 1 <= len(killed.stored) < 16 and killed.stored.items() <= before.items()
    again = audit(chosen.updated({"ray.num_actors": 4}), tmp_path / "four")
    pd.testing.assert_frame_equal(again, four, check_exact=True)
    assert _stored(parts) == before
    assert (tmp_path / "four" / "records.parquet").is_file()
    found = json.loads(to_json(results(four, None, {})))
    assert {"headroom_full", "router_8", "gradient_full", "layers_full", "seeds", "noise"} <= set(tables(found))


class Killed(NamedTuple):
    pid: int
    stored: dict[Path, int]
    """Parts, with their times, that were stored before."""


def _kill_busy_actor(parts: Path) -> Killed:
    """SIGKILL one of this session's auditing actors that is at work on a unit, once a part is stored."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        stored = _stored(parts)
        for actor in _busy_actors() if stored else []:
            os.kill(actor.pid, signal.SIGKILL)
            psutil.wait_procs([actor], timeout=30)
            return Killed(actor.pid, stored)
        time.sleep(0.02)
    raise TimeoutError("no actor was at work on a unit after a part was stored")


def _busy_actors() -> list[psutil.Process]:
    """Ray names a process after the method that it runs."""
    running = [p for p in psutil.process_iter(["cmdline"]) if "ray::_Actor.run" in " ".join(p.info["cmdline"] or [])]
    return [actor for actor in running if os.getpid() in _ancestors(actor)]


def _stored(parts: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in parts.glob("[!.]*.parquet")}


def _ancestors(process: psutil.Process) -> set[int]:
    try:
        return {parent.pid for parent in process.parents()}
    except psutil.NoSuchProcess:
        return set()

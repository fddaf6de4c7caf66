"""The doctor on the bundled model: a table; exit code 0 where all holds, 1 where an identity fails, 2 where nothing runs."""

import math
import re

import pytest

import aarlib
from aarlib.aar import AARConfig
from aarlib.identities import randomise
from aarlib.identities.doctor import IDENTITIES
from aarlib.moe import backends
from pipelines import doctor

ROW = re.compile(r"^ ?(\d+)/10  .* (\S+e[+-]\d+) +(\S+e[+-]\d+) .*(ok|FAILED) ", re.MULTILINE)


def test_all_identities_hold_on_a_folder_in_float32(tmp_path, capsys):
    model, tokenizer = aarlib.load_model("nano", dtype="float32")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    handle = aarlib.attach_aar(model, AARConfig(layers=(5, 6), window=12))
    randomise(handle)
    adapter = aarlib.save_adapter(handle, tmp_path / "adapter")
    assert doctor.main([str(tmp_path / "model"), "--adapter", str(adapter), "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    rows = ROW.findall(shown.out)
    assert [int(row[0]) for row in rows] == list(range(1, len(IDENTITIES) + 1))
    assert all(float(row[1]) <= float(row[2]) <= 1e-5 and row[3] == "ok" for row in rows)
    assert max(float(row[1]) for row in rows) > 0
    assert "all identities hold" in shown.out and "10/10 packed documents" in shown.err


def test_bfloat16_has_bounds_of_its_own(capsys):
    assert doctor.main(["nano", "--dtype", "bfloat16", "--layers", "6", "7", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    print(shown)
    rows = ROW.findall(shown)
    assert len(rows) == len(IDENTITIES) and "torch.bfloat16" in shown
    assert max(float(row[1]) for row in rows) > 1e-4


def test_a_wrong_kernel_fails_the_examination(monkeypatch, capsys):
    good = backends._named("cpu_flash")

    def off_by_ln2(*arguments):
        attended = good.attend(*arguments)
        return attended._replace(lse=attended.lse + math.log(2))

    monkeypatch.setattr(backends, "KERNELS", (good._replace(attend=off_by_ln2),))
    with backends.use_backend("cpu_flash"):
        assert doctor.main(["nano", "--dtype", "float32", "--device", "cpu", "--length", "24"]) == 1
    shown = capsys.readouterr().out
    failed = {int(row[0]) for row in ROW.findall(shown) if row[3] == "FAILED"}
    assert {5, 6, 7} <= failed and not failed & {1, 3, 4}
    assert "identities failed" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nano", "--layers", "99"], "layers = [99]: [99] have no router"),
        (["nano", "--adapter", "/nowhere", "--layers", "1"], "leave one of the two out"),
        (["nano", "--adapter", "/nowhere"], "'/nowhere' is neither a folder nor a hub id"),
        (["/nowhere/model"], "/nowhere/model"),
    ],
)
def test_what_cannot_be_examined_is_said_in_one_line(arguments, message, capsys):
    assert doctor.main([*arguments, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_reads_the_config_only(capsys):
    assert doctor.main(["nano", "--dry-run"]) == 0
    assert "attention-aware routers possible at [0, 1, 2, 3, 4, 5, 6, 7]" in capsys.readouterr().out

"""The doctor on the bundled model: a table; exit code 0 where all holds, 1 where an identity fails, 2 where nothing runs."""

import math
import re

import pytest
import torch

import aarlib
from aarlib import identities
from aarlib.aar import AARConfig
from aarlib.fdaa import FDAAConfig, attach
from aarlib.identities.checks import IDENTITIES, Patient
from aarlib.identities.doctor import examine, examined_length, line, random_inputs
from aarlib.lens import projection
from aarlib.lens.decomposition import Decomposition
from aarlib.moe import attention, backends
from aarlib.moe.windows_blockwise import causal_mask
from pipelines import doctor
from tests.tiny import tiny_model

COUNT = len(IDENTITIES)
ROW = re.compile(rf"^ ?(\d+)/{COUNT}  .* (\S+e[+-]\d+) +(\S+e[+-]\d+) .*(ok|FAILED) ", re.MULTILINE)


def test_all_identities_hold_on_a_folder_in_float32(tmp_path, capsys):
    model, tokenizer = aarlib.load_model("nano", dtype="float32")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    handle = aarlib.attach_aar(model, AARConfig(layers=(5, 6), window=12))
    identities.randomise(handle)
    adapter = aarlib.save_adapter(handle, tmp_path / "adapter")
    assert doctor.main([str(tmp_path / "model"), "--adapter", str(adapter), "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    rows = ROW.findall(shown.out)
    assert [int(row[0]) for row in rows] == list(range(1, COUNT + 1))
    assert all(float(row[1]) <= float(row[2]) <= 1e-4 and row[3] == "ok" for row in rows)
    assert max(float(row[1]) for row in rows) > 0
    assert "all identities hold" in shown.out and f"10/{COUNT} packed documents" in shown.err
    assert "actions at layer 4 move the loss" in shown.out and "picks agree" not in shown.out


def test_an_adapter_of_a_head_is_refused(tmp_path, capsys):
    model, _ = aarlib.load_model("nano")
    adapter = aarlib.save_adapter(aarlib.attach_fdaa(model, FDAAConfig(layers=(5,))), tmp_path / "adapter")
    assert doctor.main(["nano", "--adapter", str(adapter), "--device", "cpu"]) == 2
    assert "it holds an aggregation head" in capsys.readouterr().err


def test_bfloat16_has_bounds_of_its_own(capsys):
    assert doctor.main(["nano", "--dtype", "bfloat16", "--layers", "6", "7", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    rows = ROW.findall(shown)
    assert len(rows) == COUNT and "torch.bfloat16" in shown
    assert re.search(r"picks agree with those of float32 logits: (9\d\.\d|100\.0)%", shown)
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
    assert {5, 6, 7} <= failed and not failed & {1, 3, 4, 13, 14, 16}
    assert "identities failed" in shown


@pytest.mark.parametrize(
    ("family", "reach", "expected"),
    [("gpt_oss", 8, 48), ("gpt_oss", 60, 101), ("gpt_oss", 128, 192), ("mixtral", 4096, 48), ("mixtral", None, 48)],
)
def test_rows_get_past_a_sliding_range_where_it_is_short(family, reach, expected):
    model = tiny_model(family, sliding_window=reach)
    assert examined_length(model) == expected
    patient = Patient(model, identities.default_attach, random_inputs(model, expected, 0), 10, False, None)
    row = IDENTITIES[4].run(patient)
    assert row.error < 1e-5
    assert row.note == {4096: "NOT past the sliding range of 4096 tokens", None: ""}.get(
        reach, f"past the sliding range of {reach} tokens"
    )


def test_a_lost_sliding_range_is_found_in_rows_that_get_past_it(monkeypatch):
    stock = attention.attention_with_windows

    def without_range(query, key, value, *, mask, **rest):
        seen = (mask if mask.dtype == torch.bool else mask > -1).any(-2, keepdim=True)
        return stock(query, key, value, mask=seen & causal_mask(query.shape[2], key.shape[2], query.device), **rest)

    monkeypatch.setattr(attention, "attention_with_windows", without_range)
    model = tiny_model("gpt_oss", sliding_window=60)
    errors = []
    for length in (48, examined_length(model)):
        patient = Patient(model, identities.default_attach, random_inputs(model, length, 0), 10, False, None)
        errors.append(IDENTITIES[4].run(patient).error)
    assert errors[0] < 1e-5 and errors[1] > 1e-3


def test_one_expert_per_token_is_not_applicable_rather_than_a_failure():
    findings = list(examine(tiny_model("olmoe", num_experts_per_tok=1), window=10, length=24))
    assert all(finding.passed for finding in findings)
    assert [IDENTITIES[i].name for i, finding in enumerate(findings) if not finding.applies] == [
        "replayed actions == whole forwards",
        "gradient utilities == a backward per sample",
        "untrained aggregation head == no head",
        "aggregation head keeps picks and mass",
    ]
    assert "-- " in line(findings[10]) and "not applicable: one expert per token" in line(findings[10])


def one_percent_off(function):
    return lambda *args: 1.01 * function(*args)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_the_rows_of_audit_head_and_lens_hold_and_can_fail(family, monkeypatch):
    """On linear attention and on sinks; then each against an implementation with one thing wrong."""
    model = tiny_model(family)
    model.set_experts_implementation("grouped_mm")
    patient = Patient(model, identities.default_attach, random_inputs(model, 24, 0), 10, False, None)
    rows = IDENTITIES[10:]
    for row in rows:
        outcome = row.run(patient)
        assert outcome.applies and outcome.error <= row.bound.float32, row.name
    for owner, name in (
        (identities.audit, "action_weights"),
        (identities.audit, "_sample_utilities"),
        (attach, "aggregate"),
        (projection, "norm_scale"),
        (Decomposition, "_head_vector"),
    ):
        monkeypatch.setattr(owner, name, one_percent_off(getattr(owner, name)))
    for row in rows:
        assert row.run(patient).error > row.bound.float32, row.name


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

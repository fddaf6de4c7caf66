"""The tables against numbers worked out by hand, and what a run directory must hold."""

import pandas as pd
import pytest

from aarlib.report.compare import comparison_display, comparison_table
from aarlib.report.records import read_run
from aarlib.report.tables import (
    held_out_table,
    paired_difference,
    routing_by_layer,
    score_table,
    settings_table,
    sweep_table,
)
from aarlib.report.text import as_text, held_out_display, score_display
from tests.report.run_folder import held_out, write_run, write_scores, write_sweep


@pytest.fixture
def folder(tmp_path):
    folder = write_run(tmp_path / "hand")
    write_scores(folder)
    write_sweep(folder)
    return folder


def test_the_held_out_table_is_the_arithmetic_of_the_rows(folder):
    table = held_out_table(read_run(folder)).set_index(["label", "seed"])
    assert list(table.index) == [
        ("untouched", ""), ("router_sft", "mean"), ("router_sft", "0"), ("router_sft", "1"),
        ("aar", "mean"), ("aar", "0"), ("aar", "1"),
    ]  # fmt: skip
    assert table.loc[("untouched", ""), "ce"] == pytest.approx(2.0)
    assert table.loc[("aar", "0"), "ce"] == pytest.approx(1.7)
    assert table.loc[("aar", "0"), "vs_untouched"] == pytest.approx(-0.3)
    assert table.loc[("aar", "0"), "vs_sft"] == pytest.approx(-0.2)
    assert table.loc[("aar", "1"), "vs_sft"] == pytest.approx(-0.3)
    assert table.loc[("aar", "mean"), "vs_sft"] == pytest.approx(-0.25)
    assert table.loc[("aar", "mean"), "ce_std"] == pytest.approx(0.2 / 2**0.5)
    assert table.loc[("router_sft", "0"), "vs_sft"] != table.loc[("router_sft", "0"), "vs_sft"]
    assert table.loc[("aar", "0"), "step0_ce"] == pytest.approx(2.05)
    assert table.loc[("aar", "0"), "peak_gib"] == pytest.approx(2.25)
    assert table.loc[("aar", "mean"), "wall_s"] == pytest.approx(10.5)


def test_an_interval_encloses_its_mean_and_narrows_for_a_constant_difference(folder):
    table = held_out_table(read_run(folder))
    trained = table[table["label"] != "untouched"]
    assert (trained["vs_untouched_low"] < trained["vs_untouched"]).all()
    assert (trained["vs_untouched"] < trained["vs_untouched_high"]).all()
    frame = held_out(0.0).set_index("row_id")
    shifted = frame.assign(ce_sum=frame["ce_sum"] - 0.25 * frame["num_targets"])
    interval = paired_difference(shifted, frame).interval
    assert (interval.mean, interval.low, interval.high) == pytest.approx((-0.25, -0.25, -0.25))


def test_only_rows_of_both_are_paired_and_other_tokenisations_are_refused():
    ours = held_out(0.1).set_index("row_id")
    assert paired_difference(ours, held_out(0.0, range(20, 60)).set_index("row_id")).num_rows == 20
    with pytest.raises(ValueError, match="no conversation in common"):
        paired_difference(ours, held_out(0.0, range(100, 140)).set_index("row_id"))
    with pytest.raises(ValueError, match="same tokenizer"):
        paired_difference(ours, held_out(0.0, targets=11).set_index("row_id"))


def test_scores_show_the_main_metric_with_its_documents(folder):
    records = read_run(folder)
    scores = score_table(records).set_index(["label", "seed"])
    assert list(scores["metric"].unique()) == ["acc"] and list(scores["task"].unique()) == ["quiz"]
    assert scores.loc[("aar", "1"), "value"] == 0.75 and scores.loc[("untouched", ""), "num_documents"] == 80
    assert settings_table(records.scores).iloc[0]["batch size"] == 4


def test_the_terminal_tables_have_a_row_per_model_and_a_column_per_task(folder):
    records = read_run(folder)
    table = held_out_table(records)
    lines = as_text(held_out_display(table)).splitlines()
    assert len(lines) == 2 + 7 and max(map(len, lines)) <= 120
    assert "1.6000 +- 0.1414" in lines[6] and "-0.3000 [" in lines[7]
    lines = as_text(score_display(table, score_table(records))).splitlines()
    assert "quiz acc (n=80)" in lines[0]
    assert "0.688 +- 0.088" in lines[6] and "0.625" in lines[7]


def test_a_sweep_keeps_finished_trials_and_names_their_settings(folder):
    (sweep,) = read_run(folder).sweeps
    assert sweep.study == "windows"
    assert list(sweep_table(sweep)["setting"]) == ["window 8, layers 1-3", "window 16, layers 0 2"]


def test_routing_comes_from_the_last_logged_step(folder):
    routing = routing_by_layer(read_run(folder))
    assert len(routing) == 4 * 3
    assert list(routing["picks_changed"][:3]) == pytest.approx([0.0, 0.2, 0.4])


def test_unfinished_trainings_are_left_out_and_named(tmp_path):
    records = read_run(write_run(tmp_path / "part", without=("aar-seed1", "router_sft-seed1")))
    assert set(records.unfinished) == {"aar-seed1", "router_sft-seed1"}
    table = held_out_table(records)
    assert list(table["seed"]) == ["", "0", "0"] and table["ce_std"].isna().all()


def test_a_folder_that_is_no_finished_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run directory: it has no config.json"):
        read_run(tmp_path)
    names = ("aar-seed0", "aar-seed1", "router_sft-seed0", "router_sft-seed1")
    with pytest.raises(ValueError, match="no finished training yet"):
        read_run(write_run(tmp_path / "none", without=names))


def test_a_comparison_pairs_what_agrees_and_says_what_does_not(tmp_path):
    first = read_run(write_run(tmp_path / "first"))
    half = read_run(write_run(tmp_path / "half", rows=range(20, 60)))
    other = read_run(write_run(tmp_path / "other", targets=7))
    table = comparison_table([first, half, other])
    assert len(table) == 3 * 5
    rows = table.set_index(["run", "label", "seed"])
    assert pd.isna(rows.loc[("first", "aar", "0"), "vs_first"])
    assert rows.loc[("half", "aar", "0"), "vs_first_rows"] == 20
    assert rows.loc[("half", "aar", "0"), "vs_first"] == pytest.approx(0.0)
    assert rows.loc[("half", "aar", "0"), "vs_untouched"] == pytest.approx(-0.3)
    assert "same tokenizer" in rows.loc[("other", "aar", "0"), "note"]
    assert len(as_text(comparison_display(table)).splitlines()) == 2 + 15

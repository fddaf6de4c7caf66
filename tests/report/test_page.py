"""The page is one file that needs nothing else, and its numbers are those of summary.json and of the terminal."""

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from aarlib.report import figures
from aarlib.report.page import write_report
from aarlib.report.records import read_run
from aarlib.report.tables import held_out_table, routing_by_layer, score_table, sweep_table
from pipelines import compare, report
from tests.report.run_folder import write_run, write_scores, write_sweep


@pytest.fixture
def folder(tmp_path):
    folder = write_run(tmp_path / "hand")
    write_scores(folder)
    write_sweep(folder)
    (folder / "stages.json").write_text(json.dumps({"wall_s": {"train": 61.0, "sweep": 30.0}, "peak_gib": 3.25}))
    return folder


class References(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "srcset", "href") and value]


def test_the_page_needs_no_other_file(folder):
    html = write_report(folder).page.read_text()
    parser = References()
    parser.feed(html)
    assert len(parser.found) == 2 * 5
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in parser.found)
    assert "<script" not in html and "@import" not in html
    for reference in parser.found:
        root = ElementTree.fromstring(base64.b64decode(reference.partition(",")[2]))
        assert root.tag.endswith("svg")


def test_page_summary_and_terminal_agree(folder):
    written = write_report(folder)
    html, summary = written.page.read_text(), json.loads(written.summary.read_text())
    row = next(row for row in summary["held_out"] if row["label"] == "aar" and row["seed"] == "mean")
    shown = f"{row['vs_sft']:+.4f} [{row['vs_sft_low']:+.4f}, {row['vs_sft_high']:+.4f}]"
    assert shown in written.text and shown in html
    assert f"by {-row['vs_untouched']:.4f} [" in summary["headlines"][1]
    assert summary["headlines"][1] in html.replace("&#39;", "'")
    assert summary["frozen_unchanged"] is True and summary["num_held_out"] == 40
    assert [trial["ce"] for trial in summary["sweeps"]["windows"]] == [1.5, 2.5]
    assert "1 min 31 s" in html and "3.25 GiB" in html
    assert "unused &lt;script&gt;" in html


def test_the_page_does_without_evaluation_and_sweep_and_names_what_is_missing(tmp_path):
    written = write_report(write_run(tmp_path / "bare", without=("aar-seed1",)))
    html = written.page.read_text()
    assert "Not finished" in html and "aar-seed1" in html
    assert "How the tasks were scored" not in html and "Trials of" not in html


@pytest.mark.parametrize("theme", [figures.LIGHT, figures.DARK], ids=lambda theme: theme.name)
def test_every_panel_has_a_title_and_a_label_with_its_unit(folder, theme):
    records = read_run(folder)
    drawn = [
        figures.held_out_differences(held_out_table(records), theme),
        figures.training_curves(records, theme),
        figures.task_scores(score_table(records), theme),
        figures.routing_change(routing_by_layer(records), records, theme),
        figures.sweep_trials(sweep_table(records.sweeps[0]), theme),
    ]
    for figure in drawn:
        for axis in figure.axes:
            assert axis.get_title(loc="left") and axis.get_xlabel()
    units = [axis.get_ylabel() for axis in drawn[1].axes] + [drawn[0].axes[0].get_xlabel()]
    assert all(re.search(r"\(.+\)", unit) for unit in units)


def test_a_method_has_one_colour_and_marker_in_every_figure(folder):
    style = figures.styles(["router_sft", "aar_t", "aar"], figures.LIGHT)
    assert len({(one.colour, one.marker) for one in style.values()}) == 4
    records = read_run(folder)
    curves = figures.training_curves(records, figures.LIGHT)
    colours = {
        line.get_label(): line.get_color() for line in curves.axes[0].lines if not line.get_label().startswith("_")
    }
    expected = figures.styles(records.labels, figures.LIGHT)
    assert colours == {label: expected[label].colour for label in records.labels}


def test_the_same_records_give_the_same_picture(folder):
    records = read_run(folder)
    first, second = (figures.as_svg(figures.training_curves(records, figures.LIGHT)) for _ in range(2))
    assert first == second


def test_pyplot_is_never_imported():
    code = "import sys, aarlib.report.page; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_verbs_print_tables_and_refuse_what_is_no_run(folder, tmp_path, capsys):
    assert report.main([str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert compare.main([str(folder), str(folder)]) == 0
    assert "vs first run [95%]" in capsys.readouterr().out
    assert report.main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert compare.main([str(folder)]) == 2
    assert "name at least two" in capsys.readouterr().err

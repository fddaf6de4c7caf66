"""What benches say, the record of every verb at a tiny size, and docs/speed.md made from records."""

import json
from pathlib import Path

import pytest

from aarlib.bench import audit, capture, fdaa, lens, measure, train
from aarlib.bench.claims import Claim, apart, equal, paired, within
from aarlib.bench.measure import Measurement
from aarlib.bench.page import filled, read_records, rendered
from aarlib.bench.process import OutOfMemory, Turns, local
from pipelines import bench

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def here(monkeypatch):
    """Jobs run in this process, through JSON as ever; that they run in one of their own is tested with the processes."""

    def run_job(job, settings, threads=1, limit_gib=None):
        return json.loads(json.dumps(local(job, json.loads(json.dumps(settings)))))

    for module in (measure, capture, train, audit, fdaa, lens):
        monkeypatch.setattr(module, "run_job", run_job)


def test_a_claim_is_judged_by_its_median_and_keeps_its_extremes():
    claim = paired("a / b", Turns([1, 4, 3], [2, 2, 2]), Turns([1, 2, 1], [1, 2, 4]), target=2.0)
    assert claim[:5] == ("a / b", 2.0, 1.0, 3.0, 1.0) and claim.met
    assert claim._replace(target=1.9).met is False and claim._replace(target=None).met is None
    assert claim._replace(at_least=True, target=2.1).met is False
    slow, fast = Measurement(6, 4, 8, 1.0, 6), Measurement(2, 1, 4, 1.0, 3)
    assert apart("s", slow, fast, 2.0)[:5] == ("s", 6.0, 2.0, 16.0, 4.0)
    assert claim._replace(target=1.9).line().endswith("target <= 1.9: MISSED")


def test_unequal_numbers_stop_a_bench():
    import torch

    with pytest.raises(RuntimeError, match="x: the two ways differ by 1.0e-03 .* nothing is timed"):
        equal("x", torch.ones(2) * 1.001, torch.ones(2), 1e-5)
    with pytest.raises(RuntimeError, match="x: the two ways differ by nan"):
        within("x", float("nan"), 1.0)


@pytest.mark.parametrize("name", ["capture", "train", "audit", "fdaa", "lens"])
def test_every_bench_asserts_equal_numbers_first_and_stores_them(name, here, tmp_path, capsys):
    out = tmp_path / f"bench_{name}.json"
    sizes = ["--lengths", "48", "--rounds", "2", "--threads", "1", "--memory-limit", "4"]
    asked = ["train", "--method", "fdaa"] if name == "fdaa" else [name]
    assert bench.main([*asked, "--tiny", *sizes, "--out", str(out)]) == 0, capsys.readouterr().err
    record, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert record["bench"] == name and record["threads"] == 1 and record["torch"] and record["sizes"]["model"] == "tiny"
    assert shown.index("equal: ") < shown.index(record["claims"][0]["name"])
    assert all(item["error"] <= item["tolerance"] for item in record["equal"])
    targets = [claim for claim in record["claims"] if claim["target"] is not None]
    assert all(claim["met"] in (True, False) and claim["low"] <= claim["value"] <= claim["high"] for claim in targets)
    assert bool(targets) == (name != "train")
    assert not list(tmp_path.glob("*.partial.json")) and out.with_suffix(".png").exists() == (name in bench.PICTURES)
    with pytest.raises(ValueError, match="measured with --tiny"):
        read_records(tmp_path)
    page = (
        f"a\n<!-- bench {name} -->\nto be measured\n<!-- end bench -->\n<!-- bench gpu -->\nkept\n<!-- end bench -->\n"
    )
    once = filled(page, {name: record})
    assert "to be measured" not in once and "kept" in once and filled(once, {name: record}) == once
    for claim in record["claims"]:
        assert f"| {claim['name']} | {claim['value']:.2f}" in once
    record["claims"][0]["value"] += 1
    assert filled(once, {name: record}) != once


def test_an_eager_run_that_is_out_of_memory_is_said_and_shown(here, monkeypatch, tmp_path, capsys):
    """Eager timings and eager memory do not fit; ours is measured all the same, and the page renders."""
    stock = capture.run_job

    def without_room(job, settings, threads=1, limit_gib=None):
        if settings.get("with_eager") or settings.get("way") == "eager":
            assert limit_gib == 4
            return OutOfMemory(limit_gib)
        return stock(job, settings, threads, limit_gib)

    monkeypatch.setattr(capture, "run_job", without_room)
    out = tmp_path / "bench_capture.json"
    arguments = ["--lengths", "48", "--rounds", "1", "--threads", "1", "--memory-limit", "4", "--out", str(out)]
    assert bench.main(["capture", "--tiny", *arguments]) == 0
    shown, record = capsys.readouterr().out, json.loads(out.read_text())
    assert "48 tokens, extra peak of eager: out of memory\n" in shown
    [row] = bench.lengths_in(record)
    assert row["memory_gib"]["eager"] is None and row["memory_gib"]["ours"] >= 0
    assert "ours" in row["turns"] and not any(name.startswith("eager") for name in row["turns"])
    assert "out of memory |" in rendered(record, "capture") and out.with_suffix(".png").stat().st_size > 1000


def test_levels_of_the_lens_are_compared_on_three_receivers_each(here):
    [checked] = [part.equal for part in [next(lens.run(lens.Settings(shape=bench.TINY)))]]
    for level in lens.LEVELS:
        assert sum(item.what.startswith(f"variances by {level} at") for item in checked) >= 3


def test_a_bench_that_stops_keeps_what_it_had_and_the_older_file(here, monkeypatch, tmp_path, capsys):
    def broken(arguments):
        yield bench_part()
        raise RuntimeError("the machine is on fire")

    monkeypatch.setitem(bench.BENCHES, "lens", broken)
    out = tmp_path / "lens.json"
    out.write_text("older")
    assert bench.main(["lens", "--out", str(out)]) == 2
    assert out.read_text() == "older" and "on fire" in capsys.readouterr().err
    assert json.loads(out.with_suffix(".partial.json").read_text())["claims"][0]["name"] == "c"


def bench_part():
    from aarlib.bench.claims import Equal, Part

    return Part("one", [Equal("e", 0.0, 1.0)], [Claim("c", 1.0, 1.0, 1.0)])


def test_only_train_has_methods(capsys):
    assert bench.main(["capture", "--method", "fdaa", "--dry-run"]) == 2
    assert "use it with train" in capsys.readouterr().err


def test_the_pages_show_the_stored_records():
    records = read_records(DOCS / "studies" / "results")
    for page in (DOCS / "speed.md", DOCS / "studies" / "fdaa.md"):
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- bench ") == text.count("<!-- end bench -->") > 0
        assert filled(text, records) == text, "run python -m pipelines.bench page"
        for name, record in records.items():
            assert f"<!-- bench {name} -->" not in text or rendered(record, name) in text

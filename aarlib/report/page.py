"""Tables and figures to one self-contained HTML page, a JSON summary and a terminal table, all with the same numbers."""

import base64
import json
from collections.abc import Callable, Hashable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

import aarlib
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.config import write_text_atomically
from aarlib.report import figures, tables, text
from aarlib.report.records import RunRecords, Sweep, read_run


class Picture(NamedTuple):
    title: str
    caption: str
    light: str
    dark: str
    """Data URIs."""


class Report(NamedTuple):
    html: str
    summary: dict[str, Any]
    text: str


class Written(NamedTuple):
    page: Path
    summary: Path
    text: str


def write_report(folder: str | Path) -> Written:
    """Read the run directory and write report.html and summary.json into it."""
    folder = Path(folder)
    report = build_report(read_run(folder))
    page, summary = folder / "report.html", folder / "summary.json"
    write_text_atomically(page, report.html)
    write_text_atomically(summary, json.dumps(report.summary, indent=2))
    return Written(page.resolve(), summary.resolve(), report.text)


def build_report(records: RunRecords) -> Report:
    table, scores = tables.held_out_table(records), tables.score_table(records)
    displays = text.held_out_display(table), text.score_display(table, scores)
    context = {
        "title": records.config.name,
        "version": aarlib.__version__,
        "headlines": headlines(table),
        "facts": _facts(records),
        "held_out": displays[0],
        "scores": displays[1],
        "pictures": _pictures(records, table, scores),
        "scoring": text.frame_display(tables.settings_table(records.scores)) if records.scores is not None else None,
        "sweeps": [(sweep.study, text.sweep_display(tables.sweep_table(sweep))) for sweep in records.sweeps],
        "unfinished": records.unfinished,
        "config": records.config.to_json(),
    }
    return Report(
        _template().render(context), _summary(records, table, scores), "\n\n".join(map(text.as_text, displays))
    )


def headlines(table: pd.DataFrame) -> list[str]:
    """What the table says, method by method, in a sentence each."""
    sentences = []
    trained = [row for row in table.to_dict("records") if row["label"] != tables.UNTOUCHED]
    for label in dict.fromkeys(row["label"] for row in trained):
        rows = [row for row in trained if row["label"] == label]
        row = next((row for row in rows if row["seed"] == "mean"), rows[0])
        seeds = sum(row["seed"] != "mean" for row in rows)
        verdicts = [_verdict(row, "vs_untouched", "the untouched model's")]
        if not pd.isna(row["vs_sft"]):
            verdicts.append(_verdict(row, "vs_sft", "that of SFT of the same seeds"))
        sentences.append(f"{label} ({seeds} {'seed' if seeds == 1 else 'seeds'}): held-out CE {'; '.join(verdicts)}.")
    return sentences


def _verdict(row: dict[Hashable, Any], name: str, reference: str) -> str:
    mean, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if high < 0:
        return f"lower than {reference} by {-mean:.4f} [{-high:.4f}, {-low:.4f}]"
    if low > 0:
        return f"higher than {reference} by {mean:.4f} [{low:.4f}, {high:.4f}]"
    return f"not distinguishable from {reference} ({text.signed_interval(mean, low, high)})"


def _facts(records: RunRecords) -> list[tuple[str, str]]:
    config, stages = records.config, records.stages
    targets = sum(records.untouched["num_targets"])
    facts = [
        ("base model", config.model.name),
        ("held out", f"{len(records.untouched):,} conversations, {targets:,} target tokens"),
        ("trainings", f"{len(records.runs)}, {records.runs[0].result['steps']:,} steps each"),
        ("workers", f"{records.runs[0].result['num_workers']}, ZeRO {records.runs[0].result['zero_stage']}"),
        ("base unchanged", "yes, by hash" if _frozen(records) else "NO"),
    ]
    if stages is not None:
        facts.append(("all stages", text.duration(sum(stages["wall_s"].values()))))
        facts.append(("peak memory", f"{stages['peak_gib']:.2f} GiB, whole process tree"))
    return facts


def _frozen(records: RunRecords) -> bool:
    return all(r.result["frozen_sha256_before"] == r.result["frozen_sha256_after"] for r in records.runs)


def _pictures(records: RunRecords, table: pd.DataFrame, scores: pd.DataFrame) -> list[Picture]:
    pictures = [
        _picture(
            "Held-out cross-entropy",
            "Trained minus reference, paired by conversation; bars are 95% bootstrap intervals over conversations. "
            "Left of 0 is better.",
            lambda theme: figures.held_out_differences(table, theme),
        ),
        _picture(
            "Training",
            "Thick: mean over seeds. Thin: each seed. Methods see the same conversations at the same step, so the "
            "difference to SFT is paired.",
            lambda theme: figures.training_curves(records, theme),
        ),
    ]
    if not scores.empty:
        caption = "One dot per seed. Documents and settings are in the scoring table below."
        pictures.append(_picture("Tasks", caption, lambda theme: figures.task_scores(scores, theme)))
    routing = tables.routing_by_layer(records)
    if not routing.empty:
        caption = "At the last logged step, on training batches; mean over seeds."
        pictures.append(
            _picture("Routing by layer", caption, lambda theme: figures.routing_change(routing, records, theme))
        )
    return pictures + [_sweep_picture(sweep) for sweep in records.sweeps]


def _sweep_picture(sweep: Sweep) -> Picture:
    trials = tables.sweep_table(sweep)
    caption = (
        "Shorter trainings than above, paired with the untouched model; bars are 95% intervals over conversations."
    )
    return _picture(f"Sweep {sweep.study}", caption, lambda theme: figures.sweep_trials(trials, theme))


def _picture(title: str, caption: str, draw: Callable[[figures.Theme], Figure]) -> Picture:
    light, dark = (_data_uri(figures.as_svg(draw(theme))) for theme in (figures.LIGHT, figures.DARK))
    return Picture(title, caption, light, dark)


def _data_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("aarlib.report").joinpath("page.html.jinja").read_text(encoding="utf-8"))


def _summary(records: RunRecords, table: pd.DataFrame, scores: pd.DataFrame) -> dict[str, Any]:
    return {
        "name": records.config.name,
        "aarlib_version": aarlib.__version__,
        "methods": {label: method_name(records.config.method[label]) for label in records.labels},
        "steps": records.runs[0].result["steps"],
        "num_held_out": len(records.untouched),
        "held_out": _json_rows(table),
        "scores": _json_rows(scores),
        "sweeps": {sweep.study: _json_rows(tables.sweep_table(sweep)) for sweep in records.sweeps},
        "headlines": headlines(table),
        "frozen_unchanged": _frozen(records),
        "unfinished": list(records.unfinished),
        "stages": records.stages,
    }


def method_name(method: Any) -> str:
    """As a paper's table has it: routing-only SFT; AAR^T, M 32; AAR, M 32."""
    if not isinstance(method, AARConfig):
        return "routing-only SFT" if isinstance(method, RouterSFTConfig) else str(method.name)
    return f"{'AAR^T' if method.views == ('time',) else 'AAR'}, M {method.window}"


def _json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(str(frame.to_json(orient="records", double_precision=15)))

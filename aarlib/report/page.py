"""Tables and figures to one self-contained HTML page, a JSON summary and a terminal table, all with the same numbers."""

import base64
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

import aarlib
from aarlib.config import write_text_atomically
from aarlib.report import figures, tables, text
from aarlib.report.records import RunRecords, read_run


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
    display = text.main_display(table, scores)
    context = {
        "title": records.config.name,
        "version": aarlib.__version__,
        "headlines": headlines(table),
        "facts": _facts(records),
        "main": display,
        "pictures": _pictures(records, table, scores),
        "scoring": text.frame_display(tables.settings_table(records.scores)) if records.scores is not None else None,
        "trials": text.frame_display(records.trials) if records.trials is not None else None,
        "unfinished": records.unfinished,
        "config": records.config.to_json(),
    }
    return Report(_template().render(context), _summary(records, table, scores), text.as_text(display))


def headlines(table: pd.DataFrame) -> list[str]:
    """What the table says, method by method, in a sentence each."""
    sentences = []
    trained = table[table["label"] != tables.UNTOUCHED]
    for label in dict.fromkeys(trained["label"]):
        rows = trained[trained["label"] == label]
        row = (rows[rows["seed"] == "mean"] if (rows["seed"] == "mean").any() else rows).iloc[0].to_dict()
        seeds = int((rows["seed"] != "mean").sum())
        sentence = f"{label} ({seeds} {'seed' if seeds == 1 else 'seeds'}): {_verdict(row, 'vs_untouched')} the untouched model's"
        if not pd.isna(row["vs_sft"]):
            sentence += f", and {_verdict(row, 'vs_sft')} that of SFT"
        sentences.append(sentence + ".")
    return sentences


def _verdict(row: dict[str, Any], name: str) -> str:
    numbers = text.interval(row, name)
    if row[f"{name}_high"] < 0:
        return f"held-out CE {numbers} below"
    if row[f"{name}_low"] > 0:
        return f"held-out CE {numbers} above"
    return f"held-out CE {numbers} not distinguishable from"


def _facts(records: RunRecords) -> list[tuple[str, str]]:
    config, stages = records.config, records.stages
    targets = int(records.untouched["num_targets"].sum())
    facts = [
        ("base model", config.model.name),
        ("held out", f"{len(records.untouched):,} conversations, {targets:,} target tokens"),
        ("trainings", f"{len(records.runs)} of {records.runs[0].result['steps']:,} steps"),
        ("workers", f"{records.runs[0].result['num_workers']}, ZeRO {records.runs[0].result['zero_stage']}"),
        ("base unchanged", "yes, by hash" if _frozen(records) else "NO"),
    ]
    if stages is not None:
        facts.append(("all stages", text.duration(sum(stage["wall_s"] for stage in stages["stages"]))))
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
            "Thick: mean over seeds. Thin: each seed.",
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
    if records.trials is not None:
        trials = records.trials
        caption = "Best on top. One seed each: differences between close trials are noise."
        pictures.append(_picture("Sweep", caption, lambda theme: figures.sweep_trials(trials, theme)))
    return pictures


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
        "num_held_out": len(records.untouched),
        "held_out": _json_rows(table),
        "scores": _json_rows(scores),
        "trials": None if records.trials is None else _json_rows(records.trials),
        "headlines": headlines(table),
        "frozen_unchanged": _frozen(records),
        "unfinished": list(records.unfinished),
        "stages": records.stages,
    }


def _json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(frame.to_json(orient="records", double_precision=15))

"""Stored bench records as Markdown: blocks `<!-- bench NAME -->` to `<!-- end bench -->` of a page. No numbers of its own."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
_BLOCK = re.compile(r"(<!-- bench (?P<name>\w+) -->\n).*?(<!-- end bench -->)", re.DOTALL)
PREFIX = "bench_"


def read_records(folder: Path) -> dict[str, Record]:
    """By name: the files bench_<bench>.json and bench_<bench>_<part>.json of `folder`, the part measured on its own.

    ValueError for one of another bench, or of a tiny model.
    """
    found = {}
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        record, name = json.loads(path.read_text(encoding="utf-8")), path.stem.removeprefix(PREFIX)
        if record.get("bench") != name.partition("_")[0]:
            raise ValueError(
                f"{path}: holds bench {record.get('bench')!r}; store it as bench_{record.get('bench')}.json"
            )
        if record["sizes"]["model"] == "tiny":
            raise ValueError(f"{path}: measured with --tiny; run `python -m pipelines.bench {name}` without it")
        found[name] = record
    return found


def filled(page: str, records: Mapping[str, Record]) -> str:
    """Every block whose record is there made again; a block without one stays as it is."""

    def block(match: re.Match[str]) -> str:
        record = records.get(match["name"])
        return match[0] if record is None else f"{match[1]}{rendered(record, match['name'])}\n{match[3]}"

    return _BLOCK.sub(block, page)


def rendered(record: Record, name: str) -> str:
    """Where and how it was measured, the claims, what was equal beforehand, and the picture of a whole bench by length."""
    lines = [described(record), "", _claims(record["claims"]), "", _equal(record["equal"])]
    for name, why in record["skipped"].items():
        lines += ["", f"Skipped: {name}: {why}."]
    rows = [row for row in record["details"].values() if "memory_gib" in row]
    if rows:
        lines += ["", _peaks(rows)]
    if rows and name == record["bench"]:
        lines += ["", f"![By sequence length](studies/figures/bench_{name}.png)"]
    return "\n".join(lines)


def described(record: Record) -> str:
    where = record["gpu"] or f"{record['cpus']} CPUs ({record['processor']})"
    load = ", ".join(f"{value:.1f}" for value in record["load_average"])
    sizes = ", ".join(f"{name} {_size(value)}" for name, value in record["sizes"].items() if value not in ({}, 0))
    return (
        f"{record['date']}, {where}, {record['threads']} threads, load average at the start {load}; torch "
        f"{record['torch']}, transformers {record['transformers']}; {sizes}. Median of {record['rounds']} turns with the least "
        "and the most, wall clock; beside it the ratio of processor times."
    )


def _size(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _claims(claims: Sequence[Record]) -> str:
    rows = []
    for claim in claims:
        goal = "" if claim["target"] is None else f"{'>=' if claim['at_least'] else '<='} {claim['target']:g}"
        verdict = {None: "", True: "met", False: "missed"}[claim["met"]]
        cpu = "" if claim["cpu"] is None else f"{claim['cpu']:.2f}"
        alone = claim["low"] == claim["high"]
        spread = "" if alone else f" [{claim['low']:.2f}, {claim['high']:.2f}]"
        value = f"{claim['value']:.2f}{spread}{'' if claim['unit'] == 'x' else ' ' + claim['unit']}"
        rows.append([claim["at"], claim["name"], value, cpu, goal, verdict])
    return _table(["size", "measure", "ratio or peak", "of processor times", "target", ""], rows)


def _equal(checked: Sequence[Record]) -> str:
    worst = max(checked, key=lambda item: item["error"] / item["tolerance"] if item["tolerance"] else item["error"])
    return (
        f"{len(checked)} comparisons of the ways' numbers were within their tolerances before anything was timed; nearest to its "
        f"own: {worst['what']}, {worst['error']:.1e} of {worst['tolerance']:.0e}."
    )


def _peaks(rows: Sequence[Record]) -> str:
    ways = list(dict.fromkeys(way for row in rows for way in row["memory_gib"]))
    cells = [
        [str(row["length"]), *("" if way not in row["memory_gib"] else _gib(row["memory_gib"][way]) for way in ways)]
        for row in rows
    ]
    return _table(["tokens", *(f"extra peak, {way}" for way in ways)], cells)


def _gib(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.3f} GiB"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])

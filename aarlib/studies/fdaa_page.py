"""FDAA's result rows as Markdown tables: what docs/studies/fdaa.md shows and `study` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from aarlib.studies.fdaa_paper import PAPER

Rows = Sequence[Mapping[str, Any]]
CONTROLS = ("vs_native", "vs_static", "vs_permuted", "vs_strongest")


def tables(results: Mapping[str, Rows]) -> dict[str, str]:
    """Markdown by name; a table without rows is left out."""
    found = {
        "domains": domains(results["domains"]),
        "masks": masks(results["controls"]),
        "layers": layers(results["layers"]),
        "runs": runs(results.get("runs", ())),
    }
    return {name: text for name, text in found.items() if text.count("\n") > 1}


def domains(rows: Rows) -> str:
    """Trained on, tested on: a head of one layer against native and the controls."""
    several = _of_several_layers(rows)
    head = ["trained in", "tested on", "native CE", "against native", "by seed", "wins", "against static", "against permuted",
            "against strongest fixed (chosen on development)"]  # fmt: skip
    body = [
        [
            row["run"], row["domain"], f"{row['native_ce']:.4f}", interval(row, "vs_native"), seeds(row, "vs_native"),
            f"{100 * row['vs_native/win']:.0f}%",
            interval(row, "vs_static"), interval(row, "vs_permuted"),
            f"{interval(row, 'vs_strongest')} ({row['strongest_fixed']})",
        ]
        for row in rows
        if row["run"] not in several and row.get("vs_static/mean") is not None
    ]  # fmt: skip
    return _table(head, body)


def masks(rows: Rows) -> str:
    """Every control and feature mask against native."""
    order = (
        "fdaa",
        "no_outputs",
        "no_hidden",
        "router_and_id",
        "permuted",
        "static",
        "uniform",
        "temperature_0.5",
        "temperature_2.0",
    )
    several = _of_several_layers(rows)
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["domain"], row["layers"]), {})[row["arm"]] = interval(row, "vs_native")
    with_static = {key: arms for key, arms in groups.items() if "static" in arms}
    return _table(
        ["trained in", "tested on", *order],
        [
            [f"{run}, layers {place}" if run in several else run, domain, *(arms[name] for name in order)]
            for (run, domain, place), arms in with_static.items()
        ],
    )


def layers(rows: Rows) -> str:
    """A head of several layers: each alone, pooled, and all together."""
    head = [
        "trained in",
        "tested on",
        "layers",
        "against native",
        "by seed",
        "against static",
        "against permuted",
        "against strongest fixed",
    ]
    body = [
        [
            row["run"], row["domain"], row["layers"], interval(row, "vs_native"), seeds(row, "vs_native"),
            interval(row, "vs_static") if row.get("vs_static/mean") is not None else "", interval(row, "vs_permuted"),
            f"{interval(row, 'vs_strongest')} ({row['strongest_fixed']})",
        ]
        for row in rows
    ]  # fmt: skip
    return _table(head, body)


def _of_several_layers(rows: Rows) -> set[str]:
    return {row["run"] for row in rows if row["layers"] == "all"}


def paper() -> str:
    """What the paper quotes, with a column for ours."""
    head = ["model", "trained in", "layers", "tested on", "against", "paper", "", "ours"]
    return _table(head, [[*quoted[:5], f"{quoted.mean:+.5f}", quoted.spread, "not run"] for quoted in PAPER])


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """`page` with the text between `<!-- name -->` and `<!-- /name -->` replaced; a ValueError for a block without a place."""
    for name, text in blocks.items():
        before, opened, rest = page.partition(f"<!-- {name} -->")
        _, closed, after = rest.partition(f"<!-- /{name} -->")
        if not opened or not closed:
            raise ValueError(
                f"the page has no place for the table {name!r}: put <!-- {name} --> and <!-- /{name} --> in it"
            )
        page = f"{before}{opened}\n{text}\n{closed}{after}"
    return page


def runs(rows: Rows) -> str:
    """What each training saw, and the mean CE of development windows it ended at."""
    head = ["training", "text: windows x passes", "tokens a head", "native", "static", "heads, by seed", "time"]
    body = [
        [
            row["run"],
            ", ".join(f"{text}: {count:,} x {row['passes'][text]:.2f}" for text, count in row["windows"].items()),
            f"{row['tokens']:,}",
            f"{row['native']:.4f}",
            ", ".join(f"{ce:.4f}" for ce in row["static"]) or "not trained",
            ", ".join(f"{ce:.4f}" for ce in row["heads"]),
            f"{row['wall_s'] / 60:.0f} min",
        ]
        for row in rows
    ]
    return _table(head, body)


def interval(row: Mapping[str, Any], name: str) -> str:
    """Mean and 95% bootstrap interval over windows."""
    return f"{row[f'{name}/mean']:+.4f} [{row[f'{name}/low']:+.4f}, {row[f'{name}/high']:+.4f}]"


def seeds(row: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{value:+.4f}" for value in row[f"{name}/seeds"])


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

"""The lens's results as JSON and Markdown. A page holds blocks `<!-- table RUN NAME COLUMN=VALUE ... -->` to `<!-- end -->`."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

Results = Mapping[str, Any]
_BLOCK = re.compile(r"(<!-- table (?P<spec>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_BOUNDS = ("low", "high")


def as_results(tables: Mapping[str, pd.DataFrame], run: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-able: facts of the run, and every table as a list of rows, numbers to six digits."""
    rows = {name: [_plain(row) for row in frame.to_dict("records")] for name, frame in tables.items()}
    return {"run": dict(run), "tables": rows}


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): _number(value) for name, value in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, str | bool) or value is None:
        return value
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value


def render(page: str, results: Mapping[str, Results]) -> str:
    """`page` with every block made again from the results of the run that it names."""

    def block(found: re.Match[str]) -> str:
        run, name, *conditions = found["spec"].split()
        if run not in results or name not in results[run]["tables"]:
            raise ValueError(f"table {run} {name}: no such results; runs: {', '.join(results)}")
        wanted = dict(condition.split("=", 1) for condition in conditions)
        rows = [
            {column: value for column, value in row.items() if "," in wanted.get(column, ",")}
            for row in results[run]["tables"][name]
            if all(str(row[column]) in value.split(",") for column, value in wanted.items())
        ]
        if not rows:
            raise ValueError(f"table {found['spec']}: no row; write conditions as COLUMN=VALUE[,VALUE]")
        return f"{found[1]}{markdown(rows)}\n{found[3]}"

    return _BLOCK.sub(block, page)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column `value` takes low and high in as its interval."""
    columns = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in _BOUNDS]
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row, name) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    text = _text(row.get(name))
    if name != "value" or row.get("low") is None:
        return text
    return f"{text} [{_text(row['low'])}, {_text(row['high'])}]"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"


def read_results(folder: Path) -> dict[str, Results]:
    """By run: the files lens_<run>.json of `folder`."""
    return {
        path.stem.removeprefix("lens_"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("lens_*.json"))
    }

"""The audit's results as JSON, and the page that shows them (docs/studies/audit.md)."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from aarlib.audit.predictions import Predictions
from aarlib.studies.audit import ALL_SEEDS, POOLED, audit_tables
from aarlib.studies.audit_predictors import predictor_tables

DIGITS = 7
_TABLE = re.compile(r"<!-- table: (?P<name>[a-z0-9_]+) -->.*?<!-- end -->", re.DOTALL)
Results = dict[str, Any]


def results(records: pd.DataFrame, predicted: Predictions | None, about: Mapping[str, Any]) -> Results:
    """All tables of the records, JSON-able, floats rounded to 7 digits. Single seeds are kept with layers pooled."""
    tables = audit_tables(records)
    if predicted is not None:
        tables |= predictor_tables(predicted)
    for name in tables.keys() & {"measures", "predictors"}:
        frame = tables[name]
        kept = np.asarray(frame["seed"] == ALL_SEEDS) | np.asarray(frame["layer"] == POOLED)
        tables[name] = pd.DataFrame(frame.loc[kept])
    return {"about": dict(about), **{name: _columns(frame) for name, frame in tables.items()}}


def _columns(frame: pd.DataFrame) -> dict[str, Any]:
    rows = [[_plain(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    return {"columns": list(frame.columns), "rows": rows}


def to_json(found: Results) -> str:
    """One row of a table a line."""
    parts = [f'"about": {json.dumps(found["about"])}']
    for name in found.keys() - {"about"}:
        rows = ",\n".join(json.dumps(row) for row in found[name]["rows"])
        parts.append(f'"{name}": {{"columns": {json.dumps(found[name]["columns"])}, "rows": [\n{rows}\n]}}')
    return "{\n" + ",\n".join(sorted(parts)) + "\n}\n"


def fill(page: str, shown: Mapping[str, str]) -> str:
    """`page` with the table between each `<!-- table: name -->` and `<!-- end -->` replaced; ValueError for an unknown one."""

    def table(match: re.Match[str]) -> str:
        if match["name"] not in shown:
            raise ValueError(f"the page asks for table {match['name']!r}; there are {', '.join(shown)}")
        return f"<!-- table: {match['name']} -->\n\n{shown[match['name']]}\n\n<!-- end -->"

    return _TABLE.sub(table, page)


def _plain(value: Any) -> Any:
    if isinstance(value, np.bool_ | bool):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        if np.isinf(value):
            return "inf"
        return None if np.isnan(value) else round(float(value), DIGITS)
    return value

"""Typed, frozen configuration: TOML in, dotted overrides on top, resolved JSON out. Imports no torch."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """Base of every configuration table: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], origin: str = "config") -> Self:
        """Validate `values`; a ValueError names each bad field and its value, and what an unknown key was meant to be."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [_describe(cls, problem) for problem in error.errors(include_url=False)]
            raise ValueError(f"{origin}: " + "; ".join(lines)) from None

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read `path`, apply `a.b=value` overrides (values in TOML syntax; bare words are strings), validate."""
        path = Path(path)
        if not path.is_file():
            wrong = "is a folder" if path.is_dir() else "does not exist"
            raise ValueError(f"config file {str(path)!r} {wrong}; pass the path of a TOML file")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
        return cls.from_mapping(apply_overrides(values, overrides), origin=str(path))

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True)

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """A validated copy with dotted paths replaced: `config.updated({"optim.learning_rate": 1e-4})`."""
        values = self.model_dump(mode="python")
        for path, value in changes.items():
            _assign(values, path, value)
        return type(self).from_mapping(values)


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with each `a.b=value` assigned; refuses a malformed override."""
    values = json.loads(json.dumps(values, default=str))
    for override in overrides:
        path, separator, text = override.removeprefix("--").partition("=")
        if not separator or not path:
            raise ValueError(f"override {override!r} is not of the form --table.field=value")
        _assign(values, path.replace("-", "_"), _parse_value(text))
    return values


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write to a temporary name in the same folder, then rename: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json_object(path: str | Path) -> dict[str, Any]:
    """A file that write_text_atomically wrote; a ValueError names one that is damaged."""
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist; the command that writes it has not finished")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; restore it, or move its folder away") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(found).__name__}; restore it, or move its folder away")
    return found


def _assign(values: dict[str, Any], path: str, value: Any) -> None:
    *tables, field = path.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ValueError(f"override {path!r}: {table!r} is not a table")
    values[field] = value


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _describe(cls: type[Config], problem: Any) -> str:
    place = _place(cls, problem["loc"])
    if problem["type"] != "extra_forbidden":
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "tuple_type":
            message = "give a list, quoted for the shell: '[\"a\", \"b\"]' or '[1, 2]'"
        if isinstance(problem["input"], Mapping | BaseModel):
            return f"{place.path}: {message}" if place.path else message
        return f"{place.path} = {problem['input']!r}: {message}"
    near = difflib.get_close_matches(str(problem["loc"][-1]), place.known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(place.known)}"
    return f"unknown key {place.path!r}; {hint}"


class _Place(NamedTuple):
    path: str
    """As the user writes it."""
    known: list[str]
    """Fields of the innermost table."""


def _place(cls: type[Config], location: Iterable[Any]) -> _Place:
    """Follow a pydantic error location, which also holds the tag of each discriminated union passed through."""
    path: list[str] = []
    kinds: list[Any] = [cls]
    table = kinds
    in_mapping = False
    for part in location:
        fields = [kind.model_fields[part] for kind in table if part in kind.model_fields]
        tagged = [kind for kind in kinds if getattr(kind.model_fields.get("name"), "default", None) == part]
        if tagged and not fields and not in_mapping:
            table = tagged
            continue
        path.append(str(part))
        in_mapping = any(get_origin(field.annotation) is dict for field in fields)
        if fields:
            kinds = table = [kind for field in fields for kind in _config_types(field.annotation)]
    return _Place(".".join(path), sorted({name for kind in table for name in kind.model_fields}))


def _config_types(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for argument in getattr(annotation, "__args__", ()) for kind in _config_types(argument)]

"""How every verb reads its command line: CONFIG, flags, and `--table.field=value` overrides. Imports no torch.

@dataclass
class Flags:
    show: int = 0

arguments = parse_verb(RunConfig, __doc__, argv, flags=Flags)    # arguments.config, .dry_run, .extras.show
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from aarlib.config import Config

ConfigT = TypeVar("ConfigT", bound=Config)
FlagsT = TypeVar("FlagsT")


@dataclass(frozen=True)
class NoFlags:
    """For a verb without flags of its own."""


@dataclass(frozen=True)
class VerbArguments(Generic[ConfigT, FlagsT]):
    config: ConfigT
    """Validated, overrides applied, `Path` fields absolute."""
    config_path: Path
    dry_run: bool
    print_config: bool
    extras: FlagsT


@dataclass(frozen=True)
class _CommandLine(Generic[FlagsT]):
    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """TOML file, e.g. one of pipelines/configs."""
    extras: tyro.conf.OmitArgPrefixes[FlagsT]
    dry_run: bool = False
    """Check everything that can be checked without weights or workers, print it and stop."""
    print_config: bool = False
    """Print the resolved config as JSON and stop."""


def parse_verb(
    config_class: type[ConfigT],
    doc: str | None,
    argv: Sequence[str] | None = None,
    flags: type[FlagsT] = NoFlags,
    prog: str | None = None,
) -> VerbArguments[ConfigT, FlagsT]:
    """Parse `argv` (default: the process's) for a verb with config `config_class` and, of its own, the dataclass `flags`.

    Anything wrong is one message on stderr and exit code 2. `--print-config` prints the resolved JSON and exits with 0.
    """
    own, overrides = split_overrides(sys.argv[1:] if argv is None else argv, tuple(config_class.model_fields))
    line = tyro.cli(
        _CommandLine[flags],
        prog=prog or _program(),
        description=f"{(doc or '').strip()}\n\n{_override_help(config_class)}",
        args=own,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        config = resolve_paths(config_class.from_toml(line.config, overrides), line.config.resolve().parent)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if line.print_config:
        print(config.to_json())
        raise SystemExit(0)
    return VerbArguments(config, line.config, line.dry_run, line.print_config, line.extras)


def split_overrides(argv: Sequence[str], fields: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the verb's own arguments, overrides in the form `--a.b=value`).

    An override is an option whose name is dotted or starts with one of `fields`; `--a.b value` becomes `--a.b=value`.
    """
    own: list[str] = []
    overrides: list[str] = []
    remaining = list(argv)
    while remaining:
        token = remaining.pop(0)
        name = token.removeprefix("--").partition("=")[0]
        if not token.startswith("--") or ("." not in name and name.replace("-", "_") not in fields):
            own.append(token)
            continue
        if "=" not in token and remaining and not remaining[0].startswith("--"):
            token = f"{token}={remaining.pop(0)}"
        overrides.append(token)
    return own, overrides


def resolve_paths(config: ConfigT, folder: Path, prefix: str = "") -> ConfigT:
    """`config` with every `Path` field absolute. Such a field is an input: relative to `folder`, and it exists."""
    changes: dict[str, Any] = {}
    for field, value in config:
        if isinstance(value, Config):
            changes[field] = resolve_paths(value, folder, f"{prefix}{field}.")
        elif isinstance(value, Path):
            changes[field] = (folder / value.expanduser()).resolve()
            if not changes[field].exists():
                raise ValueError(
                    f"{prefix}{field} = {str(value)!r}: {changes[field]} does not exist; "
                    "give an absolute path or one relative to the config file"
                )
    return config.model_copy(update=changes)


def _program() -> str:
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {module.name}" if module else Path(sys.argv[0]).name


def _override_help(config_class: type[Config]) -> str:
    lines = "\n".join(f"  --{path}={default}" for path, default in _fields(config_class))
    return f"Any field of the config can be overridden (values in TOML syntax; bare words are strings):\n{lines}"


def _fields(config_class: type[Config], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, default) of every field of `config_class`, tables opened."""
    for name, field in config_class.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "..." if field.is_required() else str(field.get_default(call_default_factory=True))

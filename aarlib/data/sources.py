"""From globs and URIs to the list of files they name. Lists only; reads nothing."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fsspec.implementations.arrow import ArrowFSWrapper

from aarlib.data.conversations import FORMATS, file_name, open_location


def find_sources(patterns: Sequence[str]) -> list[str]:
    """Every `nano:<split>:<rows>` source and every file the globs name; a ValueError for one that names nothing."""
    nano = [pattern for pattern in patterns if pattern.startswith("nano:")]
    for pattern in nano:
        parse_nano(pattern)
    return nano + expand_sources([pattern for pattern in patterns if not pattern.startswith("nano:")])


def parse_nano(source: str) -> tuple[str, int]:
    """(split, number of rows) of `nano:<split>:<rows>`."""
    parts = source.split(":")
    if len(parts) != 3 or not parts[1] or not parts[2].isdecimal() or int(parts[2]) == 0:
        raise ValueError(
            f"data.train = {source!r} is not of the form nano:<split>:<number of rows>, such as nano:sft:2000"
        )
    return parts[1], int(parts[2])


def expand_sources(patterns: Sequence[str], formats: tuple[str, ...] = FORMATS) -> list[str]:
    """The data files that local paths, folders, globs (with **) and URIs (s3://, gs://) name, sorted within a pattern.

    In a URI `?` starts the connection's options (`s3://bucket/*.parquet?region=eu-west-1`), which stay with each file.
    ValueError for a pattern that names no file, and for two files of one name, whose row ids would collide.
    """
    found = [path for pattern in patterns for path in _expand(pattern, formats)]
    paths = list(dict.fromkeys(found))
    names = Counter(file_name(path) for path in paths)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        clash = ", ".join(path for path in paths if file_name(path) == twice)
        raise ValueError(f"data.train: files of one name ({clash}); row ids are <file name>:<line>, so rename one")
    return paths


def _expand(pattern: str, formats: tuple[str, ...]) -> list[str]:
    pattern = pattern.rstrip("/")
    found = _expand_uri(pattern, formats) if "://" in pattern else _expand_local(pattern, formats)
    if not found:
        raise ValueError(
            f"data.train: {pattern!r} names no {', '.join(formats)} file; correct the path, or let "
            "`python -m pipelines.prepare` ingest a hub dataset into it (data.hub)"
        )
    return found


def _expand_local(pattern: str, formats: tuple[str, ...]) -> list[str]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [str(path)]
    matches = path.glob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    return sorted(str(match) for match in matches if match.is_file() and _is_data(match.name, formats))


def _expand_uri(pattern: str, formats: tuple[str, ...]) -> list[str]:
    try:
        location, inner = open_location(pattern)
        filesystem = ArrowFSWrapper(location)
        if filesystem.isdir(inner):
            inner = f"{inner}/*"
        matches = [str(match) for match in filesystem.glob(inner)]
    except (OSError, ValueError) as error:
        raise ValueError(f"data.train: {pattern!r} cannot be listed: {error}; check URI and credentials") from error
    scheme, _, rest = pattern.partition("://")
    credentials, at, _ = rest.partition("/")[0].rpartition("@")
    query = pattern.partition("?")[2]
    names = sorted(match for match in matches if _is_data(file_name(match), formats))
    return [f"{scheme}://{credentials}{at}{name}" + (f"?{query}" if query else "") for name in names]


def _is_data(name: str, formats: tuple[str, ...]) -> bool:
    return name.endswith(formats) and not name.startswith(".")

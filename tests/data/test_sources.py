"""Globs, folders and URIs to files."""

import pytest

from aarlib.data.conversations import read_conversations
from aarlib.data.sources import expand_sources

ROW = '{"messages": [{"role": "user", "content": "a"}]}\n'


@pytest.fixture
def folder(tmp_path):
    for name in (
        "b.jsonl",
        "a.parquet",
        "deep/er/c.jsonl.gz",
        "deep/d.jsonl",
        ".e.jsonl.1.tmp",
        ".f.jsonl",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROW)
    return tmp_path


def relative(paths, folder):
    return [path.partition(f"{folder}/")[2] for path in paths]


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["a.parquet", "b.jsonl"]),
        ("*.jsonl", ["b.jsonl"]),
        ("b.jsonl", ["b.jsonl"]),
        ("", ["a.parquet", "b.jsonl"]),
        ("deep", ["deep/d.jsonl"]),
        ("**/*.jsonl", ["b.jsonl", "deep/d.jsonl"]),
        ("deep/**", ["deep/d.jsonl", "deep/er/c.jsonl.gz"]),
    ],
)
def test_a_pattern_names_its_files_in_order(folder, scheme, pattern, expected):
    assert relative(expand_sources([f"{scheme}{folder}/{pattern}"]), folder) == expected


def test_a_file_from_a_uri_is_read(folder):
    (path,) = expand_sources([f"file://{folder}/b.*"])
    assert path == f"file://{folder}/b.jsonl"
    assert [row.row_id for row in read_conversations(path)] == ["b.jsonl:1"]


def test_overlapping_patterns_name_a_file_once_in_the_order_given(folder):
    paths = expand_sources([f"{folder}/b.jsonl", f"{folder}/*", f"{folder}/deep/*"])
    assert relative(paths, folder) == ["b.jsonl", "a.parquet", "deep/d.jsonl"]
    assert expand_sources([]) == []


@pytest.mark.parametrize("pattern", ["none/*.parquet", "*.csv", "README.txt"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_pattern_without_files_is_refused_with_the_remedy(folder, scheme, pattern):
    with pytest.raises(ValueError, match=r"data.train: '.*' names no .parquet, .jsonl, .jsonl.gz file; .*data.hub"):
        expand_sources([f"{folder}/b.jsonl", f"{scheme}{folder}/{pattern}"])


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="data.train: 'ftp://a/b' cannot be listed: .*check URI and credentials"):
        expand_sources(["ftp://a/b"])


def test_two_files_of_one_name_are_refused_because_row_ids_would_collide(folder):
    (folder / "deep/b.jsonl").write_text(ROW)
    with pytest.raises(ValueError, match=r"files of one name \(.*b.jsonl, .*deep/b.jsonl\); row ids are"):
        expand_sources([f"{folder}/**/*.jsonl"])

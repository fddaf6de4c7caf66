"""Ray Data: the same rows in the same order for any division into files; what is refused, and how."""

import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.object_store import object_store
from tests.runtime.conversations import write_conversations

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from aarlib.data.sources import find_sources  # noqa: E402
from aarlib.runtime import held_out  # noqa: E402
from aarlib.runtime.batches import encoded_rows  # noqa: E402
from aarlib.runtime.corpus import DIGESTS, build_corpus, digest, digest_text, ordered  # noqa: E402
from aarlib.training.config import DataConfig, ModelConfig  # noqa: E402

NANO = ModelConfig()
DRIVER_CAP_MIB = 100
SHORT = {"held_out": 0.25, "sequence_length": 48}


def ids(dataset: Any) -> list[str]:
    return [row["row_id"] for row in dataset.select_columns(["row_id"]).take_all()]


def data(*paths: Path, **changes: Any) -> DataConfig:
    return DataConfig(train=tuple(map(str, paths)), **{**SHORT, **changes})


def test_rows_order_and_split(local_ray: Any, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 60)
    corpus = build_corpus(NANO, data(path))
    first, second, epoch1 = ordered(corpus, 0, 0), ordered(corpus, 1, 0), ordered(corpus, 0, 1)
    orders = [ids(dataset) for dataset in (first, second, epoch1)]
    kept_out = ids(corpus.held_out)
    assert len(orders[0]) == corpus.num_train and sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(order) for order in orders}) == 3
    assert not set(kept_out) & set(orders[0]) and len(kept_out) == corpus.num_held_out >= 2
    assert corpus.num_truncated == 20

    streamed = [
        row for table in first.iter_batches(batch_size=7, batch_format="pyarrow") for row in encoded_rows(table)
    ]
    assert [row.row_id for row in streamed] == orders[0]
    assert sum(row.num_targets for row in streamed) == corpus.num_train_targets
    assert any(row.num_targets == 0 for row in streamed) and max(len(row.input_ids) for row in streamed) == 48

    again = build_corpus(NANO, data(path, tmp_path / "*.jsonl", max_held_out=2, sample=0.5))
    assert set(ids(ordered(again, 0, 0))) < set(orders[0])
    assert len(ids(again.encoded)) == len(set(ids(again.encoded)))
    assert ids(again.held_out) == [row for row in kept_out if row in set(ids(again.encoded))][:2]


@pytest.mark.parametrize(("scheme", "user"), [("s3", "none:none"), ("gs", "anonymous")])
def test_a_corpus_in_a_bucket_is_the_one_on_disk(local_ray: Any, tmp_path: Path, scheme: str, user: str) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 40)
    with object_store(scheme, "rows") as store:
        with store.filesystem.open_output_stream("rows/a/rows.jsonl") as file:
            file.write(path.read_bytes())
        pattern = f"{scheme}://{user}@rows/a/*.jsonl?{store.options}"
        remote = build_corpus(NANO, DataConfig(train=(pattern,), **SHORT))
    local = build_corpus(NANO, data(path))
    assert remote.digest == local.digest and ids(ordered(remote, 0, 0)) == ids(ordered(local, 0, 0))


def test_bad_rows(local_ray: Any, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 20)
    lines = path.read_text().splitlines()
    lines[6] = json.dumps({"text": "no conversation"})
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"^/[^ ]*rows.jsonl:7: no conversation: `messages` must be"):
        build_corpus(NANO, data(path))
    corpus = build_corpus(NANO, data(path, on_bad_row="skip"))
    assert sum(row["problem"] is None for row in corpus.encoded.take_all()) == 19
    assert corpus.num_skipped == 1 and corpus.skipped[0].startswith(f"{path}:7: no conversation")
    assert corpus.record()["num_skipped"] == 1 and len(corpus.record()["skipped"]) == 1


def test_a_mixture_has_its_proportions_exactly_and_is_reproducible(local_ray: Any, tmp_path: Path) -> None:
    paths = [
        write_conversations(tmp_path / f"{name}.jsonl", count, seed=count) for name, count in (("a", 60), ("b", 40))
    ]
    everything = build_corpus(NANO, data(*paths))
    available = Counter(name.partition(".")[0] for name in ids(ordered(everything, 0, 0)))
    mixed = build_corpus(NANO, data(*paths, proportions=(1.0, 3.0)))
    order = ids(ordered(mixed, 0, 0))
    counts = Counter(name.partition(".")[0] for name in order)
    assert counts["b"] == available["b"] and counts["a"] == round(available["b"] / 3) == mixed.num_train - counts["b"]
    assert set(order) < set(ids(ordered(everything, 0, 0)))
    assert ids(mixed.held_out) == ids(everything.held_out)
    again = build_corpus(NANO, data(*paths, proportions=(1.0, 3.0)))
    assert ids(ordered(again, 0, 0)) == order
    assert ids(ordered(again, 0, 1)) == ids(ordered(mixed, 0, 1)) != order


def test_the_digest_is_of_rows_and_targets_and_not_of_blocks() -> None:
    rows = {"row_id": [f"r{index}" for index in range(64)], "input_ids": [[index, 1] for index in range(64)]}
    table = pa.table({**rows, "target_mask": [[True, False]] * 64})
    whole = digest_text(digest(table))
    for size in (1, 7, 13):
        blocks = [digest(table.slice(start, size)) for start in range(0, 64, size)]
        assert sum(blocks) >= DIGESTS and digest_text(sum(blocks)) == whole
    other = pa.table({**rows, "target_mask": [[True, False]] * 63 + [[False, True]]})
    assert digest_text(digest(other)) != whole


def test_101_rows_on_two_workers_are_101_rows(local_ray: Any) -> None:
    table = pa.table(
        {
            "row_id": [f"r{index}" for index in range(101)],
            "input_ids": [list(range(2 + index % 17)) for index in range(101)],
            "target_mask": [[True] * (2 + index % 17) for index in range(101)],
        }
    )
    shard = ray.data.from_arrow(table).iterator()
    shares = [held_out.my_rows(shard, rank, 2, 8) for rank in range(2)]
    assert len(shares[0]) == len(shares[1])
    found = [row.row_id for parts in shares for part in parts for row in part if row.row_id]
    assert len(found) == len(set(found)) == 101


@pytest.mark.long
@pytest.mark.slow
def test_200_mb_of_shards_stay_out_of_the_driver(local_ray: Any, tmp_path: Path) -> None:
    """Every byte is read; a quarter is tokenised and put in order, more than the cap where it is held as rows."""
    generator = random.Random(0)
    words = ["seven", "apples", "and", "two", "boats", "make", "nine", "things", "in", "a", "row"]
    for shard in range(8):
        turns = [["go on", " ".join(generator.choices(words, k=11_000))] for _ in range(500)]
        rows = [
            {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
            for ask, answer in turns
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{shard}.parquet", compression="none")
    size = sum(path.stat().st_size for path in tmp_path.iterdir()) / 2**20
    assert size > 190
    process, peaks, done = psutil.Process(), [0.0], threading.Event()
    before = process.memory_info().rss / 2**20

    def watch() -> None:
        while not done.wait(0.05):
            peaks.append(process.memory_info().rss / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    corpus = build_corpus(NANO, data(tmp_path / "*.parquet", sample=0.25, sequence_length=16_384))
    order = ordered(corpus, 0, 0)
    done.set()
    watcher.join()
    grown = max(peaks) - before
    print(f"{size:.0f} MiB of shards; the driver grew by {grown:.0f} MiB (cap {DRIVER_CAP_MIB} MiB)")
    ordered_mib = order.size_bytes() / 2**20
    assert order.count() == corpus.num_train > 500 and ordered_mib > 40
    assert grown < min(DRIVER_CAP_MIB, ordered_mib), "the driver holds the rows"


def test_nothing_left(local_ray: Any, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 8)
    with pytest.raises(ValueError, match="no conversation left with data.sample = 1e-09"):
        build_corpus(NANO, data(path, sample=1e-9))
    with pytest.raises(ValueError, match=r"data.held_out = 1e-09 leaves 0 conversations to evaluate on"):
        build_corpus(NANO, data(path, held_out=1e-9))
    with pytest.raises(ValueError, match=r"no training row has a target token within data.sequence_length = 4"):
        build_corpus(NANO, data(path, sequence_length=4))


def test_sources() -> None:
    with pytest.raises(ValueError, match="names no .parquet"):
        find_sources(("nowhere/*.jsonl",))
    with pytest.raises(ValueError, match="not of the form nano:<split>:<number of rows>"):
        find_sources(("nano:sft",))
    assert find_sources(("nano:sft:5",)) == ["nano:sft:5"]

"""The verb on files: counts, marked targets, ingest, and errors in one line."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.prepare import main
from tests.data.templates import style_tokenizer

CONFIG = """
name = "prepared"
[model]
name = "{model}"
[data]
train = ["{folder}/rows.jsonl"]
sample = 0.5
held_out = 0.2
sequence_length = 64
[method.sft]
name = "router_sft"
"""


@pytest.fixture
def config(tmp_path):
    style_tokenizer("chatml").save_pretrained(tmp_path / "model")
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(200):
            turns = [{"role": "user", "content": f"Q{number}"}, {"role": "assistant", "content": f"A{number}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(model=tmp_path / "model", folder=tmp_path))
    return path


def numbers(text):
    """The count that stands in each line of the table."""
    rows = [line[:16].strip() for line in text.splitlines() if line[16:28].strip().replace(",", "").isdecimal()]
    values = [line[16:28] for line in text.splitlines() if line[16:28].strip().replace(",", "").isdecimal()]
    return dict(zip(rows, (int(value.replace(",", "")) for value in values), strict=True))


def test_counts_and_marked_conversations(config, capsys):
    main([str(config), "--show", "3"])
    text = capsys.readouterr().out
    found = numbers(text)
    assert found["conversations"] == 200
    assert 70 < found["kept sample"] < 130
    assert found["to train on"] + found["held out"] == found["kept sample"]
    assert found["held out"] > 5
    assert found["without targets"] == found["truncated"] == found["skipped rows"] == 0
    assert 0 < found["target tokens"] < found["tokens"]
    assert text.count("--- rows.jsonl:") == 3
    assert text.count("<|im_start|>assistant\n[[A") == text.count("<|im_end|>]]") == 3
    main([str(config), "--data.sample=1.0", "--data.sequence_length=8"])
    cut = numbers(capsys.readouterr().out)
    assert cut["kept sample"] == cut["truncated"] == 200


def test_a_dataset_is_ingested_once(config, tmp_path, capsys):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/train.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    arguments = [str(config), f"--data.hub={tmp_path}/hub", f'--data.train=["{tmp_path}/shards/*.parquet"]']
    main([*arguments, "--dry-run"])
    assert f"would ingest {tmp_path}/hub into {tmp_path}/shards/*.parquet" in capsys.readouterr().out
    assert not (tmp_path / "shards").exists()
    main(arguments)
    first = capsys.readouterr().out
    assert "200 rows in 1 shards" in first
    assert numbers(first)["conversations"] == 200
    main(arguments)
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('--data.train=["none/*.parquet"]', "data.train: 'none/.*.parquet' names no"),
        ('--data.train=["nano:train"]', "nano:<split>:<number of rows>"),
        ("--data.smaple=0.5", "unknown key 'data.smaple'; did you mean 'sample'"),
    ],
)
def test_bad_input_is_one_line_and_a_failure(config, override, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(config), override])
    text = str(stop.value.code) + capsys.readouterr().err
    assert stop.value.code != 0
    assert "error: " in text
    assert re.search(message, text)


def test_texts_are_counted_by_document_and_split(tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(300)))
    path = tmp_path / "config.toml"
    path.write_text(
        f'''
name = "texts"
[data]
held_out = 0.1
test = 0.2
[data.domains.some]
text = ["{tmp_path}/texts.jsonl"]
[method.fdaa]
name = "fdaa"
layers = [7]
'''
    )
    main([str(path)])
    line = capsys.readouterr().out.strip()
    train, development, test = map(int, re.findall(r"(\d+) [a-z]+", line))
    assert line.startswith("some: ") and train + development + test == 300
    assert abs(test - 60) < 20 and abs(development - 30) < 15


CARD = """---
configs:
- config_name: raw
  data_files:
  - {split: train, path: raw/train-*.parquet}
  - {split: test, path: raw/test-*.parquet}
- config_name: other
  data_files:
  - {split: train, path: other/*.parquet}
---
"""


@pytest.fixture
def hub(tmp_path):
    """A dataset of two configurations and two splits, as a Hub repository holds it; each row says where it stands."""
    folder = tmp_path / "hub" / "tiny"
    for name, split in (("raw", "train"), ("raw", "test"), ("other", "train")):
        rows = [{"sentence": f"row {number} of {name}/{split}"} for number in range(40)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / name / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


HUB_TEXTS = """
name = "texts"
{head}.domains.some]
text = ["{folder}/{split}/*.parquet"]
hub = "{hub}"
hub_config = "raw"
hub_split = "{split}"
hub_column = "sentence"
hub_rows = 30
{rest}
"""


def write_config(path, hub, split, head, rest):
    """Of texts of `hub` that are ingested beside it; `head` opens the table of domains, `rest` follows them."""
    path.write_text(HUB_TEXTS.format(head=head, folder=path.parent, hub=hub, split=split, rest=rest))
    return path


def ingested(folder):
    return [row["text"] for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_the_texts_of_a_training_are_ingested_by_configuration_split_column_and_rows(tmp_path, hub, capsys):
    head, rest = "[data]\nheld_out = 0.1\ntest = 0.2\n[data", '[method.fdaa]\nname = "fdaa"\nlayers = [7]'
    path = write_config(tmp_path / "run.toml", hub, "train", head, rest)
    main([str(path), "--dry-run"])
    assert f"would ingest {hub} into {tmp_path}/train/*.parquet" in capsys.readouterr().out
    assert not (tmp_path / "train").exists()
    for _ in range(2):
        main([str(path)])
        shown = capsys.readouterr().out
        assert "30 rows in 1 shards" in shown and sum(map(int, re.findall(r"(\d+) [a-z]+(?:,| doc)", shown))) == 30
    assert ingested(tmp_path / "train") == [f"row {number} of raw/train" for number in range(30)]
    with pytest.raises(SystemExit, match="was ingested with config = 'raw', not 'other'"):
        main([str(path), "--data.domains.some.hub_config=other"])
    with pytest.raises(SystemExit, match="was ingested with asked_revision = None, not 'refs/convert/parquet'"):
        main([str(path), "--data.domains.some.hub_revision=refs/convert/parquet"])


def test_the_texts_of_a_study_are_ingested_too(tmp_path, hub, capsys):
    path = write_config(tmp_path / "study.toml", hub, "test", '[fdaa]\nruns = ["texts"]\n[fdaa', "trained_on = false")
    main([str(path), "--dry-run"])
    assert f"would ingest {hub} into {tmp_path}/test/*.parquet" in capsys.readouterr().out
    main([str(path)])
    shown = capsys.readouterr().out
    assert "some: 0 train" in shown and "30 rows in 1 shards" in shown
    assert ingested(tmp_path / "test") == [f"row {number} of raw/test" for number in range(30)]


def test_a_column_of_ingested_shards_is_refused(tmp_path, hub, capsys):
    rest = 'column = "sentence"\n[method.fdaa]\nname = "fdaa"\nlayers = [7]'
    path = write_config(tmp_path / "run.toml", hub, "train", "[data", rest)
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "column = 'sentence': ingested shards name it `text`; set hub_column instead" in capsys.readouterr().err

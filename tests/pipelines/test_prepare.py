"""The verb on files: counts, marked targets, ingest, and errors in one line."""

import json
import re

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

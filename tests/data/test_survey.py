"""Counts of a survey against the rows themselves."""

import pytest

from aarlib.data.chat import encode
from aarlib.data.conversations import Conversation, ReadReport
from aarlib.data.sampling import in_fraction
from aarlib.data.survey import encode_all, survey
from tests.data.templates import style_tokenizer


def conversations(count):
    for number in range(1, count + 1):
        turns = [{"role": "user", "content": "a" * (number % 40)}, {"role": "assistant", "content": "b" * (number % 7)}]
        yield Conversation(f"rows.jsonl:{number}", turns, None)


def test_a_survey_counts_what_encoding_each_row_gives():
    tokenizer = style_tokenizer("chatml", merges=0)
    found = survey(tokenizer, conversations(400), sequence_length=48, sample=0.5, held_out=0.2, num_examples=3)
    rows = [encode(tokenizer, row, 48) for row in conversations(400) if in_fraction(row.row_id, 0.5, "sample")]
    with_targets = [row for row in rows if any(row.target_mask[1:])]
    held_out = [row for row in with_targets if in_fraction(row.row_id, 0.2, "held_out")]
    assert (found.conversations, found.kept) == (400, len(rows))
    assert 0 < found.without_targets == len(rows) - len(with_targets)
    assert 0 < found.held_out == len(held_out)
    assert found.train == sum(not in_fraction(row.row_id, 0.2, "held_out") for row in rows)
    assert 0 < found.truncated == sum(row.truncated for row in rows)
    assert found.tokens == sum(len(row.input_ids) for row in rows)
    assert found.targets == sum(sum(row.target_mask) for row in rows)
    assert found.examples == with_targets[:3]


def test_a_conversation_the_template_refuses_stops_or_is_counted():
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if messages[0].content == 'aa' %}{{ raise_exception('no aa') }}{% endif %}" + tokenizer.chat_template
    )
    with pytest.raises(ValueError, match="rows.jsonl:2: the chat template refuses this conversation: no aa"):
        list(encode_all(tokenizer, conversations(5), 100))
    report = ReadReport()
    rows = list(encode_all(tokenizer, conversations(5), 100, "skip", report))
    assert [row.row_id[-1] for row in rows] == ["1", "3", "4", "5"]
    assert report.skipped == 1
    assert "rows.jsonl:2" in report.examples[0]


def test_real_conversations_give_the_same_targets_with_and_without_markers(shared_data):
    from aarlib.data.conversations import read_conversations

    rows = list(read_conversations(shared_data / "sft/glaive_toolcall_chat.jsonl"))[:15]
    for style in ("chatml", "llama", "mistral", "tulu"):
        plain, marked = style_tokenizer(style), style_tokenizer(style, markers=True)
        assert list(encode_all(plain, rows, 2048)) == list(encode_all(marked, rows, 2048))


def test_generated_conversations_give_the_same_targets_with_and_without_markers():
    rows = list(conversations(40))
    for style in ("chatml", "llama", "mistral", "tulu"):
        plain, marked = style_tokenizer(style), style_tokenizer(style, markers=True)
        assert list(encode_all(plain, rows, 2048)) == list(encode_all(marked, rows, 2048))

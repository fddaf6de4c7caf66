"""Target masks against hand-written ones: in the expected texts, [[ ]] encloses exactly the target tokens."""

import re

import pytest
import torch

from aarlib.data.chat import check_template, collate, encode, render_targets
from aarlib.data.conversations import Conversation
from tests.data.templates import STYLES, style_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi, user."}
SUM = {"role": "user", "content": "What is 2 + 2?"}
FOUR = {"role": "assistant", "content": "It is\n\n    4."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}
RESULT = {"role": "tool", "content": "4"}
CALL_JSON = '{"name": "add", "arguments": {"a": 2, "b": 2}}'

CASES = {
    "single": [HELLO, HI],
    "multi_turn": [SYSTEM, HELLO, HI, SUM, FOUR],
    "tool": [SUM, CALL, RESULT, FOUR],
    "ends_with_user": [HELLO, HI, SUM],
}
EXPECTED = {
    ("chatml", "single"): "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n[[Hi, user.<|im_end|>]]\n",
    ("chatml", "multi_turn"): (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n[[Hi, user.<|im_end|>]]\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n[[It is\n\n    4.<|im_end|>]]\n"
    ),
    ("chatml", "tool"): (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n[[<tool_call>{CALL_JSON}</tool_call><|im_end|>]]\n"
        "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n[[It is\n\n    4.<|im_end|>]]\n"
    ),
    ("chatml", "ends_with_user"): (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n[[Hi, user.<|im_end|>]]\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
    ),
    ("llama", "single"): (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hi, user.<|eot_id|>]]"
    ),
    ("llama", "multi_turn"): (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hi, user.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[It is\n\n    4.<|eot_id|>]]"
    ),
    ("llama", "tool"): (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n[[{CALL_JSON}<|eot_id|>]]"
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[It is\n\n    4.<|eot_id|>]]"
    ),
    ("llama", "ends_with_user"): (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hi, user.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
    ),
    ("mistral", "single"): "<s>[INST] Hello [/INST][[ Hi, user.</s>]]",
    ("mistral", "multi_turn"): (
        "<s>[INST] Be brief.\n\nHello [/INST][[ Hi, user.</s>]][INST] What is 2 + 2? [/INST][[ It is\n\n    4.</s>]]"
    ),
    ("mistral", "tool"): (
        f"<s>[INST] What is 2 + 2? [/INST][[ [TOOL_CALLS] {CALL_JSON}</s>]]"
        "[TOOL_RESULTS] 4 [/TOOL_RESULTS][[ It is\n\n    4.</s>]]"
    ),
    ("mistral", "ends_with_user"): "<s>[INST] Hello [/INST][[ Hi, user.</s>]][INST] What is 2 + 2? [/INST]",
    ("tulu", "single"): "<|endoftext|><|user|>\nHello\n<|assistant|>\n[[Hi, user.<|endoftext|>]]",
    ("tulu", "multi_turn"): (
        "<|endoftext|><|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\n[[Hi, user.<|endoftext|>]]\n"
        "<|user|>\nWhat is 2 + 2?\n<|assistant|>\n[[It is\n\n    4.<|endoftext|>]]"
    ),
    ("tulu", "tool"): (
        f"<|endoftext|><|user|>\nWhat is 2 + 2?\n<|assistant|>\n[[{CALL_JSON}<|endoftext|>]]\n"
        "<|tool|>\n4\n<|assistant|>\n[[It is\n\n    4.<|endoftext|>]]"
    ),
    ("tulu", "ends_with_user"): (
        "<|endoftext|><|user|>\nHello\n<|assistant|>\n[[Hi, user.<|endoftext|>]]\n<|user|>\nWhat is 2 + 2?\n"
    ),
}


def conversation(messages, tools=None):
    return Conversation("rows.jsonl:1", messages, tools)


def marked(tokenizer, encoded):
    """Target tokens in [[ ]], one token decoded at a time (ASCII text, so every token is whole characters)."""
    pieces = [
        f"[[{token}]]" if is_target else token
        for token, is_target in zip(map(tokenizer.decode, encoded.input_ids), encoded.target_mask, strict=True)
    ]
    return "".join(pieces).replace("]][[", "")


@pytest.mark.parametrize("trim_offsets", [False, True], ids=["offsets", "trimmed"])
@pytest.mark.parametrize("merges", [0, 60], ids=["bytes", "bpe"])
@pytest.mark.parametrize("markers", [False, True], ids=["prefixes", "markers"])
@pytest.mark.parametrize(("style", "case"), EXPECTED)
def test_targets_are_assistant_text_and_end_of_turn(style, case, markers, merges, trim_offsets):
    tokenizer = style_tokenizer(style, markers, merges, trim_offsets)
    encoded = encode(tokenizer, conversation(CASES[case]), sequence_length=10_000)
    assert marked(tokenizer, encoded) == EXPECTED[style, case]
    assert render_targets(tokenizer, encoded) == EXPECTED[style, case]
    assert not encoded.truncated


@pytest.mark.parametrize("style", STYLES)
def test_one_token_per_byte_gives_the_mask_character_by_character(style):
    tokenizer = style_tokenizer(style, merges=0)
    encoded = encode(tokenizer, conversation(CASES["multi_turn"]), 10_000)
    by_hand = []
    for piece in re.split(r"(\[\[.*?\]\])", EXPECTED[style, "multi_turn"], flags=re.DOTALL):
        text = piece.removeprefix("[[").removesuffix("]]")
        by_hand += [text != piece] * len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert encoded.target_mask == by_hand


@pytest.mark.parametrize("markers", [False, True])
@pytest.mark.parametrize("style", ["llama", "mistral", "tulu"])
def test_beginning_of_text_comes_once(style, markers):
    tokenizer = style_tokenizer(style, markers)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    ids = encode(tokenizer, conversation(CASES["single"]), 100).input_ids
    assert ids[0] == tokenizer.bos_token_id != ids[1]


@pytest.mark.parametrize("style", STYLES)
def test_check_template_accepts_the_four_styles(style):
    check_template(style_tokenizer(style))
    check_template(style_tokenizer(style, markers=True))


def test_a_tokenizer_without_template_is_refused():
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template; give one as a Jinja file in model.chat_template"):
        check_template(tokenizer)


NO_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("case", CASES)
def test_a_template_that_does_not_end_the_turn_is_refused(case):
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = NO_END
    with pytest.raises(ValueError, match="has no end-of-turn token; give a template with"):
        check_template(tokenizer)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*(has no end-of-turn|leaves out the tool call)"):
        encode(tokenizer, conversation(CASES[case]), 100)


def test_a_run_of_spaces_is_no_end_of_turn():
    """Vocabularies in the style of GPT-NeoX add runs of spaces as tokens."""
    tokenizer = style_tokenizer("tulu")
    tokenizer.add_tokens(["  ", " " * 24])
    check_template(tokenizer)
    last = "{% if not loop.last %}{{ eos_token }}{% endif %}"
    whole = tokenizer.chat_template
    for ending in ("", last):
        tokenizer.chat_template = whole.replace("{{ eos_token }}", ending)
        with pytest.raises(ValueError, match="end-of-turn token"):
            check_template(tokenizer)
    tokenizer.chat_template = whole.replace("{{ m.content }}", "<think>\n\n</think>\n\n{{ m.content }}", 1)
    encoded = encode(tokenizer, Conversation("r", [HELLO, HI], None), 1000)
    assert render_targets(tokenizer, encoded).endswith("</think>\n\n[[Hi, user.<|endoftext|>]]")


@pytest.mark.parametrize("markers", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_may_begin_with_the_assistant(style, markers):
    tokenizer = style_tokenizer(style, markers)
    encoded = encode(tokenizer, Conversation("r", [HI, SUM, FOUR], None), 1000)
    text, end = render_targets(tokenizer, encoded), STYLES[style].eos
    found = [target.strip() for target in re.findall(r"\[\[(.*?)\]\]", text, flags=re.DOTALL)]
    assert found == [f"Hi, user.{end}", f"It is\n\n    4.{end}"]


def test_a_single_message_is_read():
    tokenizer = style_tokenizer("chatml")
    assert not any(encode(tokenizer, Conversation("r", [HELLO], None), 1000).target_mask)
    alone = encode(tokenizer, Conversation("r", [HI], None), 1000)
    assert render_targets(tokenizer, alone) == "<|im_start|>assistant\n[[Hi, user.<|im_end|>]]\n"


def test_generation_markers_that_leave_out_the_end_of_turn_are_refused():
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = NO_END.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"
    )
    with pytest.raises(ValueError, match="block ends with '.+', not with an end-of-turn token; move"):
        encode(tokenizer, conversation(CASES["single"]), 100)


def test_whitespace_inside_generation_markers_after_the_end_of_turn_is_no_target():
    tokenizer = style_tokenizer("chatml", markers=True)
    text = tokenizer.chat_template
    tokenizer.chat_template = text.replace("<|im_end|>{% endgeneration %}", "<|im_end|>\n{% endgeneration %}")
    assert tokenizer.chat_template != text
    encoded = encode(tokenizer, conversation(CASES["single"]), 100)
    assert marked(tokenizer, encoded).endswith("[[Hi, user.<|im_end|>]]\n\n")


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_template_that_rewrites_history_is_followed():
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = THINKING
    encoded = encode(tokenizer, conversation([HELLO, HI, SUM, FOUR]), 1000)
    assert marked(tokenizer, encoded) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n[[Hi, user.<|im_end|>]]\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[It is\n\n    4.<|im_end|>]]\n"
    )
    reasoned = encode(tokenizer, conversation([HELLO, {**HI, "reasoning_content": "Be nice."}]), 1000)
    assert marked(tokenizer, reasoned).endswith("<think>\n[[Be nice.\n</think>\n\nHi, user.<|im_end|>]]\n")


def test_other_end_markers_in_history_than_at_the_end_are_followed():
    tokenizer = style_tokenizer("llama")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|begin_of_text|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant{% endif %}"
    )
    encoded = encode(tokenizer, conversation([HELLO, HI, SUM, FOUR]), 1000)
    assert re.findall(r"\[\[.*?\]\]", marked(tokenizer, encoded), re.DOTALL) == [
        "[[Hi, user.<|eot_id|>]]",
        "[[It is\n\n    4.<|begin_of_text|>]]",
    ]


def test_a_template_that_moves_the_system_message_is_followed():
    tokenizer = style_tokenizer("mistral")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages if m.role != 'system' %}"
        "{% if m.role == 'user' %}[INST] {% if loop.index0 >= loop.length - 2 %}{{ messages[0].content }} {% endif %}"
        "{{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    encoded = encode(tokenizer, conversation([SYSTEM, HELLO, HI, SUM, FOUR]), 1000)
    assert marked(tokenizer, encoded) == (
        "<s>[INST] Hello [/INST][[Hi, user.</s>]][INST] Be brief. What is 2 + 2? [/INST][[It is\n\n    4.</s>]]"
    )


def test_a_default_system_message_of_the_template_is_no_target():
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = "<|im_start|>system\nYou help.<|im_end|>\n" + tokenizer.chat_template
    encoded = encode(tokenizer, conversation([HELLO, HI]), 1000)
    assert marked(tokenizer, encoded).count("[[") == 1
    assert marked(tokenizer, encoded).endswith("assistant\n[[Hi, user.<|im_end|>]]\n")


@pytest.mark.parametrize("markers", [False, True])
def test_assistant_text_that_repeats_the_user_or_the_role_is_found(markers):
    tokenizer = style_tokenizer("chatml", markers)
    messages = [
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "assistant"},
        {"role": "assistant", "content": "im_end"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "assistant"},
    ]
    assert marked(tokenizer, encode(tokenizer, conversation(messages), 1000)) == (
        "<|im_start|>user\nassistant<|im_end|>\n<|im_start|>assistant\n[[assistant<|im_end|>]]\n"
        "<|im_start|>assistant\n[[im_end<|im_end|>]]\n<|im_start|>user\nassistant<|im_end|>\n"
        "<|im_start|>assistant\n[[assistant<|im_end|>]]\n"
    )


@pytest.mark.parametrize("style", STYLES)
def test_an_empty_answer_teaches_the_end_of_turn_and_other_scripts_keep_every_byte(style):
    tokenizer = style_tokenizer(style)
    empty = encode(tokenizer, conversation([HELLO, {"role": "assistant", "content": ""}]), 1000)
    assert render_targets(tokenizer, empty).strip().endswith(f"{STYLES[style].eos}]]")
    assert empty.num_targets in (1, 2)
    text = "na\u00efve \u4f60\u597d \U0001f642"
    encoded = encode(tokenizer, conversation([HELLO, {"role": "assistant", "content": text}]), 1000)
    assert f"{text}{STYLES[style].eos}]]" in render_targets(tokenizer, encoded)
    num_bytes = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert encoded.num_targets in (num_bytes + 1, num_bytes + 2)


def test_a_template_that_drops_a_role_a_call_or_the_tools_is_refused():
    tokenizer = style_tokenizer("tulu")
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages %}", "in messages if m.role != 'tool' %}")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template leaves out messages\[2\] of role 'tool'"):
        encode(tokenizer, conversation(CASES["tool"]), 100)
    tokenizer = style_tokenizer("tulu")
    tokenizer.chat_template = re.sub(r"{% for c in .*?endfor %}", "", tokenizer.chat_template)
    with pytest.raises(ValueError, match=r"leaves out the tool call in messages\[1\] \('add'\)"):
        encode(tokenizer, conversation(CASES["tool"]), 100)
    tools = [{"type": "function", "function": {"name": "subtract"}}]
    with pytest.raises(ValueError, match=r"leaves out the list of tools \('subtract'\)"):
        encode(tokenizer, conversation(CASES["single"], tools), 100)


def test_a_conversation_the_template_refuses_is_named():
    tokenizer = style_tokenizer("chatml")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match="rows.jsonl:1: the chat template refuses this conversation: roles must alternate"
    ):
        encode(tokenizer, conversation(CASES["single"]), 100)


def test_truncation_keeps_the_head_and_is_flagged():
    tokenizer = style_tokenizer("chatml")
    whole = encode(tokenizer, conversation(CASES["multi_turn"]), 1000)
    length = len(whole.input_ids)
    assert not encode(tokenizer, conversation(CASES["multi_turn"]), length).truncated
    cut = encode(tokenizer, conversation(CASES["multi_turn"]), length - 5)
    assert cut.truncated
    assert cut.input_ids == whole.input_ids[:-5]
    assert cut.target_mask == whole.target_mask[:-5]
    assert encode(tokenizer, conversation(CASES["multi_turn"]), 8).num_targets == 0


def test_collate_pads_right_to_a_multiple_and_not_beyond_the_sequence_length():
    tokenizer = style_tokenizer("chatml", merges=0)
    rows = [encode(tokenizer, conversation(CASES[case]), 60) for case in ("single", "multi_turn")]
    lengths = [len(row.input_ids) for row in rows]
    assert lengths == [35, 60]
    batch = collate(rows, pad_token_id=tokenizer.pad_token_id)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 64)
    )
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for row, ids, labels in zip(rows, batch["input_ids"], batch["labels"], strict=True):
        size = len(row.input_ids)
        assert ids[:size].tolist() == row.input_ids
        assert ids[size:].eq(tokenizer.pad_token_id).all()
        assert labels[size:].eq(-100).all()
        assert labels.ne(-100).nonzero().flatten().tolist() == [i for i, flag in enumerate(row.target_mask) if flag]
        assert torch.equal(labels[labels != -100], ids[labels != -100])
    assert collate(rows, 0, sequence_length=60)["input_ids"].shape == (2, 60)
    assert collate(rows[:1], 0)["input_ids"].shape == (1, 40)
    with pytest.raises(ValueError, match="collate got no rows"):
        collate([], 0)

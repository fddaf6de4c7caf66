"""Conversations to token rows whose targets are the assistant's text and end-of-turn tokens, and nothing else."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aarlib.data.conversations import Conversation, ReadReport, read_conversations
from aarlib.data.sampling import in_fraction, row_hash
from aarlib.data.targets import Messages, Render, assistant_spans, token_mask

__all__ = [
    "Conversation",
    "Encoded",
    "ReadReport",
    "check_template",
    "collate",
    "encode",
    "in_fraction",
    "read_conversations",
    "render_targets",
    "row_hash",
]

IGNORED = -100
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Encoded(NamedTuple):
    row_id: str
    input_ids: list[int]
    target_mask: list[bool]
    """True where the token is assistant text or its end-of-turn token (not shifted)."""
    truncated: bool
    documents: tuple[int, ...] = ()
    """Token counts of the documents in a packed row; empty for a row that is one document."""
    unit: int = -1
    """Number of the unit of rows that a window of text belongs to; -1 for a conversation."""

    @property
    def num_targets(self) -> int:
        """Targets that have a position before them to be predicted from."""
        return sum(self.target_mask[1:])


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError unless the tokenizer is fast and its chat template ends an assistant turn with a special token."""
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {name!r} gives no character offsets; use its fast version")
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer {name!r} has no chat template; give one as a Jinja file in model.chat_template")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    encode(tokenizer, Conversation(f"chat template of {name!r}", turns, None), sequence_length=1 << 20)


def encode(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, sequence_length: int) -> Encoded:
    """Apply the tokenizer's chat template and mark the targets; cut at `sequence_length` tokens.

    ValueError, naming the row, where the template refuses the conversation, leaves a message out, or does not show
    where the assistant's turns end.
    """
    row_id, messages, tools = conversation
    render = _renderer(tokenizer, tools)
    try:
        text = render(messages, False)
        _check_nothing_dropped(render, messages, tools, text)
        if _has_generation_markers(tokenizer, tools):
            ids, mask = _encode_with_markers(tokenizer, messages, tools)
        else:
            spans = assistant_spans(render, messages, list(_end_of_turn_tokens(tokenizer)))
            tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids, mask = tokens["input_ids"], token_mask(text, tokens["offset_mapping"], spans)
    except TemplateError as error:
        raise ValueError(f"{row_id}: the chat template refuses this conversation: {error}") from error
    except ValueError as error:
        raise ValueError(f"{row_id}: {error}") from error
    return Encoded(row_id, list(ids[:sequence_length]), mask[:sequence_length], truncated=len(ids) > sequence_length)


def collate(
    rows: Sequence[Encoded], pad_token_id: int, multiple: int = 8, sequence_length: int | None = None
) -> dict[str, Int[Tensor, "B S"]]:
    """Right-padded `input_ids`, `attention_mask` and `labels` (-100 = no target; not shifted).

    S is the longest row rounded up to `multiple`, but at most `sequence_length`.
    """
    if not rows:
        raise ValueError("collate got no rows; a batch needs at least one")
    longest = max(len(row.input_ids) for row in rows)
    length = -(-longest // multiple) * multiple
    if sequence_length is not None:
        length = max(longest, min(length, sequence_length))
    input_ids = torch.full((len(rows), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for index, row in enumerate(rows):
        size = len(row.input_ids)
        ids = torch.tensor(row.input_ids, dtype=torch.long)
        input_ids[index, :size] = ids
        attention_mask[index, :size] = 1
        labels[index, :size] = ids.where(torch.tensor(row.target_mask, dtype=torch.bool), IGNORED)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def render_targets(tokenizer: PreTrainedTokenizerBase, encoded: Encoded, marks: tuple[str, str] = ("[[", "]]")) -> str:
    """The row as text with each run of target tokens between `marks`."""
    pieces: list[str] = []
    end, shown = 0, 0
    for is_target, run in groupby(encoded.target_mask):
        end += len(list(run))
        text = _decode(tokenizer, encoded.input_ids[:end])
        piece, shown = text[shown:], len(text)
        pieces.append(f"{marks[0]}{piece}{marks[1]}" if is_target else piece)
    return "".join(pieces)


def _renderer(tokenizer: Any, tools: list[dict[str, Any]] | None) -> Render:
    def render(messages: Messages, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    return render


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _has_generation_markers(tokenizer: Any, tools: list[dict[str, Any]] | None) -> bool:
    return _GENERATION_MARKER.search(tokenizer.get_chat_template(tools=tools)) is not None


def _end_of_turn_tokens(tokenizer: Any) -> dict[str, int]:
    """Every token that can end a turn: the special and the added ones, except runs of whitespace."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {token: index for token, index in {**tokenizer.get_added_vocab(), **special}.items() if token.strip()}


def _encode_with_markers(
    tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None
) -> tuple[list[int], list[bool]]:
    tokens = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    ids, mask = tokens["input_ids"], [bool(flag) for flag in tokens["assistant_masks"]]
    ends = set(_end_of_turn_tokens(tokenizer).values())
    for start, stop in _runs(mask):
        last = stop - 1
        while last > start and ids[last] not in ends and not _decode(tokenizer, [ids[last]]).strip():
            last -= 1
        if ids[last] not in ends:
            raise ValueError(
                f"the template's {{% generation %}} block ends with {_decode(tokenizer, [ids[last]])!r}, not with an "
                "end-of-turn token; move {% endgeneration %} behind that token (model.chat_template)"
            )
        mask[last + 1 : stop] = [False] * (stop - last - 1)
    if not any(mask) and any(message["role"] == "assistant" for message in messages):
        raise ValueError("the template's {% generation %} markers enclose no assistant message")
    return ids, mask


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of True."""
    position = 0
    for flag, run in groupby(list(mask)):
        start, position = position, position + len(list(run))
        if flag:
            yield start, position


def _check_nothing_dropped(render: Render, messages: Messages, tools: list[dict[str, Any]] | None, text: str) -> None:
    """ValueError where the template silently ignores a message of some role, a tool call or the list of tools."""
    for index, message in enumerate(messages):
        given = message["role"] != "assistant" and message["content"].strip()
        if given and _is_ignored(render, messages, index, text):
            raise ValueError(
                f"the chat template leaves out messages[{index}] of role {message['role']!r}; "
                "give a template that renders that role (model.chat_template)"
            )
        _check_names(message.get("tool_calls") or [], text, f"the tool call in messages[{index}]")
    _check_names(tools or [], text, "the list of tools")


def _is_ignored(render: Render, messages: Messages, index: int, text: str) -> bool:
    if len(messages) == 1:
        return False
    try:
        return render([*messages[:index], *messages[index + 1 :]], False) == text
    except TemplateError:
        return False


def _check_names(functions: Sequence[dict[str, Any]], text: str, what: str) -> None:
    for function in functions:
        name = function.get("function", function).get("name", "")
        if name not in text:
            raise ValueError(
                f"the chat template leaves out {what} ({name!r}); "
                "give a template that renders tool calls (model.chat_template)"
            )

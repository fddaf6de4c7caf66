"""Which characters of a rendered conversation the assistant produced: spans of its text and end-of-turn markers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""(messages, add_generation_prompt) -> text."""

_PLACEHOLDER = "\u27e6assistant text\u27e7"
_GENERATED_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")


class Span(NamedTuple):
    """Characters [start, end)."""

    start: int
    end: int


def assistant_spans(render: Render, messages: Messages, end_markers: Sequence[str]) -> list[Span]:
    """One span per assistant message: what the model generates after the prompt, through its end-of-turn marker.

    A marker is one of `end_markers`, the tokenizer's special and added tokens; whitespace after it is the template's.
    Where the template puts something of its own before plain text (an empty thinking block, a channel header) the span
    starts at the text. A template that renders a turn differently once it is history is followed by substituting the
    text; where that fails too, ValueError.
    """
    text = render(messages, False)
    markers = tuple(sorted(end_markers, key=len, reverse=True))
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _between_prefixes(render, messages, index, text, markers)
        span = span or _around_substitute(render, messages, index, text, markers)
        if span is None or (spans and span.start < spans[-1].end):
            raise ValueError(
                f"messages[{index}]: cannot tell where the chat template puts this assistant message, or it has no "
                "end-of-turn token; give a template with {% generation %} markers, or one that ends each assistant "
                "message with a special token (model.chat_template)"
            )
        spans.append(span)
    return spans


def _between_prefixes(
    render: Render, messages: Messages, index: int, text: str, markers: tuple[str, ...]
) -> Span | None:
    """The turn as the difference of two renderings, if both are prefixes of `text`; the first message has no prompt."""
    if index == 0:
        return None
    try:
        prompt = render(messages[:index], True)
        turn = render(messages[: index + 1], False).rstrip()
    except TemplateError:
        return None
    if not (text.startswith(turn) and turn.startswith(prompt)):
        return None
    marker = next((marker for marker in markers if turn[len(prompt) :].endswith(marker.rstrip())), None)
    if marker is None:
        return None
    scaffold = _scaffold(turn[len(prompt) :].removesuffix(marker.rstrip()), messages[index])
    return Span(len(prompt) + len(scaffold), len(turn))


def _scaffold(body: str, message: dict[str, Any]) -> str:
    """What the template itself puts between the prompt and plain assistant text; whitespace alone counts as text."""
    content = message["content"].strip()
    if any(message.get(name) for name in _GENERATED_FIELDS) or not content or not body.rstrip().endswith(content):
        return ""
    scaffold = body.rstrip()[: -len(content)]
    return scaffold if scaffold.strip() else ""


def _around_substitute(
    render: Render, messages: Messages, index: int, text: str, markers: tuple[str, ...]
) -> Span | None:
    """The span of plain text found by rendering the conversation with a placeholder in its stead."""
    message = messages[index]
    if message.get("tool_calls") or not message["content"].strip():
        return None
    substituted = [*messages[:index], {**message, "content": _PLACEHOLDER}, *messages[index + 1 :]]
    try:
        before, found, after = render(substituted, False).partition(_PLACEHOLDER)
        if_last = render(substituted[: index + 1], False).partition(_PLACEHOLDER)[2]
    except TemplateError:
        return None
    if not found or _PLACEHOLDER in after or not (text.startswith(before) and text.endswith(after)):
        return None
    marker = next((marker for marker in markers if after.lstrip().startswith(marker)), None)
    if marker is None or not if_last.lstrip().startswith(markers) or len(before) + len(after) > len(text):
        return None
    end = len(text) - len(after.lstrip()) + len(marker)
    return Span(len(before), end)


def token_mask(text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[bool]:
    """Per token whether it belongs to a span. One that reaches outside belongs to it only if the rest is whitespace.

    `offsets` are those of one tokenisation of `text`. Some tokenizers leave leading spaces out of them (an indentation
    token then has zero width), so a token is taken to start where the one before it ended.
    """
    mask: list[bool] = []
    remaining = iter(spans)
    span = next(remaining, None)
    previous_end = 0
    for first, end in offsets:
        start = min(first, previous_end)
        previous_end = max(previous_end, end)
        while span is not None and span.end <= start:
            span = next(remaining, None)
        mask.append(span is not None and _inside(text, start, end, span))
    return mask


def _inside(text: str, start: int, end: int, span: Span) -> bool:
    overlaps = end > span.start or start == end == span.start
    return overlaps and not text[start : span.start].strip() and not text[span.end : end].strip()

"""What a run would make of its conversations: how many are kept, held out, truncated, and how much is target."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from aarlib.data.chat import Encoded, encode
from aarlib.data.conversations import Conversation, OnBadRow, ReadReport
from aarlib.data.sampling import in_fraction


@dataclass
class Survey:
    conversations: int = 0
    """Read, before the sample is drawn."""
    kept: int = 0
    """In the sample and accepted by the chat template; the counts below are of these."""
    held_out: int = 0
    """Held out by hash, with a target to evaluate on."""
    train: int = 0
    """Not held out; those without targets take a place in a batch and add nothing to its loss."""
    truncated: int = 0
    without_targets: int = 0
    """No assistant turn, or none before the cut."""
    tokens: int = 0
    targets: int = 0
    examples: list[Encoded] = field(default_factory=list)


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    sequence_length: int,
    on_bad_row: OnBadRow = "error",
    report: ReadReport | None = None,
) -> Iterator[Encoded]:
    """`encode` over many; with on_bad_row = "skip" a conversation that the template refuses is counted in `report`."""
    for conversation in conversations:
        try:
            encoded = encode(tokenizer, conversation, sequence_length)
        except ValueError as error:
            if on_bad_row == "error":
                raise
            if report is not None:
                report.skip(str(error))
            continue
        yield encoded


def survey(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    *,
    sequence_length: int,
    sample: float = 1.0,
    held_out: float = 0.0,
    num_examples: int = 0,
    on_bad_row: OnBadRow = "error",
    report: ReadReport | None = None,
) -> Survey:
    """One pass in constant memory; the examples are the first rows with targets."""
    result = Survey()
    sampled = _counted(conversations, sample, result)
    for row in encode_all(tokenizer, sampled, sequence_length, on_bad_row, report):
        result.kept += 1
        result.truncated += row.truncated
        result.tokens += len(row.input_ids)
        result.targets += row.num_targets
        is_held_out = in_fraction(row.row_id, held_out, "held_out")
        result.train += not is_held_out
        if not row.num_targets:
            result.without_targets += 1
            continue
        result.held_out += is_held_out
        if len(result.examples) < num_examples:
            result.examples.append(row)
    return result


def _counted(conversations: Iterable[Conversation], sample: float, result: Survey) -> Iterator[Conversation]:
    for conversation in conversations:
        result.conversations += 1
        if in_fraction(conversation.row_id, sample, "sample"):
            yield conversation

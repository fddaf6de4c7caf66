"""The nano tokenizer: byte-level BPE with single-digit numbers, a chat template and four special tokens."""

from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BETWEEN_DOCUMENTS, START_OF_TURN, END_OF_TURN, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class SpecialIds(NamedTuple):
    bos: int
    eos: int
    pad: int


def special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialIds:
    found = [tokenizer.convert_tokens_to_ids(token) for token in (BETWEEN_DOCUMENTS, END_OF_TURN, PAD)]
    ids = [token_id for token_id in found if isinstance(token_id, int)]
    if len(ids) != 3:
        raise ValueError(
            f"the tokenizer lacks one of {BETWEEN_DOCUMENTS}, {END_OF_TURN}, {PAD}: it is no nano tokenizer"
        )
    return SpecialIds(*ids)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """End of turn is eos; nothing is added to a text on its own, so a prompt never gets two document marks."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BETWEEN_DOCUMENTS, START_OF_TURN, END_OF_TURN, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size = {vocab_size} is more than the text gives ({bpe.get_vocab_size()}); lower it")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BETWEEN_DOCUMENTS,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def render(messages: Iterable[dict[str, str]]) -> str:
    """The chat template's text of a conversation, without the template engine."""
    return "".join(f"{START_OF_TURN}{m['role']}\n{m['content']}{END_OF_TURN}\n" for m in messages)

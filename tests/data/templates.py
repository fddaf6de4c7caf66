"""Four chat template styles, each with and without generation markers, and small byte-level tokenizers for them."""

from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = [
    "Hello there, what is 2 + 2? It is 4.",
    "Use the tool, please.",
    "    indented\n\n  text",
    "assistant user system tool",
]


class Style(NamedTuple):
    template: str
    """BEGIN and END stand around what the assistant generates; they become generation markers, or nothing."""
    special: tuple[str, ...]
    bos: str | None
    eos: str


CHATML = Style(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>END"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    None,
    "<|im_end|>",
)
LLAMA = Style(
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content | trim }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|eot_id|>END"
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
    "<|eot_id|>",
)
MISTRAL = Style(
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system + m.content }} [/INST]{% set ns.system = '' %}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]"
    "{% else %}BEGIN {{ m.content }}"
    "{% for c in m.tool_calls %}[TOOL_CALLS] {{ c.function | tojson }}{% endfor %}{{ eos_token }}END"
    "{% endif %}{% endfor %}",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
)
TULU = Style(
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}END"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ("<|endoftext|>",),
    "<|endoftext|>",
    "<|endoftext|>",
)
STYLES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "tulu": TULU}


def template(style: Style, markers: bool) -> str:
    begin, end = ("{% generation %}", "{% endgeneration %}") if markers else ("", "")
    return style.template.replace("BEGIN", begin).replace("END", end)


def byte_level(special: tuple[str, ...], merges: int, trim_offsets: bool = False) -> Tokenizer:
    """Byte-level BPE with `merges` merges; 0 gives one token per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 1 + merges,
        special_tokens=["<|pad|>", *special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def style_tokenizer(
    name: str, markers: bool = False, merges: int = 60, trim_offsets: bool = False
) -> PreTrainedTokenizerFast:
    """A small tokenizer in the style `name`; like the real ones it adds a BOS of its own when called plainly."""
    style = STYLES[name]
    backend = byte_level(style.special, merges, trim_offsets)
    if style.bos:
        bos = processors.TemplateProcessing(
            single=f"{style.bos} $A", special_tokens=[(style.bos, backend.token_to_id(style.bos))]
        )
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=style.bos,
        eos_token=style.eos,
        pad_token="<|pad|>",
        additional_special_tokens=list(style.special),
        chat_template=template(style, markers),
        clean_up_tokenization_spaces=False,
    )

"""Tokenizers of characters and of words, lm-eval tasks written on the spot, and a model that gives canned answers."""

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from aarlib.aar.attach import attach_aar
from aarlib.aar.config import AARConfig
from tests.tiny import tiny_model

SPECIALS = ["<pad>", "<s>", "</s>", "<|end|>", "<|user|>"]
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def as_fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|end|>", "<|user|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return as_fast(tokenizer)


def tiny_pair(randomised: bool):
    model = tiny_model("olmoe", vocab_size=128)
    if not randomised:
        return model, None
    return model, attach_random(model, seed=1)


def attach_random(model, seed: int):
    handle = attach_aar(model, AARConfig(layers=(1, 2), window=6), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in handle.trainable():
            parameter.normal_(generator=generator)
    return handle


def write_task(folder: Path, name: str, documents: list[dict], **fields) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": 3.0},
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(config))


def write_choice(folder: Path) -> None:
    documents = [
        {"question": f"{'x' * (3 * i)} {i} plus {i} is", "choices": [str(2 * i), "many words", "no"]} for i in range(6)
    ]
    write_task(
        folder,
        "canned_choice",
        documents,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target=0,
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )


def write_generation(folder: Path, questions: list[str], name="canned_generation", until=("Question:",), **generation):
    write_task(
        folder,
        name,
        [{"question": question, "answer": "none"} for question in questions],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": list(until), "do_sample": False, "max_gen_toks": 12, **generation},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )


class ChainConfig(PretrainedConfig):
    model_type = "chain"


class Chain(PreTrainedModel, GenerationMixin):
    """A model whose next token is a function of the last one: it gives canned answers."""

    config_class = ChainConfig

    def __init__(self, following: list[int]):
        super().__init__(ChainConfig(vocab_size=len(following), max_position_embeddings=64, num_hidden_layers=1))
        self.table = nn.Parameter(20.0 * nn.functional.one_hot(torch.tensor(following), len(following)).float())

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.table[input_ids])


CHAINS = [
    ["alpha", "seven", "Question:", "eight", "<|end|>", "garbage"],
    ["beta", "one", "two", "three", "four", "five", "six", "nine", "<|end|>"],
    ["gamma", "left", "left"],
    ["garbage", "garbage"],
]


def chain_pair():
    words = list(dict.fromkeys(word for chain in CHAINS for word in chain if word not in SPECIALS))
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    following = list(range(len(vocabulary)))
    for chain in CHAINS:
        for word, after in zip(chain, chain[1:], strict=False):
            following[vocabulary[word]] = vocabulary[after]
    return Chain(following), as_fast(tokenizer)

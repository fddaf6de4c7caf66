"""The four styles on the GPT-2 and Mistral vocabularies; test_chat.py does the same on generated ones."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aarlib.data.chat import check_template, encode, render_targets
from tests.data.templates import STYLES, template
from tests.data.test_chat import CASES, EXPECTED, conversation


def gpt2(folder, style, markers):
    backend = Tokenizer(models.BPE.from_file(str(folder / "gpt2_vocab.json"), str(folder / "gpt2_merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens(list(STYLES[style].special))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=STYLES[style].bos,
        eos_token=STYLES[style].eos,
        chat_template=template(STYLES[style], markers),
    )


@pytest.mark.parametrize("markers", [False, True], ids=["prefixes", "markers"])
@pytest.mark.parametrize("style", STYLES)
def test_gpt2_vocabulary(shared_data, style, markers):
    tokenizer = gpt2(shared_data / "tokenizer", style, markers)
    check_template(tokenizer)
    for case in CASES:
        encoded = encode(tokenizer, conversation(CASES[case]), 1000)
        assert render_targets(tokenizer, encoded) == EXPECTED[style, case]


@pytest.mark.parametrize("markers", [False, True], ids=["prefixes", "markers"])
def test_mistral_sentencepiece(shared_data, tmp_path, markers):
    shutil.copy(shared_data / "tokenizer/mistral_v1_sp.model", tmp_path / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template(STYLES["mistral"], markers)
    check_template(tokenizer)
    for case in CASES:
        encoded = encode(tokenizer, conversation(CASES[case]), 1000)
        assert render_targets(tokenizer, encoded) == EXPECTED["mistral", case]
        assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
    single = encode(tokenizer, conversation(CASES["single"]), 1000)
    targets = [id for id, flag in zip(single.input_ids, single.target_mask, strict=True) if flag]
    assert tokenizer.convert_ids_to_tokens(targets) == ["\u2581Hi", ",", "\u2581user", ".", "</s>"]

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aarlib.nano import WEIGHTS
from aarlib.nano.config import NanoModelConfig, WorldConfig
from aarlib.nano.folder import check_world
from aarlib.nano.scoring import continuation_nats, greedy_answers
from aarlib.nano.tokenizer import render


@pytest.fixture(scope="module")
def bundled():
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        WEIGHTS
    )


def test_the_folder_is_small_and_the_only_weights_of_the_package():
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) < 10e6
    assert [path.parent for path in Path(WEIGHTS).parent.rglob("*.safetensors")] == [WEIGHTS]


def test_geometry_and_world_are_the_defaults(bundled):
    model, _ = bundled
    expected, config = NanoModelConfig(), model.config
    found = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.vocab_size,
    )
    assert found == (expected.num_layers, expected.d_model, expected.num_experts, expected.top_k, expected.vocab_size)
    assert config.model_type == "olmoe" and not config.norm_topk_prob and config.max_position_embeddings == 512
    assert 2e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 4e6
    check_world(WEIGHTS, WorldConfig())


def test_a_folder_of_another_world_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="another world: world.entities_per_subject = 56 there, 57 here"):
        check_world(WEIGHTS, WorldConfig(entities_per_subject=57))
    with pytest.raises(ValueError, match="no nano checkpoint"):
        check_world(tmp_path, WorldConfig())


def test_tokenizer_round_trips_any_text_and_splits_numbers_into_digits(bundled):
    _, tokenizer = bundled
    text = 'Naïve "quotes" 1907, tabs\tand\n\nlines; 47+38: \u4f60\u597d \U0001f600'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234567")) == 7
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert tokenizer.encode("a")[0] != tokenizer.bos_token_id


def test_chat_template_ends_turns_with_eos_and_marks_the_assistant(bundled):
    _, tokenizer = bundled
    messages = [{"role": "user", "content": "Hi 12"}, {"role": "assistant", "content": "Yes."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == render(messages) and text.endswith("Yes.<|im_end|>\n")
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    chosen = [i for i, keep in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if keep]
    assert tokenizer.decode(chosen) == "Yes.<|im_end|>" and chosen[-1] == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert text.startswith(prompt) and text[len(prompt) :].startswith("Yes.")


def test_scores_do_not_depend_on_the_batch(bundled):
    model, tokenizer = bundled
    pairs = [
        ("Question: What?\nAnswer:", " the Oll"),
        ("A", " b"),
        ("Then Mary and John went. Mary gave a ring to", " John"),
    ]
    together = continuation_nats(model, tokenizer, pairs)
    alone = [continuation_nats(model, tokenizer, [pair])[0] for pair in pairs]
    assert together == pytest.approx(alone, rel=1e-5)
    context, whole = (torch.tensor([tokenizer.encode(text)]) for text in (pairs[0][0], "".join(pairs[0])))
    with torch.no_grad():
        loss = model(whole, labels=whole.masked_fill(torch.arange(whole.shape[1]) < context.shape[1], -100)).loss
    assert together[0] == pytest.approx(loss.item() * (whole.shape[1] - context.shape[1]), rel=1e-4)


def test_greedy_answers_follow_each_prompt(bundled):
    model, tokenizer = bundled
    prompts = ["Question: What?\nAnswer:", "Then Mary", "Question: Which?\nAnswer:"]
    together = greedy_answers(model, tokenizer, prompts, max_new_tokens=4)
    assert together == [greedy_answers(model, tokenizer, [prompt], max_new_tokens=4)[0] for prompt in prompts]

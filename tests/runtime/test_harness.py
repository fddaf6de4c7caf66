"""lm-eval on the patched model in memory: the same numbers as direct forwards, for any batch size; where answers stop."""

import json
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance

from aarlib.runtime.harness import HarnessLM, HarnessSettings, end_of_turn_id, score
from aarlib.runtime.harness_tasks import resolve_tasks, task_manager
from tests.runtime.canned import chain_pair, character_tokenizer, tiny_pair, write_choice, write_generation
from tests.tiny import tiny_model


def loglikelihoods(lm: HarnessLM, pairs: list[tuple[str, str]]) -> list[float]:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return [value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)]


PAIRS = [("two and two", " is four"), ("a", " b"), ("a long context" * 6, " end"), ("two and two", " is five!")]


@torch.no_grad()
def direct(model, tokenizer, context: str, continuation: str) -> float:
    prefix, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
    logits = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(float(logits[i - 1, whole[i]]) for i in range(len(prefix), len(whole)))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_loglikelihood_of_the_patched_model_is_that_of_direct_forwards(batch_size):
    tokenizer = character_tokenizer()
    model, handle = tiny_pair(randomised=True)
    lm = HarnessLM(model, tokenizer, batch_size, apply_chat_template=False)
    patched = loglikelihoods(lm, PAIRS)
    assert patched == pytest.approx([direct(model, tokenizer, *pair) for pair in PAIRS], abs=1e-4)
    handle.detach()
    stock = loglikelihoods(lm, PAIRS)
    assert max(abs(a - b) for a, b in zip(patched, stock, strict=True)) > 0.05


@torch.no_grad()
def rolled(model, tokenizer, text: str, length: int) -> float:
    """Every token once, in windows of `length` predictions: <s> before the first, in the last as much context as fits."""
    tokens = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    total = 0.0
    for start in range(1, len(tokens), length):
        end = min(start + length, len(tokens))
        first = max(0, end - 1 - length)
        logits = model(input_ids=torch.tensor([tokens[first : end - 1]])).logits[0].double().log_softmax(-1)
        total += sum(float(logits[i - 1 - first, tokens[i]]) for i in range(start, end))
    return total


def test_a_rolling_likelihood_counts_every_token_of_the_text_once_and_no_bos(tmp_path):
    tokenizer, length = character_tokenizer(), 16
    model = tiny_model("olmoe", vocab_size=128, max_position_embeddings=length)
    texts = ["short", "a text of several windows, the last of them short", "x" * 16, "y z" * 6, "!"]
    found = []
    for batch_size in (1, 4):
        lm = HarnessLM(model, tokenizer, batch_size, apply_chat_template=False)
        requests = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
        found.append(lm.loglikelihood_rolling(requests, disable_tqdm=True))
        assert lm.adds_bos and lm.tok_encode("a")[0] == tokenizer.bos_token_id and lm.num_truncated == 0
    assert found[0] == pytest.approx([rolled(model, tokenizer, text, length) for text in texts], abs=1e-4)
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_scores_and_generations_do_not_depend_on_the_batch_size(tmp_path):
    write_choice(tmp_path)
    write_generation(tmp_path, ["short", "a somewhat longer question", "mid size", "x" * 40], until=["zq"])
    model, handle = tiny_pair(randomised=True)
    manager = task_manager(resolve_tasks(["canned_choice", "canned_generation"], [tmp_path]))
    frames = {}
    for batch_size in (1, 8):
        for task in ("canned_choice", "canned_generation"):
            settings = HarnessSettings(batch_size=batch_size)
            frames[task, batch_size] = score(model, character_tokenizer(), task, manager, settings)
    one, eight = frames["canned_generation", 1], frames["canned_generation", 8]
    assert list(one["responses"].dropna()) == list(eight["responses"].dropna())
    assert len(set(one["responses"].dropna())) > 1
    responses = [
        [float(choice[0][0]) for choice in json.loads(text)]
        for batch_size in (1, 8)
        for text in frames["canned_choice", batch_size]["responses"].dropna()
    ]
    assert torch.tensor(responses[:6]).allclose(torch.tensor(responses[6:]), atol=1e-4)
    assert frames["canned_choice", 1].iloc[0]["value"] == frames["canned_choice", 8].iloc[0]["value"]
    handle.detach()


def test_a_score_carries_documents_settings_and_versions(tmp_path):
    write_choice(tmp_path)
    model, _ = tiny_pair(randomised=False)
    manager = task_manager(resolve_tasks(["canned_choice"], [tmp_path]))
    frame = score(model, character_tokenizer(), "canned_choice", manager, HarnessSettings(batch_size=4, limit=5))
    row = frame[frame["record"] == "score"].iloc[0]
    samples = frame[frame["record"] == "sample"]
    assert row["num_documents"] == len(samples) == 5
    assert row["value"] == pytest.approx(sum(json.loads(text)["acc"] for text in samples["metrics"]) / 5)
    settings = json.loads(row["settings"])
    assert settings["batch_size"] == 4 and settings["limit"] == 5 and settings["num_fewshot"] == 0
    assert settings["task_version"] == 3.0 and settings["dtype"] == "float32"
    assert set(settings["versions"]) == {"aarlib", "lm_eval", "torch", "transformers"}
    assert settings["prefix_token"] == "<s>" and settings["adds_bos"] is True
    assert settings["rolling_stride"] == settings["max_length"]
    assert settings["seeds"]["fewshot"] == 1234 and settings["chat_template_sha256"] is None


def test_requests_cut_to_the_context_are_counted(tmp_path):
    model = tiny_model("olmoe", vocab_size=128, max_position_embeddings=16)
    lm = HarnessLM(model, character_tokenizer(), 2, apply_chat_template=False)
    loglikelihoods(lm, PAIRS)
    assert lm.num_truncated == 3


def chain_samples(folder: Path, batch_size: int, apply_chat_template: bool) -> list[tuple[str, str]]:
    write_generation(folder, ["alpha", "beta", "gamma"])
    manager = task_manager(resolve_tasks(["canned_generation"], [folder]))
    settings = HarnessSettings(batch_size=batch_size, apply_chat_template=apply_chat_template)
    frame = score(*chain_pair(), "canned_generation", manager, settings)
    samples = frame[frame["record"] == "sample"].sort_values("doc_id")
    return [
        (json.loads(text)[0][0].strip(), json.loads(reasons)[0])
        for text, reasons in zip(samples["responses"], samples["stop_reasons"], strict=True)
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_with_a_chat_template_only_the_end_of_turn_stops_an_answer(tmp_path, batch_size):
    assert chain_samples(tmp_path, batch_size, apply_chat_template=True) == [
        ("seven Question: eight", "token <|end|>"),
        ("one two three four five six nine", "token <|end|>"),
        ("left " * 11 + "left", "length"),
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_a_chat_template_the_stop_strings_of_the_task_hold(tmp_path, batch_size):
    first = chain_samples(tmp_path, batch_size, apply_chat_template=False)[0]
    assert first == ("seven", "stop string 'Question:'")


def test_a_templated_request_starts_with_one_bos(tmp_path):
    model, tokenizer = chain_pair()
    lm = HarnessLM(model, tokenizer, 1, apply_chat_template=True)
    prompt = lm.apply_chat_template([{"role": "user", "content": "alpha"}])
    assert lm.tok_encode("alpha").count(tokenizer.bos_token_id) == 1
    assert lm.tok_encode(prompt).count(tokenizer.bos_token_id) == 1
    assert lm.tok_batch_encode([prompt])[0].tolist()[0].count(tokenizer.bos_token_id) == 1
    assert tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer)) == "<|end|>"


def test_a_generation_longer_than_the_context_is_refused(tmp_path):
    write_generation(tmp_path, ["alpha"], max_gen_toks=64)
    manager = task_manager(resolve_tasks(["canned_generation"], [tmp_path]))
    with pytest.raises(ValueError, match=r"generates up to 64 tokens and the model's context is 64"):
        score(*chain_pair(), "canned_generation", manager, HarnessSettings())

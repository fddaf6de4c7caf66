"""lm-eval on the patched model in memory: the same numbers as direct forwards, for any batch size; stops; refusals."""

import json
import shutil
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from aarlib.aar.attach import attach_aar
from aarlib.aar.config import AARConfig
from aarlib.runtime.evaluation import evaluate
from aarlib.runtime.harness import HarnessLM, HarnessSettings, end_of_turn_id, score
from aarlib.runtime.harness_tasks import resolve_tasks, task_manager
from aarlib.training.adapter import save_adapter
from aarlib.training.config import RunConfig
from tests.tiny import tiny_model

SPECIALS = ["<pad>", "<s>", "</s>", "<|end|>", "<|user|>"]
LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"
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


@pytest.mark.parametrize("task", ["humaneval", "humaneval_instruct", "humaneval_plus", "mbpp", "mbpp_plus"])
def test_tasks_that_run_generated_code_are_refused_without_importing_them(task):
    folders = [LM_EVAL_TASKS / "humaneval", LM_EVAL_TASKS / "mbpp"]
    with pytest.raises(ValueError, match=rf"{task}.* runs code that the model wrote"):
        resolve_tasks([task], folders)


def test_a_group_with_an_unsafe_member_is_refused(tmp_path):
    write_choice(tmp_path)
    (tmp_path / "group.yaml").write_text(json.dumps({"group": "mixed", "task": ["canned_choice", "humaneval"]}))
    with pytest.raises(ValueError, match=r"'mixed' runs code .*humaneval"):
        resolve_tasks(["mixed"], [tmp_path, LM_EVAL_TASKS / "humaneval"])


@pytest.mark.slow
def test_an_unknown_task_is_refused_with_near_names(tmp_path):
    write_choice(tmp_path)
    with pytest.raises(ValueError, match=r"no task, group or tag 'gsm8kk'; did you mean 'gsm8k"):
        resolve_tasks(["canned_choice", "gsm8kk"], [tmp_path])


def test_missing_data_is_refused_with_the_remedy(tmp_path):
    write_choice(tmp_path)
    (tmp_path / "canned_choice.jsonl").unlink()
    with pytest.raises(ValueError, match=r"'canned_choice' cannot be loaded .*local data_files"):
        resolve_tasks(["canned_choice"], [tmp_path])


def test_a_task_whose_data_is_a_script_is_refused_with_the_remedy(tmp_path):
    write_choice(tmp_path)
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit")
    path = tmp_path / "canned_choice.yaml"
    changed = {"dataset_path": str(tmp_path / "scripted"), "dataset_kwargs": {}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=r"'canned_choice' cannot be loaded .*scripts are no longer.*local data_files"):
        resolve_tasks(["canned_choice"], [tmp_path])


def test_no_tasks_is_refused():
    with pytest.raises(ValueError, match="evaluate.tasks is empty"):
        resolve_tasks([])


@pytest.mark.ray
def test_every_adapter_and_task_is_scored_once(local_ray, tmp_path):
    base, run_dir = tmp_path / "base", tmp_path / "runs" / "tiny"
    model, _ = tiny_pair(randomised=False)
    model.save_pretrained(base)
    character_tokenizer().save_pretrained(base)
    write_choice(tmp_path / "tasks")
    write_generation(tmp_path / "tasks", ["short", "a longer question"])
    config = RunConfig.from_mapping(
        {
            "name": "tiny",
            "seeds": [0, 1],
            "model": {"name": str(base)},
            "data": {"train": ["unused"]},
            "method": {"aar": {"name": "aar", "layers": [1, 2], "window": 6}},
            "evaluate": {
                "tasks": ["canned_choice", "canned_generation"],
                "include_path": str(tmp_path / "tasks"),
                "num_actors": 2,
            },
        }
    )
    for seed in config.seeds:
        handle = attach_random(model, seed)
        save_adapter(handle, run_dir / f"aar-seed{seed}" / "adapter")
        handle.detach()
    evaluation = evaluate(config, run_dir)
    assert set(evaluation.scores["adapter"]) == {"untouched", "aar-seed0", "aar-seed1"}
    assert len(evaluation.scores) == 3 * 2 and len(evaluation.samples) == 3 * (6 + 2)
    choices = evaluation.samples[evaluation.samples["task"] == "canned_choice"]
    assert choices.groupby("adapter")["responses"].first().nunique() == 3

    parts = {path: path.stat().st_mtime_ns for path in (run_dir / "evaluation" / "parts").iterdir()}
    again = evaluate(config, run_dir)
    assert {path: path.stat().st_mtime_ns for path in (run_dir / "evaluation" / "parts").iterdir()} == parts
    assert again.scores.equals(evaluation.scores)
    with pytest.raises(ValueError, match="setting harness"):
        evaluate(config.updated({"evaluate.batch_size": 2}), run_dir)

    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1.0)
    model.save_pretrained(base)
    shutil.rmtree(run_dir / "evaluation")
    with pytest.raises(ValueError, match="no longer the base that the adapters were trained on"):
        evaluate(config, run_dir)

"""lm-eval on a model in memory: which tasks are allowed, when a generation stops, a score with all its settings."""

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from lm_eval.api.model import CacheHook
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import aarlib
from aarlib.data.chat import Conversation, encode

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}


class HarnessSettings(NamedTuple):
    num_fewshot: int | None = None
    batch_size: int = 16
    apply_chat_template: bool = False
    limit: int | None = None
    max_gen_toks: int | None = None


def end_of_turn_id(tokenizer: Any) -> int:
    """The token with which the chat template ends an assistant turn."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    encoded = encode(tokenizer, Conversation("end of turn", turns, None), sequence_length=1 << 20)
    return [token for token, is_target in zip(encoded.input_ids, encoded.target_mask, strict=True) if is_target][-1]


_HFLM: Any = HFLM


class HarnessLM(_HFLM):
    """HFLM that ends each row of a batch at its own end token, remembers why each generation stopped, and is quiet.

    HFLM alone goes on with a finished row until the whole batch is done and then drops special tokens from the text, so
    that what follows an end-of-turn token would be taken for part of the answer.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, apply_chat_template: bool):
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.end_ids = [tokenizer.eos_token_id]
        if apply_chat_template:
            self.end_ids = sorted({tokenizer.eos_token_id, end_of_turn_id(tokenizer)})
        self.stop_reasons: dict[str, str] = {}
        self.num_truncated = 0
        self._pending: deque[str] = deque()
        self.cache_hook = _StopReasonHook(self._pending, self.stop_reasons)

    @property
    def adds_bos(self) -> bool:
        """Whether a plain text gets a prefix token from the tokenizer (in rolling likelihoods it always has exactly one)."""
        return self.tok_encode("a")[:1] == [self.prefix_token_id]

    @property
    def end_strings(self) -> list[str]:
        return [self.tok_decode([token], skip_special_tokens=False) for token in self.end_ids]

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        rows = super()._model_generate(context, max_length, stop, eos_token_id=self.end_ids, **kwargs)
        self._pending.extend(self._stop_reason(row, stop) for row in rows[:, context.shape[1] :].tolist())
        return rows

    def _stop_reason(self, token_ids: list[int], stop: list[str]) -> str:
        end = next((index for index, token in enumerate(token_ids) if token in self.end_ids), None)
        text = self.tokenizer.decode(token_ids[:end], skip_special_tokens=False)
        found = [string for string in stop if string and string in text]
        if found:
            return f"stop string {min(found, key=text.index)!r}"
        if end is None:
            return "length"
        return f"token {self.tokenizer.convert_ids_to_tokens(token_ids[end])}"

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Without special tokens in the text: HFLM starts it with the prefix token, and would else count p(BOS | BOS)."""
        own, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)
        finally:
            self.add_bos_token = own

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        self.num_truncated += sum(len(context) + len(rest) > self.max_length + 1 for _, context, rest in requests)
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def tok_batch_encode(
        self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **kwargs: Any
    ) -> Any:
        if left_truncate_len:
            self.num_truncated += sum(len(self.tok_encode(string)) > left_truncate_len for string in strings)
        return super().tok_batch_encode(strings, *args, left_truncate_len=left_truncate_len, **kwargs)


class _StopReasonHook(CacheHook):
    """lm-eval calls it once per finished generation, in the order of the batch's rows."""

    def __init__(self, pending: deque[str], reasons: dict[str, str]):
        super().__init__(None)
        self._pending, self._reasons = pending, reasons

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        if attr == "generate_until":
            self._reasons[req[0]] = self._pending.popleft()


def score(model: Any, tokenizer: Any, task: str, manager: TaskManager, settings: HarnessSettings) -> pd.DataFrame:
    """Rows of record `score` (task, metric, filter, value, stderr, num_documents, settings, ...) and `sample`.

    `task` may be a group: its rows are those of its members and the aggregates. A sample row holds one document under
    one filter: doc_id, prompt, target, responses, metrics, stop_reasons (JSON; empty where nothing was generated).
    """
    lm = HarnessLM(model, tokenizer, settings.batch_size, settings.apply_chat_template)
    loaded = manager.load([task])
    for member in loaded["tasks"].values():
        _configure(member, lm, settings)
    _seed_everything()
    results = evaluate(
        lm,
        loaded,
        limit=settings.limit,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.apply_chat_template,
    )
    assert results is not None, "lm-eval returned nothing on rank 0"
    return pd.DataFrame([*_score_rows(results, lm, settings), *_sample_rows(results, lm)])


def _configure(task: Any, lm: HarnessLM, settings: HarnessSettings) -> None:
    """Few-shot, seed, generation; with a chat template the end-of-turn token replaces few-shot stop strings."""
    own = task.get_config("num_fewshot")
    if own is None or (settings.num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    task.set_fewshot_seed(seed=SEEDS["fewshot"])
    if task.get_config("output_type") != "generate_until":
        return
    changes: dict[str, Any] = {}
    if settings.max_gen_toks is not None:
        changes["max_gen_toks"] = settings.max_gen_toks
    if settings.apply_chat_template:
        changes["until"] = lm.end_strings
    task.set_config(key="generation_kwargs", value=changes, update=True)
    wanted = task.config.generation_kwargs.get("max_gen_toks", lm.max_gen_toks)
    if wanted >= lm.max_length:
        raise ValueError(
            f"task {task.task_name!r} generates up to {wanted} tokens and the model's context is {lm.max_length}; "
            "set evaluate.max_gen_toks lower"
        )


def _seed_everything() -> None:
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


def _score_rows(results: Mapping[str, Any], lm: HarnessLM, settings: HarnessSettings) -> Iterator[dict[str, Any]]:
    members = results["group_subtasks"]
    for name, metrics in {**results["results"], **results.get("groups", {})}.items():
        described = json.dumps(_settings_of(name, results, lm, settings), sort_keys=True)
        for key, value in metrics.items():
            metric, separator, filter_name = key.partition(",")
            if not separator or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}", "N/A")
            yield {
                "record": "score",
                "task": name,
                "metric": metric,
                "filter": filter_name,
                "value": float(value),
                "stderr": float("nan") if stderr == "N/A" else float(stderr),
                "higher_is_better": results["higher_is_better"].get(name, {}).get(metric),
                "num_documents": _num_documents(name, results["n-samples"], members),
                "num_truncated": lm.num_truncated,
                "settings": described,
            }


def _num_documents(name: str, counts: Mapping[str, Mapping[str, int]], members: Mapping[str, Sequence[str]]) -> int:
    if name in counts:
        return counts[name]["effective"]
    return sum(_num_documents(member, counts, members) for member in members[name])


def _settings_of(name: str, results: Mapping[str, Any], lm: HarnessLM, settings: HarnessSettings) -> dict[str, Any]:
    config = results["configs"].get(name, {})
    template = lm.tokenizer.chat_template if settings.apply_chat_template else None
    return {
        **settings._asdict(),
        "num_fewshot": results["n-shot"].get(name),
        "fewshot_as_multiturn": settings.apply_chat_template,
        "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        "generation": config.get("generation_kwargs") if config.get("output_type") == "generate_until" else None,
        "end_tokens": lm.end_strings,
        "prefix_token": lm.tok_decode([lm.prefix_token_id], skip_special_tokens=False),
        "adds_bos": lm.adds_bos,
        "max_length": lm.max_length,
        "rolling_stride": lm.max_length,
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "seeds": SEEDS,
        "task_version": results["versions"].get(name),
        "versions": {
            "aarlib": aarlib.__version__,
            **{package: version(package) for package in ("lm_eval", "torch", "transformers")},
        },
    }


def _sample_rows(results: Mapping[str, Any], lm: HarnessLM) -> Iterator[dict[str, Any]]:
    for name, samples in results["samples"].items():
        for sample in samples:
            prompt = sample["arguments"][0][0]
            reasons = [lm.stop_reasons.get(arguments[0]) for arguments in sample["arguments"]]
            yield {
                "record": "sample",
                "task": name,
                "filter": sample["filter"],
                "doc_id": sample["doc_id"],
                "prompt": prompt,
                "target": str(sample["target"]),
                "responses": json.dumps(sample["resps"], default=str),
                "metrics": json.dumps({metric: sample[metric] for metric in sample["metrics"]}, default=str),
                "stop_reasons": json.dumps([reason for reason in reasons if reason]),
            }

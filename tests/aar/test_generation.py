"""Generation with attention-aware routers: alone or in a left-padded batch, cached or not, the same tokens; nothing piles up."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from aarlib import identities
from tests.aar.test_gradients import checkpoint_activations
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

NEW = 6
SETTINGS = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
families = pytest.mark.parametrize("family", FAMILIES)


class Attached:
    def __init__(self, family: str) -> None:
        self.model = tiny_model(family)
        self.handle = identities.default_attach(self.model)
        self.inputs = tiny_inputs(self.model, batch=2, length=12, padding="left")

    def generate(self, row: int | None = None, **settings: Any) -> Tensor:
        """New tokens [rows, NEW] of the left-padded batch, or of one of its prompts alone."""
        inputs = self.inputs
        if row is not None:
            prompt = inputs["input_ids"][row : row + 1, inputs["attention_mask"][row].bool()]
            inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        return self.model.generate(**inputs, **{**SETTINGS, "do_sample": False, **settings})[:, -NEW:]


@families
def test_greedy_alone_equals_inside_a_left_padded_batch_with_and_without_cache(family: str) -> None:
    attached = Attached(family)
    together = attached.generate()
    assert torch.equal(attached.generate(use_cache=False), together)
    for row in range(2):
        assert torch.equal(attached.generate(row)[0], together[row])
        assert torch.equal(attached.generate(row, use_cache=False)[0], together[row])
    attached.handle.enabled = False
    assert not torch.equal(attached.generate(), together)


@families
def test_beams_alone_equal_inside_a_left_padded_batch(family: str) -> None:
    attached = Attached(family)
    together = attached.generate(num_beams=3)
    assert torch.equal(attached.generate(1, num_beams=3)[0], together[1])
    assert torch.equal(attached.generate(num_beams=3, use_cache=False), together)
    if family in ("olmoe", "deepseek_v2", "gpt_oss", "qwen3_5_moe"):
        assert not torch.equal(attached.generate(), together), "the beams chose what greedy chooses"


class Gumbel(LogitsProcessor):
    """Draws a token of each row by the same noise, whatever rows stand beside it: all the mass is then on it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = -torch.empty(scores.shape[-1]).exponential_(generator=self.generator).log()
        chosen = (scores + noise).argmax(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)


@families
def test_sampling_alone_equals_inside_a_left_padded_batch(family: str) -> None:
    attached = Attached(family)
    drawn = {}
    for seed in (0, 1):
        together = drawn[seed] = attached.generate(do_sample=True, logits_processor=[Gumbel(seed)])
        for row in range(2):
            alone = attached.generate(row, do_sample=True, logits_processor=[Gumbel(seed)])
            assert torch.equal(alone[0], together[row])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], attached.generate())


@families
def test_sampling_with_a_seed_is_the_same_with_and_without_cache(family: str) -> None:
    attached, sampled = Attached(family), {}
    for seed, use_cache in ((0, True), (0, False), (1, True)):
        torch.manual_seed(seed)
        sampled[seed, use_cache] = attached.generate(do_sample=True, use_cache=use_cache)
    assert torch.equal(sampled[0, True], sampled[0, False])
    assert not torch.equal(sampled[0, True], sampled[1, True])


def live_tensors() -> int:
    gc.collect()
    return sum(type(item) in (torch.Tensor, torch.nn.Parameter) for item in gc.get_objects())


class CountTensors(StoppingCriteria):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        if input_ids.shape[1] in (25, 45, 62):
            self.counts.append(live_tensors())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize(("family", "with_head"), [("olmoe", False), ("gpt_oss", True), ("qwen3_5_moe", True)])
def test_live_tensors_are_constant_over_50_generated_tokens(family: str, with_head: bool) -> None:
    attached, counter = Attached(family), CountTensors()
    if with_head:
        identities.attach_random_head(attached.model)
    attached.generate(max_new_tokens=53, stopping_criteria=[counter])
    assert len(counter.counts) == 3
    assert len(set(counter.counts)) == 1, counter.counts


@pytest.mark.parametrize(("checkpointing", "with_head"), [(False, False), (True, True)])
def test_live_tensors_are_constant_over_50_training_steps(checkpointing: bool, with_head: bool) -> None:
    attached, counts = Attached("olmoe"), []
    trainable = attached.handle.trainable()
    if with_head:
        trainable += identities.attach_random_head(attached.model).trainable()
    if checkpointing:
        checkpoint_activations(attached.model)
        attached.model.enable_input_require_grads()
    ids = attached.inputs["input_ids"]
    for step in range(50):
        attached.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for name, parameter in trainable:
            assert parameter.grad is not None, name
            parameter.grad = None
        if step in (5, 25, 49):
            counts.append(live_tensors())
    assert len(set(counts)) == 1, counts

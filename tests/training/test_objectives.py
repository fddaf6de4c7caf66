"""next_token_ce against the cross-entropy of the whole model's logits, values and gradients, on all eight families."""

import copy

import pytest
import torch
import torch.nn.functional as F

from aarlib.training.objectives import next_token_ce
from tests.tiny import FAMILIES, tiny_inputs, tiny_model


def batch_for(model, share=0.4, padding="right", batch=3):
    """Labels on a random share of the real tokens; the last row has none."""
    inputs = tiny_inputs(model, batch=batch, length=17, padding=padding)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(inputs["input_ids"].shape, generator=generator) < share
    chosen &= inputs["attention_mask"].bool()
    chosen[-1] = False
    return {**inputs, "labels": inputs["input_ids"].where(chosen, -100)}


def reference(model, batch):
    """Per-row sums from the logits of the whole model."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    labels = batch["labels"][:, 1:]
    ce = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return ce.view(labels.shape).sum(1)


def routers(model):
    return [
        parameter.requires_grad_()
        for name, parameter in model.named_parameters()
        if name.endswith(("mlp.gate.weight", "mlp.router.weight"))
    ]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sums_and_gradients_equal_those_of_the_whole_models_logits(family, padding):
    model = tiny_model(family)
    batch = batch_for(model, padding=padding)
    parameters = routers(model)
    assert len(parameters) >= 2
    expected = reference(model, batch)
    expected_gradients = torch.autograd.grad(expected.sum(), parameters)
    ce_sum, num_targets = next_token_ce(model, batch)
    gradients = torch.autograd.grad(ce_sum.sum(), parameters)
    assert num_targets.tolist() == batch["labels"][:, 1:].ne(-100).sum(1).tolist()
    assert num_targets[0] > 2
    assert expected[0] > 1
    assert ce_sum.dtype == torch.float32
    torch.testing.assert_close(ce_sum, expected, atol=1e-5, rtol=1e-5)
    assert max(gradient.abs().max() for gradient in expected_gradients) > 1e-2
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-5)


def test_an_output_bias_counts():
    model = tiny_model("olmoe")
    without = next_token_ce(model, batch_for(model)).ce_sum
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    head.weight = copy.deepcopy(model.lm_head.weight)
    torch.nn.init.normal_(head.bias)
    model.lm_head = head
    batch = batch_for(model)
    biased = next_token_ce(model, batch).ce_sum
    assert (biased - without).abs().max() > 0.1
    torch.testing.assert_close(biased, reference(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_chunks", [1, 3, 1000])
def test_the_number_of_chunks_changes_nothing(num_chunks):
    model = tiny_model("qwen3_moe")
    batch = batch_for(model)
    with torch.no_grad():
        torch.testing.assert_close(
            next_token_ce(model, batch, num_chunks).ce_sum, next_token_ce(model, batch).ce_sum, atol=1e-5, rtol=0
        )


def test_a_batch_without_targets_gives_connected_zeros():
    model = tiny_model("olmoe")
    parameters = routers(model)
    batch = batch_for(model)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    ce_sum, num_targets = next_token_ce(model, batch)
    assert ce_sum.tolist() == [0.0, 0.0, 0.0]
    assert num_targets.tolist() == [0, 0, 0]
    ce_sum.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in parameters)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_output_embedding_runs_equally_often_whatever_the_targets(share):
    model = tiny_model("olmoe")
    routers(model)
    sizes = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape))
    batch = batch_for(model, share)
    ce_sum, num_targets = next_token_ce(model, batch)
    assert len(sizes) == 8
    assert sum(shape[0] for shape in sizes) == num_targets.sum()
    ce_sum.sum().backward()
    assert len(sizes) == 16


def test_other_rows_and_padding_do_not_change_a_row():
    model = tiny_model("mixtral")
    batch = batch_for(model, padding="none")
    alone = {name: tensor[:1] for name, tensor in batch.items()}
    longer = {
        name: F.pad(tensor, (0, 7), value={"labels": -100, "attention_mask": 0, "input_ids": 0}[name])
        for name, tensor in batch.items()
    }
    with torch.no_grad():
        expected = next_token_ce(model, batch)
        torch.testing.assert_close(next_token_ce(model, alone).ce_sum, expected.ce_sum[:1], atol=1e-5, rtol=0)
        torch.testing.assert_close(next_token_ce(model, longer).ce_sum, expected.ce_sum, atol=1e-5, rtol=0)


def test_a_bfloat16_model_is_summed_in_float32():
    model = tiny_model("olmoe").to(torch.bfloat16)
    batch = batch_for(model)
    with torch.no_grad():
        ce_sum = next_token_ce(model, batch).ce_sum
        assert ce_sum.dtype == torch.float32
        torch.testing.assert_close(ce_sum, reference(model, batch), atol=1e-3, rtol=1e-3)

"""Gradients of a patched model against autograd through the plain reference (tests/aar/reference.py), document by document."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aarlib import identities
from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.aar.config import AARConfig
from aarlib.moe.anatomy import anatomy
from aarlib.moe.loading import ExpertsImplementation
from tests.aar.reference import Reference
from tests.aar.test_exact import MODELS, TOLERANCE, WINDOW, document, padded
from tests.tiny import FAMILIES, tiny_inputs, tiny_model

DOCUMENTS = tuple(document(seed, length) for seed, length in ((60, 13), (61, 9)))
"""On which stock models differ between padded and alone by no more than float32 rounding (1e-6), linear attention too."""
SECOND = tuple(document(seed, length) for seed, length in ((44, 11), (45, 13)))
"""Another micro-batch, of another shape."""


class Gradients(NamedTuple):
    routers: dict[str, Tensor]  # named <layer>.<parameter>
    hidden: list[Tensor]  # by decoder layer: of its input, the documents' tokens one after another


NUM_TARGETS = sum(len(tokens) - 1 for tokens in DOCUMENTS)


def mean_ce_part(logits: Tensor, tokens: Tensor) -> Tensor:
    """One document's part of the mean CE over the targets of DOCUMENTS."""
    return cross_entropy(logits[:-1], tokens[1:], reduction="sum") / NUM_TARGETS


@contextmanager
def layer_inputs(model: Any) -> Iterator[list[Tensor]]:
    """The hidden states entering each decoder layer, in order of the calls, with their gradients retained."""
    seen: list[Tensor] = []

    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.retain_grad()
            seen.append(hidden)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.get_decoder().layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def expected_gradients(name: str, handle: RoutingHandle, documents: Sequence[Tensor]) -> Gradients:
    family = name.removesuffix("_sliding")
    copies = {
        index: {key: tensor.detach().clone().requires_grad_() for key, tensor in router.named_parameters()}
        for index, router in handle.routers.items()
    }
    reference = Reference(tiny_model(family, **MODELS[name]), copies, WINDOW)
    hidden = []
    with layer_inputs(reference.model) as seen:
        for tokens in documents:
            seen.clear()
            embeddings = reference.model.get_input_embeddings()(tokens).detach().requires_grad_()
            mean_ce_part(reference.observe(tokens, embeddings).logits, tokens).backward()
            hidden.append([tensor.grad[0] for tensor in seen])
    routers = {f"{index}.{key}": tensor.grad for index, own in copies.items() for key, tensor in own.items()}
    return Gradients(routers, [torch.cat(parts) for parts in zip(*hidden, strict=True)])


def backward_of(model: Any, documents: Sequence[Tensor], side: str) -> list[Tensor]:
    """Add the gradients of the mean CE of a padded batch; gives those of the layers' inputs."""
    batch = padded(documents, side)
    embeddings = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    valid = batch.attention_mask.bool()
    with layer_inputs(model) as seen:
        masks = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        logits = model(inputs_embeds=embeddings, use_cache=False, **masks).logits
        forwards = list(seen)
        sum(mean_ce_part(logits[row][valid[row]], tokens) for row, tokens in enumerate(documents)).backward()
    return [torch.cat([tensor.grad[row][valid[row]] for row in range(len(documents))]) for tensor in forwards]


def checkpoint_activations(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.get_decoder().layers:
        layer.training = True


def gradients_of(handle: RoutingHandle) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in handle.trainable()}


def own_error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value of this tensor, however small."""
    return float((found - expected).abs().max() / expected.abs().max())


def check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, f"{name}: nothing to compare"
        assert own_error(found[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("side", "checkpointing"), [("left", False), ("right", True)])
def test_gradients_of_routers_and_hidden_states(name: str, side: str, checkpointing: bool) -> None:
    model = tiny_model(name.removesuffix("_sliding"), **MODELS[name])
    handle = identities.default_attach(model, window=WINDOW)
    if checkpointing:
        checkpoint_activations(model)
    expected = expected_gradients(name, handle, DOCUMENTS)
    hidden = backward_of(model, DOCUMENTS, side)
    check(gradients_of(handle), expected.routers)
    assert len(hidden) == len(expected.hidden) == len(model.get_decoder().layers)
    for layer, (found, wanted) in enumerate(zip(hidden, expected.hidden, strict=True)):
        assert wanted.abs().max() > 1e-3, f"input of layer {layer}: nothing to compare"
        assert own_error(found, wanted) < TOLERANCE, f"input of layer {layer}"


@pytest.mark.parametrize("name", FAMILIES)
def test_router_gradients_do_not_depend_on_how_the_experts_are_computed(name: str) -> None:
    model = tiny_model(name)
    handle = identities.default_attach(model, window=WINDOW)
    found: dict[str, dict[str, Tensor]] = {}
    for implementation in get_args(ExpertsImplementation):
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        backward_of(model, DOCUMENTS, "left")
        found[implementation] = {key: gradient.clone() for key, gradient in gradients_of(handle).items()}
        for _, parameter in handle.trainable():
            parameter.grad = None
    assert set(found) == {"eager", "grouped_mm", "batched_mm"}
    for gradients in found.values():
        for key, expected in found["eager"].items():
            assert expected.abs().max() > 1e-4, f"{key}: nothing to compare"
            assert identities.error(gradients[key], expected) < 1e-4, key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_do_not_see_each_other(name: str, checkpointing: bool) -> None:
    """Two forwards before the first backward, then both backwards: each uses its own windows, once."""
    model = tiny_model(name.removesuffix("_sliding"), **MODELS[name])
    handle = identities.default_attach(model, window=WINDOW)
    if checkpointing:
        checkpoint_activations(model)
        model.enable_input_require_grads()
    losses = []
    for documents in (DOCUMENTS, SECOND):
        batch = padded(documents, "left")
        logits = model(**batch._asdict(), use_cache=False).logits
        valid = batch.attention_mask.bool()
        losses.append(sum(mean_ce_part(logits[row][valid[row]], tokens) for row, tokens in enumerate(documents)))
    for loss in losses:
        loss.backward()
    check(gradients_of(handle), expected_gradients(name, handle, [*DOCUMENTS, *SECOND]).routers)


@pytest.mark.parametrize("name", MODELS)
def test_without_window_grad_the_windows_are_constants(name: str) -> None:
    """Gradients equal those of the same forward with the windows given as fixed numbers, also with activations computed again,
    and differ from window_grad's: of routers and of hidden states."""
    gradients, hidden = {}, {}
    for case in ("on", "off", "off, checkpointing", "fixed"):
        model = tiny_model(name.removesuffix("_sliding"), **MODELS[name])
        layers = anatomy(model).aar_layers[-2:]
        config = AARConfig(layers=layers, window=WINDOW, window_grad=case == "on")
        handle = attach_aar(model, config)
        identities.randomise(handle)
        if case == "fixed":
            fix_windows(model, handle)
        if case == "off, checkpointing":
            checkpoint_activations(model)
        hidden[case] = backward_of(model, DOCUMENTS, "left")
        gradients[case] = gradients_of(handle)
    earliest = min(gradients["on"], key=lambda key: int(key.split(".")[0]))
    assert own_error(gradients["off"][earliest], gradients["on"][earliest]) > 1e-3
    assert own_error(hidden["off"][0], hidden["on"][0]) > 1e-3
    for case in ("off", "off, checkpointing"):
        for key, expected in gradients["fixed"].items():
            assert own_error(gradients[case][key], expected) < TOLERANCE, (case, key)
            assert identities.error(gradients[case][key], expected) < 1e-6, (case, key)


def fix_windows(model: Any, handle: RoutingHandle) -> None:
    """Replace each router's windows by clones of those of a forward without a graph."""
    kept: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Tensor, Tensor]) -> None:
            kept[index] = args[1].clone()

        return hook

    aware = {index: router for index, router in handle.routers.items() if router.views}
    hooks = [router.register_forward_pre_hook(keep(index)) for index, router in aware.items()]
    with torch.no_grad():
        model(**padded(DOCUMENTS, "left")._asdict(), use_cache=False)
    for hook in hooks:
        hook.remove()
    for index, router in aware.items():
        router.register_forward_pre_hook(lambda _, args, index=index: (args[0], kept[index]))


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_bfloat16_error_is_measured(name: str) -> None:
    """Windows and gradients in bfloat16 against float32 with the same (bfloat16) weights; printed, and bounded loosely."""
    errors = {}
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(name).to(torch.bfloat16).to(dtype)
        handle = identities.default_attach(model, window=WINDOW)
        inputs = tiny_inputs(model, padding="left")
        windows: dict[int, Tensor] = {}
        for index, router in handle.routers.items():
            if router.views:
                router.register_forward_pre_hook(
                    lambda _, args, index=index, into=windows: into.update({index: args[1].detach()})
                )
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        results[dtype] = windows, gradients_of(handle)
    (windows, gradients), (half_windows, half_gradients) = results[torch.float32], results[torch.bfloat16]
    errors["windows"] = max(float((half_windows[index] - windows[index]).abs().max()) for index in windows)
    total = torch.cat([gradient.flatten() for gradient in gradients.values()])
    half = torch.cat([half_gradients[key].flatten() for key in gradients])
    errors["gradient (relative norm)"] = float((half - total).norm() / total.norm())
    print(f"bfloat16 against float32, {name}: " + ", ".join(f"{key} {value:.1e}" for key, value in errors.items()))
    assert 0 < errors["windows"] < 0.1 and half.isfinite().all()

"""Windows, sink mass, router logits and model logits of a patched model against loops over tokens (tests/aar/reference.py).

Whatever the batch looks like, each document must give what it gives alone.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aarlib import identities
from aarlib.moe.anatomy import anatomy
from aarlib.moe.packing import packed_inputs
from aarlib.moe.record import record
from tests.aar.reference import Observed, Reference
from tests.tiny import FAMILIES, tiny_model

MODELS: dict[str, dict[str, Any]] = {family: {} for family in FAMILIES}
MODELS["mixtral_sliding"] = {"sliding_window": 4}
CACHE_NAMES = ("cache", "past_key_values")  # transformers 5.24 renames it
WINDOW = 6
"""Longer than the sliding range of mixtral_sliding, shorter than that of gpt_oss (8), which its documents exceed."""
LENGTHS = (13, 9, 5)
TOLERANCE = 1e-5


def document(seed: int, length: int) -> Tensor:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


DOCUMENTS = tuple(document(40 + row, length) for row, length in enumerate(LENGTHS))


class Pair(NamedTuple):
    model: Any
    reference: Reference
    expected: dict[tuple[int, ...], Observed]

    def alone(self, tokens: Tensor) -> Observed:
        key = tuple(tokens.tolist())
        if key not in self.expected:
            with torch.no_grad():
                self.expected[key] = self.reference.observe(tokens)
        return self.expected[key]


@cache
def pair(name: str, window: int = WINDOW) -> Pair:
    family = "mixtral" if name == "mixtral_sliding" else name
    model = tiny_model(family, **MODELS[name])
    handle = identities.default_attach(model, window=window)
    parameters = {index: dict(router.named_parameters()) for index, router in handle.routers.items()}
    return Pair(model, Reference(tiny_model(family, **MODELS[name]), parameters, window), {})


class Forward(NamedTuple):
    """Observed values of a batch [B, S, ...] and the cache after it."""

    observed: Observed
    cache: dict[str, Any]


@torch.no_grad()
def forward(model: Any, window: int = WINDOW, cache: dict[str, Any] | None = None, **inputs: Any) -> Forward:
    with record(model, windows=window, sink=True, router_logits=True) as rec:
        output = model(**inputs, use_cache=cache is not None, **(cache or {}))
    name = next((name for name in CACHE_NAMES if getattr(output, name, None) is not None), None)
    after = {} if name is None else {name: getattr(output, name)}
    return Forward(Observed(dict(rec.windows), dict(rec.sink), dict(rec.router_logits), output.logits), after)


def take(observed: Observed, pick: Callable[[Tensor], Tensor]) -> Observed:
    fields = [{layer: pick(value) for layer, value in field.items()} for field in observed[:3]]
    return Observed(*fields, pick(observed.logits))


def joined(parts: Sequence[Observed]) -> Observed:
    """Forwards of the same rows one after another along the sequence."""
    fields = [
        {layer: torch.cat([part[index][layer] for part in parts], dim=1) for layer in parts[0][index]}
        for index in range(3)
    ]
    return Observed(*fields, torch.cat([part.logits for part in parts], dim=1))


def check(models: Pair, tokens: Tensor, found: Observed) -> None:
    expected = models.alone(tokens)
    for field in ("windows", "sink", "router_logits"):
        ours, theirs = getattr(found, field), getattr(expected, field)
        assert set(ours) == set(theirs) and theirs
        for layer, value in theirs.items():
            error = identities.error(ours[layer], value)
            assert error < TOLERANCE, f"{field}[{layer}]: {error:.1e}"
    error = identities.error(found.logits, expected.logits)
    assert error < TOLERANCE, f"logits: {error:.1e}"


class Batch(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor


def padded(documents: Sequence[Tensor], side: str) -> Batch:
    length = max(len(tokens) for tokens in documents)
    ids, mask = torch.zeros(2, len(documents), length, dtype=torch.long)
    for row, tokens in enumerate(documents):
        where = slice(0, len(tokens)) if side == "right" else slice(length - len(tokens), length)
        ids[row, where], mask[row, where] = tokens, 1
    return Batch(ids, mask, (mask.cumsum(-1) - 1).clamp_min(0))


def check_rows(models: Pair, documents: Sequence[Tensor], batch: Batch, observed: Observed) -> None:
    for row, tokens in enumerate(documents):
        valid = batch.attention_mask[row].bool()
        check(models, tokens, take(observed, lambda value, row=row, valid=valid: value[row][valid]))


def fed_in_chunks(models: Pair, batch: Batch, edges: Sequence[int], cache: dict[str, Any] | None = None) -> Forward:
    parts, cache = [], {} if cache is None else cache
    for start, stop in pairwise(edges):
        step = {"input_ids": batch.input_ids[:, start:stop], "position_ids": batch.position_ids[:, start:stop]}
        part, cache = forward(models.model, cache=cache, attention_mask=batch.attention_mask[:, :stop], **step)
        parts.append(part)
    return Forward(joined(parts), cache)


everywhere = pytest.mark.parametrize("name", MODELS)


@everywhere
def test_the_reference_bites(name: str) -> None:
    """The reference's routers choose otherwise than the stock model, and its windows are not trivial."""
    models = pair(name)
    with torch.no_grad():
        stock = tiny_model(name.removesuffix("_sliding"), **MODELS[name])(input_ids=DOCUMENTS[0][None]).logits[0]
    alone = models.alone(DOCUMENTS[0])
    assert (alone.logits - stock).abs().max() > 1e-2
    assert len([1 for tensors in models.reference.parameters.values() if "attention_time" in tensors]) >= 2
    assert all(window[-1].max() > 0.05 and window[0, :-1].abs().max() == 0 for window in alone.windows.values())


@everywhere
def test_full_batch_and_batch_of_one(name: str) -> None:
    models = pair(name)
    documents = [document(seed, 11) for seed in (5, 6)]
    observed = forward(models.model, input_ids=torch.stack(documents)).observed
    for row, tokens in enumerate(documents):
        check(models, tokens, take(observed, lambda value, row=row: value[row]))
    one = forward(models.model, input_ids=DOCUMENTS[0][None]).observed
    check(models, DOCUMENTS[0], take(one, lambda value: value[0]))


@everywhere
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    models, batch = pair(name), padded(DOCUMENTS, side)
    observed = forward(models.model, **batch._asdict()).observed
    check_rows(models, DOCUMENTS, batch, observed)
    pads = ~batch.attention_mask.bool()
    if side == "left":
        assert all(not window[pads].any() for window in observed.windows.values())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3_5_moe"])
def test_packed_documents(name: str) -> None:
    models = pair(name)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = packed_inputs(models.model, torch.cat(DOCUMENTS)[None], positions)
    inputs.pop("use_cache")
    observed = forward(models.model, **inputs).observed
    start = 0
    for tokens in DOCUMENTS:
        where = slice(start, start + len(tokens))
        check(models, tokens, take(observed, lambda value, where=where: value[0, where]))
        start += len(tokens)


def test_packing_of_linear_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="packing: layers .* are linear attention"):
        packed_inputs(pair("qwen3_5_moe").model, torch.zeros(1, 4, dtype=torch.long), torch.arange(4)[None])


@everywhere
def test_window_longer_than_the_sequence(name: str) -> None:
    models, batch = pair(name, 20), padded(DOCUMENTS, "left")
    observed = forward(models.model, 20, **batch._asdict()).observed
    check_rows(models, DOCUMENTS, batch, observed)


@everywhere
@pytest.mark.parametrize(
    "edges", [(0, 10, 13), (0, 9, 11, 13), (0, *range(9, 14))], ids=["cached", "chunked", "decode"]
)
def test_kv_cache_left_padded(name: str, edges: tuple[int, ...]) -> None:
    """The first part holds all of the left padding, as generation does."""
    models, batch = pair(name), padded(DOCUMENTS, "left")
    check_rows(models, DOCUMENTS, batch, fed_in_chunks(models, batch, edges).observed)


@everywhere
def test_token_by_token_from_the_first(name: str) -> None:
    models, batch = pair(name), padded(DOCUMENTS[:1], "left")
    check_rows(models, DOCUMENTS[:1], batch, fed_in_chunks(models, batch, range(14)).observed)


@everywhere
def test_beam_reordered_cache(name: str) -> None:
    """Rows continue from the caches of rows (2, 0, 0), as beam search makes them."""
    models, prompts = pair(name), padded(DOCUMENTS, "left")
    cache = fed_in_chunks(models, prompts, (0, 13)).cache
    (kept,) = cache.values()
    order = torch.tensor([2, 0, 0])
    kept.reorder_cache(order)
    rows = [torch.cat([DOCUMENTS[row], document(20 + new, 3)]) for new, row in enumerate(order.tolist())]
    batch = padded(rows, "left")
    observed = fed_in_chunks(models, batch, (13, 14, 16), cache).observed
    for row, tokens in enumerate(rows):
        expected = models.alone(tokens)
        last = take(expected, lambda value: value[-3:])
        for field in ("windows", "sink", "router_logits"):
            for layer, value in getattr(last, field).items():
                error = identities.error(getattr(observed, field)[layer][row], value)
                assert error < TOLERANCE, f"{field}[{layer}] of row {row}: {error:.1e}"
        assert identities.error(observed.logits[row], last.logits) < TOLERANCE


def test_every_family_has_a_reference() -> None:
    for name in MODELS:
        parts = anatomy(pair(name).model)
        assert set(pair(name).reference.parameters) == set(parts.moe_layers)

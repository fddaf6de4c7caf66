"""Indirect object identification: which attention heads write the answer, and whether those heads move later routers more.

Prompts from templates of our own: two names, one repeated; the answer is the other one.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from aarlib.lens.capture import in_float32, inverse_rms, norm_scale
from aarlib.lens.influence import moments
from aarlib.lens.projection import scores_from, sender_norm
from aarlib.lens.scores import Reading, attention_weights, edge_products, head_scores, sender_scale
from aarlib.stats import spearman

TEMPLATES = (
    "When {x} and {y} got to the {place}, {s} gave a {thing} to",
    "Then {x} and {y} went to the {place}. {s} handed a {thing} to",
    "After {x} and {y} had lunch at the {place}, {s} brought a {thing} for",
    "While {x} and {y} walked to the {place}, {s} decided to give a {thing} to",
    "One day {x} and {y} were working at the {place}. {s} gave the {thing} to",
    "Yesterday {x} and {y} sat in the {place}. {s} passed the {thing} to",
    "{x} and {y} met at the {place}. {s} wanted to give a {thing} to",
    "The {place} was quiet when {x} and {y} came. {s} offered the {thing} to",
)
NAMES = (
    "Mary", "John", "Tom", "James", "Dan", "Sarah", "Laura", "Kate", "Paul", "Mark", "Anna", "Peter", "Alice", "Jack", "Emma",
    "Simon", "Ruth", "Henry", "Clara", "David", "Helen", "Frank", "Julia", "Martin", "Rose", "Lucy", "George", "Grace", "Adam",
)  # fmt: skip
PLACES = ("store", "garden", "school", "station", "office", "market", "library", "park", "museum", "cafe")
THINGS = ("ring", "basket", "drink", "book", "lamp", "map", "ball", "letter", "cake", "hat")


class Prompt(NamedTuple):
    text: str
    answer: int
    """Token id of the name that was not repeated."""
    repeated: int


class Prompts(NamedTuple):
    input_ids: Int[Tensor, "B S"]
    attention_mask: Int[Tensor, "B S"]
    """Right padded."""
    last: Int[Tensor, " B"]
    """Index of each prompt's last token."""
    answer: Int[Tensor, " B"]
    repeated: Int[Tensor, " B"]


def draw_prompts(tokenizer: Any, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts, both orders of the names equally often; names of one token only. ValueError where fewer than two are."""
    ids = {name: tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in NAMES}
    single = {name: found[0] for name, found in ids.items() if len(found) == 1}
    if len(single) < 2:
        raise ValueError(f"the tokenizer has {len(single)} of {len(NAMES)} names as one token; IOI needs at least two")
    rng = random.Random(f"ioi/{seed}")
    prompts = []
    for index in range(count):
        x, y = rng.sample(sorted(single), 2)
        repeated, answer = (x, y) if index % 2 else (y, x)
        text = rng.choice(TEMPLATES).format(x=x, y=y, s=repeated, place=rng.choice(PLACES), thing=rng.choice(THINGS))
        prompts.append(Prompt(text, single[answer], single[repeated]))
    return prompts


def collate(tokenizer: Any, prompts: Sequence[Prompt]) -> Prompts:
    rows = [tokenizer(prompt.text, add_special_tokens=False)["input_ids"] for prompt in prompts]
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = torch.tensor([token for row in rows for token in row])
    answer, repeated = ([getattr(prompt, name) for prompt in prompts] for name in ("answer", "repeated"))
    return Prompts(ids, mask, lengths - 1, torch.tensor(answer), torch.tensor(repeated))


def logit_differences(model: Any, prompts: Prompts) -> Float[Tensor, " B"]:
    """Logit of the answer minus that of the repeated name, after the last token."""
    with torch.no_grad(), in_float32(model):
        logits = model(input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, use_cache=False).logits
    rows = torch.arange(len(prompts.last))
    last = logits[rows, prompts.last]
    return last[rows, prompts.answer] - last[rows, prompts.repeated]


class HeadEffects(NamedTuple):
    names: tuple[str, ...]
    direct: Float[Tensor, "B C"]
    """What the head adds to the logit difference through the residual stream alone, the final norm's rms kept."""
    influence: Float[Tensor, "B C"]
    """Variance of its scores at the last token, summed over the receivers it reaches."""
    influence_all: Float[Tensor, "B C"]
    """The same, mean over all tokens of the prompt."""


def head_effects(model: Any, reading: Reading, prompts: Prompts) -> HeadEffects:
    kept, parts = reading.capture, reading.parts
    final_norm = getattr(parts.decoder, parts.family.final_norm)
    is_last = torch.zeros_like(kept.mask)
    is_last[torch.arange(len(prompts.last)), prompts.last] = True
    is_last = is_last[kept.mask]
    output = model.get_output_embeddings().weight.detach().float()
    difference = output[prompts.answer.to(output.device)] - output[prompts.repeated.to(output.device)]
    device = reading.projection.device
    direction = difference.to(device) * norm_scale(parts, final_norm).to(device)
    direction = direction * inverse_rms(kept.final[is_last], final_norm, parts.family.norm_eps)[:, None]
    names, direct, influence, everywhere = list[str](), list[Tensor](), list[Tensor](), list[Tensor]()
    lengths = torch.bincount(kept.documents)
    for block in head_scores(reading):
        if block.names[0].endswith(".bias"):
            continue
        layer = int(block.names[0].split(".")[1])
        names += block.names
        direct.append(_direct(reading, layer, direction, is_last))
        variance_nT = moments(block.values)[..., 0].sum(-1)
        influence.append(variance_nT[:, is_last].T)
        sums = variance_nT.new_zeros(len(lengths), len(variance_nT)).index_add_(0, kept.documents, variance_nT.T)
        everywhere.append(sums / lengths[:, None])
    return HeadEffects(tuple(names), torch.cat(direct, 1), torch.cat(influence, 1), torch.cat(everywhere, 1))


def _direct(reading: Reading, layer: int, direction: Float[Tensor, "B D"], is_last: Tensor) -> Float[Tensor, "B H"]:
    parts = reading.parts.layers[layer]
    num_heads = reading.projection.of_heads(layer).shape[0]
    scale = sender_scale(reading, 2 * layer)
    if scale is not None:
        norm = norm_scale(reading.parts, sender_norm(parts, is_attention=True))
        direction = direction * norm.to(direction.device) * scale[is_last][:, None]
    output = parts.output_projection.get_parameter("weight").detach().to(direction.device, torch.float32)
    heads = reading.capture.layers[layer].heads[is_last].unflatten(-1, (num_heads, -1))
    return (heads * (direction @ output).unflatten(-1, (num_heads, -1))).sum(-1)


class HeadMap(NamedTuple):
    attention: Float[Tensor, "B S N"]
    variance: Float[Tensor, "B S N"]
    """Variance over the experts of each (query, key) part of the head, summed over the receivers it reaches."""


def head_map(reading: Reading, layer: int, head: int) -> HeadMap:
    """A head's attention map and variance map; the reading must hold edges."""
    start = reading.projection.start(2 * layer)
    products = edge_products(reading, layer, head, start)
    scores = scores_from(products, reading.state, start, sender_scale(reading, 2 * layer))
    variance = reading.capture.unflatten(moments(scores)[..., 0].sum(-1).T.contiguous())
    return HeadMap(attention_weights(reading, layer)[:, head], variance)


def map_correlation(maps: HeadMap, mask: Tensor) -> Float[Tensor, " B"]:
    """Per prompt, Spearman's rank correlation of attention weight and variance over its causal pairs, queries after the first."""
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    causal[0] = False
    values = []
    for row in range(mask.shape[0]):
        pairs = causal & mask[row].bool()[:, None] & mask[row].bool()[None]
        values.append(spearman(*(side[row][pairs].cpu().numpy() for side in maps)))
    return torch.tensor(values)

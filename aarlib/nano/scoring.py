"""Log-likelihoods, greedy answers and routing of a causal language model on short texts, in batches of equal work."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import OlmoeForCausalLM, PreTrainedTokenizerBase

from aarlib.nano.tokenizer import special_ids

_BATCH = 32


class Scored(NamedTuple):
    """Summed negative log-likelihood in nats and the number of bytes of each text."""

    nats: list[float]
    num_bytes: list[int]


class Routing(NamedTuple):
    """Per layer: least-picked expert over its fair share, router entropy in bits, mass of the selected experts."""

    smallest_share: list[float]
    entropy_bits: list[float]
    mass: list[float]


@torch.inference_mode()
def continuation_nats(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]
) -> list[float]:
    """-log p(continuation | context) of every pair."""
    encoded = [(tokenizer.encode(context), tokenizer.encode(context + continuation)) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda index: len(encoded[index][1]))
    nats = [0.0] * len(pairs)
    for start in range(0, len(order), _BATCH):
        chosen = order[start : start + _BATCH]
        nats_BS = token_nats(model, pad([encoded[index][1] for index in chosen], special_ids(tokenizer).pad))
        for row, index in enumerate(chosen):
            prefix, whole = encoded[index]
            nats[index] = nats_BS[row, len(prefix) - 1 : len(whole) - 1].sum().item()
    return nats


@torch.inference_mode()
def text_nats(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Scored:
    """Each text on its own behind one document mark, so that its first token counts too; at most the model's context."""
    limit = model.config.max_position_embeddings
    rows = [[special_ids(tokenizer).bos, *tokenizer.encode(text)][:limit] for text in texts]
    scored = Scored([], [])
    for start in range(0, len(rows), _BATCH):
        chosen = rows[start : start + _BATCH]
        nats_BS = token_nats(model, pad(chosen, special_ids(tokenizer).pad))
        for row, ids in zip(nats_BS, chosen, strict=True):
            scored.nats.append(row[: len(ids) - 1].sum().item())
            scored.num_bytes.append(len(decode(tokenizer, ids[1:]).encode()))
    return scored


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def token_nats(model: OlmoeForCausalLM, input_ids: Tensor) -> Float[Tensor, "B S"]:
    logits = model(input_ids=input_ids).logits[:, :-1].float()
    return -logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    """Right padded: a causal model's real positions do not see the padding."""
    padded = torch.full((len(rows), max(map(len, rows))), pad_token_id)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row)
    return padded


@torch.inference_mode()
def greedy_answers(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int = 128
) -> list[str]:
    """Greedy continuations, prompts of similar length together, padded on the left."""
    generator: Any = model  # transformers' own protocol for generate does not fit its own classes
    special, encoded = special_ids(tokenizer), [tokenizer.encode(prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    answers = [""] * len(prompts)
    for start in range(0, len(order), 2 * _BATCH):
        chosen = order[start : start + 2 * _BATCH]
        reversed_rows = [encoded[index][::-1] for index in chosen]
        input_ids = pad(reversed_rows, special.pad).flip(1)
        output = generator.generate(
            input_ids=input_ids,
            attention_mask=(input_ids != special.pad).long(),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=[special.eos, special.bos],
            pad_token_id=special.pad,
        )
        for index, row in zip(chosen, output, strict=True):
            answers[index] = decode(tokenizer, row[input_ids.shape[1] :].tolist())
    return answers


@torch.inference_mode()
def routing(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Routing:
    """Over all tokens of `texts`, each on its own."""
    config = model.config
    layers: list[list[Tensor]] = [[] for _ in range(config.num_hidden_layers)]
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)[: config.max_position_embeddings]])
        for layer, logits_TE in zip(layers, model(input_ids=ids, output_router_logits=True).router_logits, strict=True):
            layer.append(logits_TE.float())
    result = Routing([], [], [])
    for layer in layers:
        probabilities_TE = torch.cat(layer).softmax(-1)
        top = probabilities_TE.topk(config.num_experts_per_tok, dim=-1)
        picks_E = torch.bincount(top.indices.flatten(), minlength=config.num_experts)
        result.smallest_share.append((picks_E.min() * config.num_experts / picks_E.sum()).item())
        result.entropy_bits.append(-(probabilities_TE * probabilities_TE.log2()).nansum(-1).mean().item())
        result.mass.append(top.values.sum(-1).mean().item())
    return result

"""The training of test_engine in one process of plain PyTorch: its batches, AdamW, clipping, and two steps in bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aarlib.aar.config import AARConfig
from aarlib.data.chat import Encoded, collate
from aarlib.runtime.batches import micro_batches
from aarlib.runtime.checkpoints import (
    whole_values,
)
from aarlib.runtime.engine import (
    Setup,
    learning_rate,
)
from aarlib.training.config import OptimConfig
from aarlib.training.methods import build_method
from aarlib.training.objectives import next_token_ce
from tests.tiny import tiny_model

STEPS, BATCH, RESUME_AT = 6, 8, 3
METHOD = AARConfig(layers=(1, 2), window=4)
OPTIM = OptimConfig(global_batch=BATCH, micro_batch=2, learning_rate=1e-3, max_grad_norm=0.05, weight_decay=0.01)


def batches() -> list[list[Encoded]]:
    """Unequal target counts; in step 1 none of the rows dealt to rank 1 has a target."""
    generator = torch.Generator().manual_seed(0)
    made: list[list[Encoded]] = []
    for step in range(STEPS):
        rows = []
        for index in range(BATCH):
            length = 30 - 2 * index
            ids = torch.randint(3, 97, (length,), generator=generator).tolist()
            targets = int(torch.randint(0, length - 1, (1,), generator=generator))
            if step == 1 and index % 2 == 1:
                targets = 0
            rows.append(Encoded(f"{step}/{index}", ids, [j >= length - targets for j in range(length)], False))
        made.append(rows)
    return made


class Reference(NamedTuple):
    values: dict[str, Tensor]
    norms: list[float]
    """Of the gradient before it is clipped, by step."""
    ce_sums: list[float]


def reference() -> Reference:
    """One process, no DeepSpeed, no micro-batches: AdamW on the mean over the batch's targets, clipped."""
    model = tiny_model("olmoe")
    handle = build_method(METHOD, 0).attach(model)
    parameters = [parameter for _, parameter in handle.trainable()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=OPTIM.weight_decay, betas=OPTIM.betas)
    setup = Setup(OPTIM, 0, 0, 1, STEPS)
    norms, ce_sums = [], []
    for step, rows in enumerate(batches()):
        result = next_token_ce(model, collate(rows, 0))
        ce_sums.append(float(result.ce_sum.detach().sum()))
        loss = result.ce_sum.sum() / result.num_targets.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, OPTIM.max_grad_norm or 0.0)))
        optimizer.param_groups[0]["lr"] = learning_rate(setup, step)
        optimizer.step()
    return Reference(whole_values(handle.trainable()), norms, ce_sums)


def bfloat16_reference() -> list[float]:
    """Gradient norms of the same two steps in one process, without DeepSpeed."""
    model = tiny_model("olmoe").to(torch.bfloat16)
    handle = build_method(METHOD, 0).attach(model)
    parameters = [parameter for _, parameter in handle.trainable()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=OPTIM.weight_decay, betas=OPTIM.betas)
    setup = Setup(OPTIM, 0, 0, 1, STEPS)
    norms = []
    for step, rows in enumerate(batches()[:2]):
        optimizer.zero_grad()
        count = sum(row.num_targets for row in rows)
        for rank, share in enumerate(shares(rows)):
            with own_experts(model, rank) if step == 0 else nullcontext():
                (next_token_ce(model, collate(share, 0)).ce_sum.sum() / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, OPTIM.max_grad_norm or 0.0)))
        optimizer.param_groups[0]["lr"] = learning_rate(setup, step)
        optimizer.step()
    return norms


@contextmanager
def own_experts(model: Any, rank: int) -> Iterator[None]:
    """Every token goes to the first experts on rank 0, to others on rank 1."""

    def hook(experts: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, expert_ids, weights = arguments
        own = torch.arange(expert_ids.shape[-1]) + 5 * rank
        return hidden, own.expand_as(expert_ids).to(expert_ids.dtype), weights

    hooks = [layer.mlp.experts.register_forward_pre_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for registered in hooks:
            registered.remove()


def shares(rows: list[Encoded]) -> list[list[Encoded]]:
    return [[row for part in micro_batches(rows, rank, 2, 2) for row in part] for rank in range(2)]

"""The dispatch of a MoE block: the family's own selection rule on replaced logits, and the outputs of chosen experts.

Dimensions: T tokens, D d_model, E num_experts, K top_k.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from aarlib.moe.anatomy import Anatomy

EXCLUDED_LOGIT = -1e9
"""A finite logit that keeps an expert from being selected (never -inf: 0 x inf is NaN in the selection copy)."""


class RouterOutput(NamedTuple):
    """What every supported router module returns."""

    router_logits: Float[Tensor, "T E"]
    weights: Float[Tensor, "T K"]
    expert_ids: Int[Tensor, "T K"]


class Selector:
    """A family's own rule from logits to (weights, expert ids), DESIGN 2.1.

    It is a copy of the router with hidden size E, identity weight and zero linear bias; every other parameter and buffer
    (a score-correction bias, say) is the router's own. Not a module of the model.
    """

    def __init__(self, parts: Anatomy, router: nn.Module) -> None:
        self.num_experts = parts.num_experts
        self._gate = copy.copy(router)
        self._gate.__dict__ = {key: value for key, value in router.__dict__.items() if key != "forward"}
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            self._gate.__dict__[hooks] = OrderedDict()
        self._gate.__dict__["_parameters"] = dict(router._parameters)
        for name in ("hidden_dim", "hidden_size"):
            if hasattr(router, name):
                self._gate.__dict__[name] = self.num_experts
        self._bias_name = parts.family.router_bias
        self._float32_weights = parts.family.weights_dtype == "float32"

    def __call__(self, logits: Float[Tensor, "T E"], weights_dtype: torch.dtype) -> RouterOutput:
        """Select from float32 `logits`; weights in the dtype the stock router gives for inputs of `weights_dtype`."""
        parameters = self._gate._parameters
        weight = parameters["weight"]
        if weight is None or weight.shape != (self.num_experts,) * 2 or weight.device != logits.device:
            parameters["weight"] = nn.Parameter(torch.eye(self.num_experts, device=logits.device), requires_grad=False)
            if self._bias_name is not None:
                zero = torch.zeros(self.num_experts, device=logits.device)
                parameters[self._bias_name] = nn.Parameter(zero, requires_grad=False)
        with exact_float32(logits.device):
            _, weights, expert_ids = self._gate.forward(logits)
        return RouterOutput(logits, weights if self._float32_weights else weights.to(weights_dtype), expert_ids)


def expert_outputs(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Float[Tensor, "T D"],
    expert_ids: Int[Tensor, "T K"],
) -> Float[Tensor, "T K D"]:
    """u[t, j]: the output of the j-th chosen expert before weighting; each choice is a top-1 call with weight 1, in one call."""
    num_tokens, top_k = expert_ids.shape
    rows = hidden.repeat_interleave(top_k, dim=0)
    ones = torch.ones(num_tokens * top_k, 1, dtype=hidden.dtype, device=hidden.device)
    return experts(rows, expert_ids.reshape(-1, 1), ones).reshape(num_tokens, top_k, -1)


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """float32 arithmetic as written: autocast and TF32 off."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed

"""Muon: momentum whose update is orthogonalised, for the matrices inside the blocks; experts are a batch of matrices.

Newton-Schulz coefficients and the scale sqrt(max(1, rows / columns)) are those of Keller Jordan's description of the method.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Float[Tensor, "*N R C"], num_iterations: int = 5) -> Float[Tensor, "*N R C"]:
    """Approximately U V^T of each matrix's singular value decomposition: singular values end near 1."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay. Every parameter has two or more dimensions."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(velocity, group["momentum"]))
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)

"""AAR as its paper's description amounts to on OLMoE: eager attention, hooks on its weights and on the routers, whole logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad


class PlainRouter(nn.Module):
    """The trained tensors of one layer in float32: weight, and A and G for both views where `window` > 0."""

    def __init__(self, tensors: Mapping[str, Tensor], window: int) -> None:
        super().__init__()
        self.window = window
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def forward(self, hidden: Tensor, windows: Tensor | None) -> Tensor:
        standard = linear(hidden, self.get_parameter("weight"))
        if windows is None:
            return standard
        views = {"time": windows, "spectrum": torch.log1p(torch.fft.rfft(windows).abs())}
        gates, gated = [], []
        for name, view in views.items():
            alpha = torch.sigmoid(linear(torch.cat([hidden, view], dim=-1), self.get_parameter(f"gate_{name}")))
            gates.append(alpha)
            gated.append(alpha * (view @ self.get_parameter(f"attention_{name}")))
        return (1 - sum(gates) / 2) * standard + sum(gated) / 2


def cut(weights_BHSN: Tensor, window: int) -> Tensor:
    """[B, S, M]: the last `window` weights of each token's head mean."""
    mean = weights_BHSN.float().mean(1)
    columns = torch.arange(mean.shape[1], device=mean.device)[:, None] + torch.arange(window, device=mean.device)
    return pad(mean, (window - 1, 0)).gather(2, columns.expand(mean.shape[0], -1, -1))


class PlainAAR(nn.Module):
    """A frozen OLMoE in eager attention with trained routers put in by hooks; `parameters_of` maps a layer to its tensors."""

    def __init__(self, model: Any, parameters_of: Mapping[int, Mapping[str, Tensor]], window: int) -> None:
        super().__init__()
        self.model = model
        model.set_attn_implementation("eager")
        self.routers = nn.ModuleDict()
        self._windows: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        for index, tensors in parameters_of.items():
            router = PlainRouter(tensors, window if "attention_time" in tensors else 0)
            self.routers[str(index)] = router
            layer = model.model.layers[index]
            if router.window:
                self._hooks.append(layer.self_attn.register_forward_hook(self._keep_windows(index, window)))
            self._hooks.append(layer.mlp.gate.register_forward_hook(self._route(index, router)))

    def detach(self) -> None:
        """Take the hooks away; the attention implementation stays eager."""
        for hook in self._hooks:
            hook.remove()
        self._windows.clear()

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": self.model(input_ids=input_ids, labels=labels, use_cache=False).loss}

    def _keep_windows(self, index: int, window: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._windows[index] = cut(output[1], window)

        return hook

    def _route(self, index: int, router: PlainRouter) -> Any:
        def hook(gate: Any, inputs: Any, _: Any) -> Any:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            windows = self._windows.pop(index).flatten(0, 1) if router.window else None
            logits = router(hidden.float(), windows)
            weights, ids = logits.softmax(-1).topk(gate.top_k, dim=-1)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(hidden.dtype), ids

        return hook

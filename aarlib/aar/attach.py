"""Attach trained routers to a frozen model, and take them away again. The model's own tensors are never written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.aar.router import AttentionAwareRouter
from aarlib.moe.anatomy import Anatomy, LayerAnatomy, anatomy
from aarlib.moe.attention import CaptureRequest, capture_attention
from aarlib.moe.dispatch import Selector
from aarlib.moe.families import Family
from aarlib.moe.handle import PatchHandle
from aarlib.moe.patching import Rank, has_wrapper, wrap_forward, wrapper_at

Capture = Callable[[nn.Module, CaptureRequest], Callable[[], None]]


class RoutingHandle(PatchHandle):
    """What attach_aar returns: owns the trained float32 parameters and the patches that put them to work.

    `routers` maps a layer index to its router, `module` holds all of them (for an optimizer or an engine), `enabled` switches
    the model between patched and stock, bit for bit; `detach()` gives the stock model back for good. A model can have several
    handles, one of them enabled at a time.
    """

    def __init__(
        self, parts: Anatomy, config: AARConfig | RouterSFTConfig, routers: dict[int, AttentionAwareRouter]
    ) -> None:
        super().__init__(parts, nn.ModuleDict({str(index): router for index, router in routers.items()}))
        self.config = config
        self.routers = routers
        self._windows: dict[int, Tensor] = {}
        self.capture: Capture = capture_attention
        """How windows are taken from an attention module; identities compare it with materialised attention."""
        self.enabled = True

    def _forget(self) -> None:
        self._windows.clear()

    def _install(self) -> None:
        _check_free(self.anatomy)
        self._removers.append(wrap_forward(self.anatomy.decoder, self._around_decoder, Rank.ROUTER))
        for index, router in self.routers.items():
            layer = self.anatomy.layers[index]
            assert layer.router is not None
            self._removers.append(wrap_forward(layer.router, _RouterPatch(self, layer, router), Rank.ROUTER))
            if router.views:
                assert layer.attention is not None
                self._removers.append(self.capture(layer.attention, self._request(index, router.window)))

    def _request(self, index: int, window: int) -> CaptureRequest:
        def deliver(windows: Tensor | None, _: Tensor | None) -> None:
            assert windows is not None
            self._windows[index] = windows

        window_grad = isinstance(self.config, AARConfig) and self.config.window_grad
        return CaptureRequest(window, window_grad=window_grad, sink_index=None, deliver=deliver)

    def _around_decoder(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Windows of a forward that raised must not keep its graph alive."""
        try:
            return inner(*args, **kwargs)
        finally:
            self._windows.clear()


class _RouterPatch:
    """Stands around a stock router: logits of the trained one, selected by the family's own rule."""

    def __init__(self, handle: RoutingHandle, layer: LayerAnatomy, router: AttentionAwareRouter) -> None:
        assert layer.router is not None
        self.router = router
        self._windows, self._layer = handle._windows, layer.index
        self._select = Selector(handle.anatomy, layer.router)

    def __call__(self, _: Callable[..., Any], hidden: Tensor) -> Any:
        windows = self._windows.pop(self._layer).flatten(0, 1) if self.router.views else None
        logits = self.router(hidden.reshape(-1, hidden.shape[-1]), windows)
        return tuple(self._select(logits, hidden.dtype))


def attached_router(stock: nn.Module) -> AttentionAwareRouter | None:
    """The trained router that stands around the model's router module `stock`, while its handle is enabled."""
    patch = wrapper_at(stock, Rank.ROUTER)
    return patch.router if isinstance(patch, _RouterPatch) else None


def attach_aar(
    model: nn.Module, config: AARConfig | RouterSFTConfig, seed: int = 0, family: Family | None = None
) -> RoutingHandle:
    """Attach attention-aware routers (or, with RouterSFTConfig, trained copies of the stock routers) to `model`.

    `seed` draws A and G. Works on a meta-device model. Raises ValueError for a layer without router or attention weights,
    top_k = 1 with renormalised weights (no gradient reaches the router), and a model that already carries trained routers.
    """
    parts = anatomy(model, family)
    aar_layers = config.layers if isinstance(config, AARConfig) else ()
    _check(parts, aar_layers)
    trained = parts.moe_layers if config.routers == "all" else aar_layers
    generator = torch.Generator().manual_seed(seed)
    routers: dict[int, AttentionAwareRouter] = {}
    for index in trained:
        stock = parts.layers[index].router
        assert stock is not None
        bias = getattr(stock, parts.family.router_bias) if parts.family.router_bias else None
        routers[index] = AttentionAwareRouter(stock.weight, bias)  # pyright: ignore[reportArgumentType]
        if isinstance(config, AARConfig) and index in aar_layers:
            routers[index].add_views(config.views, config.window, config.init, generator)
    return RoutingHandle(parts, config, routers)


def _check(parts: Anatomy, layers: tuple[int, ...]) -> None:
    without = [index for index in layers if index not in parts.aar_layers]
    if without:
        have = ", ".join(str(index) for index in parts.aar_layers)
        raise ValueError(
            f"layers = {list(layers)}: {without} have no router or no attention weights; layers that have both: {have}"
        )
    if parts.top_k == 1 and parts.renormalises:
        raise ValueError(
            "num_experts_per_tok = 1 with renormalised weights: every weight is 1, so no gradient reaches the router; "
            "use a model with top_k > 1 or without renormalisation"
        )
    _check_free(parts)


def _check_free(parts: Anatomy) -> None:
    for layer in parts.layers:
        if layer.router is not None and has_wrapper(layer.router, Rank.ROUTER):
            raise ValueError(
                "trained routers are already attached to this model; detach() the other handle, or set its enabled = False"
            )

"""Settings of the routing methods. Imports no torch, so that configs validate before anything heavy loads."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from aarlib.config import Config

View = Literal["time", "spectrum"]


class RouterSFTConfig(Config):
    """Routing-only SFT: trained float32 copies of the stock routers, no attention input. The paper's baseline."""

    name: Literal["router_sft"] = "router_sft"
    routers: Literal["all"] = "all"


class AARConfig(Config):
    """Attention-Aware Routing (Kosmopoulou et al., section 3.2)."""

    name: Literal["aar"] = "aar"
    layers: tuple[int, ...]
    """Indices of the decoder layers whose router sees its attention window."""
    window: int = Field(default=40, ge=2)
    """M: the number of most recent keys, the token itself included."""
    views: tuple[View, ...] = ("time", "spectrum")
    """`time` alone is AAR^T; both are full AAR."""
    routers: Literal["all", "aar"] = "all"
    """Which stock routers train beside A and G: those of all MoE layers, or of the AAR layers only."""
    init: Literal["default", "closed"] = "default"
    """`closed` adds a trainable gate bias per view starting at -4, so that training starts near the stock model."""
    window_grad: bool = True
    """Whether gradients flow through the windows into earlier routers; off: windows are constants."""

    @field_validator("layers")
    @classmethod
    def _layers(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if not layers:
            raise ValueError("no layers given; name at least one MoE layer with attention weights, or use router_sft")
        if len(set(layers)) != len(layers) or min(layers) < 0:
            raise ValueError("layers must be distinct and not negative")
        return tuple(sorted(layers))

    @model_validator(mode="after")
    def _views(self) -> Self:
        if not self.views or len(set(self.views)) != len(self.views):
            raise ValueError(f"views = {self.views}: name 'time', 'spectrum' or both, each once")
        return self

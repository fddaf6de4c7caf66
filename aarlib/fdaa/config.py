"""Settings of the aggregation methods. Imports no torch, so that configs validate before anything heavy loads."""

from typing import Literal

from pydantic import Field, field_validator

from aarlib.config import Config


class AggregationConfig(Config):
    """What the learned head and the static calibrator share: where they act, and their loss (DESIGN 2.5)."""

    layers: tuple[int, ...]
    """Indices of the decoder layers whose aggregation is changed; training acts on one of them at a time."""
    kl_weight: float = Field(default=0.01, ge=0)
    """lambda_KL, of KL(q || p) per target token. Not published; ours."""
    score_weight: float = Field(default=1e-4, ge=0)
    """lambda_s, of ||s||^2 per target token. Not published; ours."""

    learning_rate: float | None = Field(default=None, gt=0)
    """In place of optim.learning_rate: a table of scores needs larger steps than a head."""

    @field_validator("layers")
    @classmethod
    def _layers(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if not layers:
            raise ValueError("no layers given; name at least one MoE layer")
        if len(set(layers)) != len(layers) or min(layers) < 0:
            raise ValueError("layers must be distinct and not negative")
        return tuple(sorted(layers))


class FDAAConfig(AggregationConfig):
    """The learned aggregation head ("Beyond Routing", equations 5-7)."""

    name: Literal["fdaa"] = "fdaa"
    projection_size: int = Field(default=64, ge=1)
    """Of h and of each expert output."""
    hidden_size: int = Field(default=128, ge=1)


class FixedConfig(Config):
    """A control without parameters: q proportional to p^(1/tau) at `layers`."""

    name: Literal["fixed"] = "fixed"
    layers: tuple[int, ...]
    tau: float = Field(gt=0)
    """1: native; inf: uniform."""


class StaticCalibratorConfig(AggregationConfig):
    """The control that sees no token: one score for each (layer, expert), trained under the same loss."""

    name: Literal["static_calibrator"] = "static_calibrator"

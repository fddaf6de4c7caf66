"""Settings of an audit. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from aarlib.config import Config

FIRST_POSITION = 8


class DomainConfig(Config):
    source: str
    """Glob or URI of .txt, .jsonl(.gz) or .parquet files with `text`, `wikitext:<glob>`, or `nano:<register>`. Expands $NAME."""
    joined: bool = False
    """Join documents shorter than a window, within their split, by the end-of-text token."""


class AuditConfig(Config):
    layers: tuple[int, ...]
    """MoE layers to audit, counted from 0."""
    domains: dict[str, DomainConfig]
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each draws its own windows and positions; windows of different seeds are disjoint."""
    window: int = Field(default=256, ge=FIRST_POSITION + 2)
    """Tokens of a window; it lies in one document."""
    horizons: tuple[Annotated[int, Field(ge=1)] | Literal["full"], ...] = ("full", 32)
    """Targets from the audited position on. Positions are drawn where the longest numbered one fits."""
    development: int = Field(default=64, ge=1)
    """Windows per domain and seed on which anything is chosen."""
    locked: int = Field(default=128, ge=2)
    """Windows per domain and seed on which everything is reported."""
    locked_share: float = Field(default=0.66, gt=0, lt=1)
    """Share of the documents, by a hash of their ids, that are locked. A text that occurs again is left out."""
    isolation: Literal["exact", "batched"] = "exact"
    noise_samples: int = Field(default=2, ge=0)
    """Windows of each unit replayed both ways, for the noise floor."""
    windows_per_unit: int = Field(default=16, ge=1)
    max_tokens: int = Field(default=16_384, ge=1)
    """Tokens that run together under `batched`."""
    predictors: bool = True
    """Keep hidden states and expert outputs at the audited positions, and train predictors on them."""

    @field_validator("layers", "seeds", "horizons")
    @classmethod
    def _distinct(cls, values: tuple[int | str, ...]) -> tuple[int | str, ...]:
        if not values or len(set(values)) != len(values):
            raise ValueError("must be one or more different values")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.domains:
            raise ValueError("no domain given; add a table such as [audit.domains.c4]")
        if self.longest_horizon + FIRST_POSITION + 1 > self.window:
            raise ValueError(
                f"horizons: {self.longest_horizon} does not fit after position {FIRST_POSITION} of a window of "
                f"{self.window}; lengthen audit.window or shorten the horizon"
            )
        return self

    @property
    def longest_horizon(self) -> int:
        """In targets; a full horizon needs one."""
        return max(1 if horizon == "full" else horizon for horizon in self.horizons)

"""Settings of a decomposition over a corpus. Imports no torch."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from aarlib.config import Config


class SourceConfig(Config):
    source: str
    """Glob or URI of .txt, .jsonl(.gz) or .parquet files with `text`, `wikitext:<glob>`, or `nano:<register>`. Expands $NAME."""
    documents: int = Field(default=1000, ge=2)
    """Pieces of text: the documents' first tokens and, where they are fewer, further disjoint chunks of them, flagged."""
    length: int = Field(default=32, ge=2)
    """Tokens of a piece; a document that is shorter is taken whole, a further chunk always has all of them."""


class LensConfig(Config):
    sources: dict[str, SourceConfig]
    levels: tuple[Literal["layer", "head", "expert", "neuron"], ...] = ("layer", "head", "expert", "neuron")
    receivers: tuple[int, ...] | None = None
    """MoE layers whose router is decomposed; None is all."""
    documents_per_unit: int = Field(default=32, ge=1)
    lags: tuple[int, ...] = (1, 2, 3, 4)
    """Layers ahead for which picks are predicted."""
    causal_source: str | None = None
    """On which of the sources experts and attention layers are really taken away; None: nowhere."""
    causal_documents: int = Field(default=256, ge=2)
    """What is taken away is chosen on the units with an even number, and measured on so many pieces of the others."""
    ablated_experts: int = Field(default=8, ge=2)
    """The most influential ones, and as many of the least influential among those that are chosen at all."""
    ioi_prompts: int = Field(default=0, ge=0)

    @field_validator("sources")
    @classmethod
    def _sources(cls, sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        if not sources:
            raise ValueError("no source given; add a table such as [lens.sources.c4]")
        return sources

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.causal_source is not None and self.causal_source not in self.sources:
            raise ValueError(
                f"causal_source = {self.causal_source!r} is none of the sources: {', '.join(self.sources)}"
            )
        if not self.levels or "layer" not in self.levels:
            raise ValueError("levels must hold 'layer', which recall and the sender maps are made of")
        if self.causal_source is not None and "expert" not in self.levels:
            raise ValueError("causal_source needs the level 'expert': what is taken away is chosen by it")
        return self

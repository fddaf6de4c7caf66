"""The FDAA study's configuration: which trained heads, on which texts. Imports no torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from aarlib.config import Config
from aarlib.runtime.audit_config import ActorsConfig
from aarlib.training.config import DataConfig, ModelConfig, TextDomain, TrackingConfig

DEVELOPMENT_OF_UNSEEN = 0.25
"""Share of the documents of files that no training read on which things are chosen; the rest is tested on."""


class StudyDomain(TextDomain):
    trained_on: bool = True
    """Whether trainings read these files, so that only their own splits may be used; False for test files and further texts."""


class FDAAConfig(Config):
    runs: tuple[str, ...]
    """Names of finished run directories of `train` under ray.storage; their fdaa and static_calibrator adapters are evaluated."""
    domains: dict[str, StudyDomain]
    """Texts to evaluate on. Splits must be those of the runs (`held_out`, `test`)."""
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the documents on which anything is chosen."""
    test: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Share of the documents on which everything is reported."""
    window: int = Field(default=128, ge=8)
    development_windows: int = Field(default=64, ge=2)
    test_windows: int = Field(default=200, ge=2)
    """Of each domain: the first by a hash of their ids, so that every head sees the same."""
    batch_size: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _given(self) -> Self:
        if not self.runs or len(set(self.runs)) != len(self.runs):
            raise ValueError("runs: name one or more run directories of `train`, each once")
        if not self.domains:
            raise ValueError("no domain given; add a table such as [fdaa.domains.wikitext]")
        return self

    def data(self, name: str) -> DataConfig:
        """One domain with its shares: of files that training reads, those of the runs."""
        domain = self.domains[name]
        unseen = (DEVELOPMENT_OF_UNSEEN, 1 - DEVELOPMENT_OF_UNSEEN)
        held_out, test = (self.held_out, self.test) if domain.trained_on else unseen
        return DataConfig(domains={name: domain}, held_out=held_out, test=test)


class FDAAStudyConfig(Config):
    name: str
    """Run directory under ray.storage."""
    model: ModelConfig = ModelConfig()
    fdaa: FDAAConfig
    ray: ActorsConfig = ActorsConfig()
    tracking: TrackingConfig = TrackingConfig()

"""The audit's run configuration: one TOML per audit. Imports no torch."""

from pathlib import Path

from pydantic import Field

from aarlib.audit.config import AuditConfig
from aarlib.config import Config
from aarlib.training.config import ModelConfig, TrackingConfig


class ActorsConfig(Config):
    num_actors: int = Field(default=2, ge=1)
    cpus_per_actor: float = Field(default=1, gt=0)
    gpus_per_actor: float = Field(default=0, ge=0)
    """More than 1 spreads the model over them."""
    address: str | None = None
    """Ray address; None starts a local Ray, or joins the one that `ray job submit` provides."""
    storage: str = "runs"
    """Where the run directory is made: a folder, or a URI (s3://, gs://) that is worked in below $AARLIB_SCRATCH."""


class AuditRunConfig(Config):
    name: str
    """Run directory under ray.storage."""
    model: ModelConfig = ModelConfig()
    adapter: Path | None = None
    """Audit the model with this adapter attached; relative to the config file."""
    audit: AuditConfig
    ray: ActorsConfig = ActorsConfig()
    tracking: TrackingConfig = TrackingConfig()

"""The lens's run configuration: one TOML per decomposition. Imports no torch."""

from pathlib import Path

from aarlib.config import Config
from aarlib.lens.config import LensConfig
from aarlib.runtime.audit_config import ActorsConfig
from aarlib.training.config import ModelConfig, TrackingConfig


class LensRunConfig(Config):
    name: str
    """Run directory under ray.storage."""
    model: ModelConfig = ModelConfig()
    adapter: Path | None = None
    """Decompose the model with this adapter attached; relative to the config file."""
    before: Path | None = None
    """Run directory of the same texts decomposed without the adapter: shares of influence are compared with it."""
    lens: LensConfig
    ray: ActorsConfig = ActorsConfig()
    tracking: TrackingConfig = TrackingConfig()

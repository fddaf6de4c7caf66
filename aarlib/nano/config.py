"""Settings of the nano world, the nano model and its pre-training. Imports no torch."""

from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from aarlib.aar.config import AARConfig
from aarlib.config import Config
from aarlib.training.config import TrackingConfig

Register = Literal["almanac", "web", "ledger"]
KINDS = ("article", "questions", "sums", "problem", "story", "instruction", "real")


class WorldConfig(Config):
    seed: int = 0
    entities_per_subject: int = Field(default=56, ge=1)
    """Invented entities in each of the six subjects; each has six facts, so 56 give 2,016 facts."""
    registers: tuple[Register, ...] = ("almanac", "web")
    """Registers that articles are written in; the ledger register is left for what comes after pre-training."""
    mixture: dict[str, float] = {
        "article": 0.18,
        "questions": 0.10,
        "sums": 0.12,
        "problem": 0.26,
        "story": 0.17,
        "instruction": 0.05,
        "real": 0.12,
    }
    """Share of the training tokens of each kind of document."""
    chat_share: float = Field(default=0.35, ge=0, le=1)
    """Share of questions, problems and instructions that are written as a conversation."""

    @field_validator("registers")
    @classmethod
    def _registers(cls, registers: tuple[Register, ...]) -> tuple[Register, ...]:
        if not registers or len(set(registers)) != len(registers):
            raise ValueError("registers must be one or more of almanac, web, ledger, each once")
        return registers

    @field_validator("mixture")
    @classmethod
    def _mixture(cls, mixture: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(mixture) - set(KINDS))
        if unknown:
            raise ValueError(f"unknown kinds {unknown}; known kinds: {', '.join(KINDS)}")
        if any(share < 0 for share in mixture.values()) or abs(sum(mixture.values()) - 1) > 1e-6:
            raise ValueError("shares must not be negative and must sum to 1")
        return mixture


class NanoModelConfig(Config):
    num_layers: int = Field(default=8, ge=1)
    d_model: int = Field(default=128, ge=8)
    num_heads: int = Field(default=4, ge=1)
    num_experts: int = Field(default=16, ge=2)
    top_k: int = Field(default=4, ge=1)
    d_expert: int = Field(default=48, ge=1)
    vocab_size: int = Field(default=1920, ge=512)
    context: int = Field(default=512, ge=16)
    initializer_range: float = Field(default=0.04, gt=0)


class Phase(Config):
    until: float = Field(gt=0, le=1)
    """Progress at which the phase ends."""
    sequence_length: int = Field(ge=16)


class PretrainConfig(Config):
    name: str = "pretrain_nano"
    seed: int = 0
    storage: Path = Path("runs")
    """The run directory is `<storage>/<name>`."""
    real_text: Path | None = None
    """Folder with gutenberg_*.txt and us_state_union.jsonl.gz; needed where the mixture has real text."""
    world: WorldConfig = WorldConfig()
    model: NanoModelConfig = NanoModelConfig()
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    autocast: bool = False
    """bfloat16 autocast of the forward."""
    experts_implementation: Literal["eager", "grouped_mm"] = "grouped_mm"
    token_budget: int = Field(default=6_000_000, ge=1)
    stop_at: datetime | None = None
    """UTC wall-clock (ISO 8601) by which the schedule must have ended; it then ends at whichever comes first."""
    batch_tokens: int = Field(default=2048, ge=16)
    phases: tuple[Phase, ...] = (Phase(until=0.8, sequence_length=128), Phase(until=1.0, sequence_length=512))
    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak, of AdamW: embeddings, output head, norms, routers."""
    muon_learning_rate: float = Field(default=0.02, gt=0)
    """Peak, of Muon: attention and expert matrices."""
    warmup: float = Field(default=0.01, ge=0, lt=1)
    decay_from: float = Field(default=0.3, ge=0, lt=1)
    """Progress from which the learning rate falls linearly to zero."""
    grow_until: float = Field(default=0.3, gt=0, le=1)
    """Progress at which the operands of sums have grown to their full size."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Of the matrices that Muon trains."""
    betas: tuple[float, float] = (0.9, 0.98)
    max_grad_norm: float = Field(default=1.0, gt=0)
    balance_coefficient: float = Field(default=0.05, ge=0)
    """Weight of the load-balancing loss, computed for each layer and for world and real text apart, then averaged."""
    z_coefficient: float = Field(default=1e-4, ge=0)
    train: Literal["model", "all"] = "model"
    """`all`: the model and, from its first step on, attention-aware routers in the layers of `aar`."""
    aar: AARConfig | None = None
    tracking: TrackingConfig = TrackingConfig(experiment="pretrain_nano")
    log_every: int = Field(default=10, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)

    @model_validator(mode="after")
    def _what_is_trained(self) -> Self:
        if (self.train == "all") != (self.aar is not None):
            raise ValueError(
                f"train = {self.train!r} with aar {'set' if self.aar else 'not set'}: "
                "give aar.layers and train = 'all' together, or neither"
            )
        if self.aar is not None and max(self.aar.layers) >= self.model.num_layers:
            raise ValueError(f"aar.layers = {self.aar.layers} with model.num_layers = {self.model.num_layers}")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.world.mixture.get("real", 0) > 0 and self.real_text is None:
            raise ValueError("world.mixture has real text but real_text is not set; name its folder or set real = 0")
        longest = max(phase.sequence_length for phase in self.phases)
        if longest > self.model.context or longest > self.batch_tokens:
            raise ValueError(
                f"phases: sequence_length = {longest} exceeds model.context = {self.model.context} "
                f"or batch_tokens = {self.batch_tokens}"
            )
        if [phase.until for phase in self.phases] != sorted(phase.until for phase in self.phases) or self.phases[
            -1
        ].until < 1:
            raise ValueError("phases must be ordered by until and end at 1.0")
        if self.model.d_model % self.model.num_heads:
            raise ValueError(
                f"model.d_model = {self.model.d_model} is not a multiple of model.num_heads = {self.model.num_heads}"
            )
        return self

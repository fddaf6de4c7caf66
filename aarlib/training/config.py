"""The run configuration: one TOML per run. Imports no torch.

A run file may name several methods (`[method.sft]`, `[method.aar]`, ...) and several seeds; every (method, seed) pair
is one training, all on the same rows in the same order, inside one worker group.
"""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.config import Config
from aarlib.fdaa.config import AggregationConfig, FDAAConfig, StaticCalibratorConfig

MethodConfig = Annotated[RouterSFTConfig | AARConfig | FDAAConfig | StaticCalibratorConfig, Field(discriminator="name")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]


class ModelConfig(Config):
    name: str = "nano"
    """`nano`, a Hugging Face hub id, or a local folder."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the frozen base; routing parameters are float32 always."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    adapter: Path | None = None
    """Trained routers attached before an aggregation method trains over them; relative to the config file."""
    geometry: Path | None = None
    """A config.json with the model's shapes, for --dry-run where the hub is not reached; relative to the config file."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own template; relative to the config file."""


class TextDomain(Config):
    """Plain text of one kind, `[data.domains.<name>]`."""

    text: tuple[str, ...]
    """Globs or URIs of .txt, JSONL(.gz) or parquet files, or `nano:<register>:<number of articles>`."""
    column: str = "text"
    """The string of a JSONL or parquet row that holds its text."""
    documents: Literal["whole", "headings"] = "whole"
    """What a document is: each row (of a .txt file: the whole file), or what stands between two WikiText titles ` = Title = `."""
    hub: str | None = None
    """Hugging Face dataset id that `prepare` ingests into the folder of `text`."""
    hub_config: str | None = None
    """Its configuration, such as wikitext-103-raw-v1."""
    hub_revision: str | None = None
    """Branch, tag or commit; `refs/convert/parquet` for a dataset that is a script."""
    hub_split: str = "train"
    hub_rows: int | None = Field(default=None, ge=1)
    """At most so many rows."""
    hub_column: str = "text"
    """Its column that holds the text; the shards name it `text`."""

    @model_validator(mode="after")
    def _columns(self) -> Self:
        if self.hub is not None and self.column != "text":
            raise ValueError(f"column = {self.column!r}: ingested shards name it `text`; set hub_column instead")
        return self


class DataConfig(Config):
    train: tuple[str, ...] = ()
    """Globs or URIs of parquet / JSONL(.gz) conversations, shards made by `prepare`, or `nano:<split>` (bundled)."""
    domains: dict[str, TextDomain] = {}
    """In place of `train`: language-model windows of plain text. Unit u of rows comes from domain u mod d."""
    unit_rows: int = Field(default=8, ge=1)
    """Consecutive rows of the global order that share a domain and, for methods that train one layer at a time, a layer."""
    order_seed: int | None = None
    """Of the order of the rows; None: each run's own seed."""
    test: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the documents of `domains` that training never sees in any way, for a study."""
    proportions: tuple[Annotated[float, Field(gt=0.0)], ...] | None = None
    """Of the training rows, one per entry of `train`: the largest set of rows that has them exactly. None: all rows."""
    hub: str | None = None
    """Hugging Face dataset id that `prepare` ingests into the folder of `train`."""
    sample: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the rows kept, by a stable hash of the row: the same rows for every seed and machine."""
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the kept rows never trained on and evaluated at the end, by a stable hash of the row."""
    max_held_out: int | None = Field(default=None, ge=2)
    """At most this many held-out rows are evaluated (the first by hash)."""
    sequence_length: int = Field(default=512, ge=4)
    packing: bool = False
    """Fill rows of sequence_length with several conversations each, kept apart: less padding, the same step."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that is no conversation: stop with file and line, or skip it and count."""


class OptimConfig(Config):
    learning_rate: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    global_batch: int = Field(default=1024, ge=1)
    """Rows per optimizer step, over all workers."""
    micro_batch: int = Field(default=8, ge=1)
    """Rows per forward of one worker."""
    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    warmup_ratio: Fraction = 0.03
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Not in the paper; ours."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Not in the paper; ours."""
    max_grad_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Not in the paper; ours."""
    activation_checkpointing: bool = False
    log_every: int = Field(default=10, ge=1)
    population: bool = False
    """Train aggregation methods on the same layers side by side on one pass of the frozen prefix (seeds, lambdas)."""
    prefix_cache_gib: float = Field(default=0.0, ge=0)
    """Disk budget of each worker for the residual stream entering the first trained layer, which later epochs then read."""


class RayConfig(Config):
    num_workers: int = Field(default=2, ge=1)
    min_workers: int | None = Field(default=None, ge=1)
    """Elastic: start, and go on after a lost node, with as few workers as this; the result does not depend on their number."""
    use_gpu: bool = False
    cpus_per_worker: float = Field(default=1, gt=0, allow_inf_nan=False)
    threads_per_worker: int = Field(default=1, ge=1)
    zero_stage: Literal[0, 1, 2, 3] = 0
    address: str | None = None
    """Ray address; None starts a local Ray, or joins the one that `ray job submit` provides."""
    storage: str = "runs"
    """Where run directories are made: a folder, local or shared by all nodes, or a URI (s3://, gs://), of which nodes work in
    copies below $AARLIB_SCRATCH (~/.cache/aarlib/runs)."""
    max_failures: int = Field(default=1, ge=0)
    checkpoint_every: int = Field(default=50, ge=1)
    """Optimizer steps between checkpoints, from which a failed worker group resumes."""
    evaluate_at_checkpoints: bool = False
    """Held-out CE at every checkpoint, in metrics.jsonl and for the schedulers of a sweep."""


class TrackingConfig(Config):
    experiment: str = "aarlib"
    uri: str | None = None
    """MLflow tracking URI; None is that of MLFLOW_TRACKING_URI, or else a sqlite file beside the runs."""
    run_name: str | None = None


class EvaluateConfig(Config):
    tasks: tuple[str, ...] = ()
    """lm-eval task names, run for the untouched model and every adapter."""
    include_path: Path | None = None
    """A folder of further lm-eval task YAMLs; relative to the config file."""
    limit: int | None = Field(default=None, ge=1)
    num_fewshot: int | None = Field(default=None, ge=0)
    batch_size: int = Field(default=16, ge=1)
    apply_chat_template: bool = False
    num_actors: int = Field(default=2, ge=1)
    gpus_per_actor: float = Field(default=0, ge=0)
    max_gen_toks: int | None = Field(default=None, ge=1)


class Run(NamedTuple):
    """One training: a label, its method and its seed. `name` is its folder."""

    label: str
    method: RouterSFTConfig | AARConfig | FDAAConfig | StaticCalibratorConfig
    seed: int

    @property
    def name(self) -> str:
        return f"{self.label}-seed{self.seed}"


class RunConfig(Config):
    name: str
    """Run directory under ray.storage."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    method: dict[str, MethodConfig]
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1)
    """Initialisation and data order."""
    optim: OptimConfig = OptimConfig()
    ray: RayConfig = RayConfig()
    tracking: TrackingConfig = TrackingConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        """Trials of a sweep have names with slashes."""
        parts = name.split("/")
        if any(not part.strip() or part in (".", "..") or not part.isprintable() for part in parts):
            raise ValueError("the run directory is <ray.storage>/<name>; give a plain name, such as olmoe_m40")
        return name

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("every seed is one training; give each once")
        return seeds

    @field_validator("method")
    @classmethod
    def _method(cls, method: dict[str, MethodConfig]) -> dict[str, MethodConfig]:
        if not method:
            raise ValueError("no method given; add a table such as [method.aar]")
        for label in method:
            if not label.replace("_", "").replace("-", "").isalnum() or label == "untouched":
                raise ValueError(f"label {label!r} must be letters, digits, - and _, and not 'untouched'")
        return method

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for label, method in self.method.items():
            window = getattr(method, "window", 0)
            if window > self.data.sequence_length:
                raise ValueError(
                    f"method.{label}.window = {window} is longer than data.sequence_length = "
                    f"{self.data.sequence_length}; shorten the window or lengthen the sequence"
                )
        self._check_text()
        shares = self.data.proportions
        if shares is not None and len(shares) != len(self.data.train):
            raise ValueError(
                f"data.proportions has {len(shares)} entries and data.train {len(self.data.train)}; give one for each"
            )
        if self.optim.global_batch < self.ray.num_workers:
            raise ValueError(
                f"optim.global_batch = {self.optim.global_batch} is less than ray.num_workers = {self.ray.num_workers}; "
                "every worker needs a row"
            )
        minimum = self.ray.min_workers
        if minimum is not None and minimum > self.ray.num_workers:
            raise ValueError(
                f"ray.min_workers = {minimum} is more than ray.num_workers = {self.ray.num_workers}; lower it"
            )
        return self

    def _check_text(self) -> None:
        data, optim = self.data, self.optim
        if bool(data.train) == bool(data.domains):
            raise ValueError("data: give either train (conversations) or domains (plain text)")
        if data.domains and (data.packing or data.proportions is not None):
            raise ValueError(
                "data.packing and data.proportions are for conversations; windows of text are full already"
            )
        if data.held_out + data.test >= 1:
            raise ValueError(f"data.held_out = {data.held_out} and data.test = {data.test} leave nothing to train on")
        aggregation = [label for label, method in self.method.items() if isinstance(method, AggregationConfig)]
        if aggregation and data.packing:
            raise ValueError(
                f"method.{aggregation[0]}: aggregation methods train on unpacked rows; set data.packing = false"
            )
        if aggregation and optim.activation_checkpointing:
            raise ValueError(
                f"optim.activation_checkpointing: method.{aggregation[0]} acts on a frozen prefix, which is gone when a layer is "
                "computed again in the backward pass; leave it out, and lower optim.micro_batch for memory"
            )
        if optim.population and len(self.seeds) > 1 and data.order_seed is None:
            raise ValueError("optim.population: heads of several seeds share their batches; set data.order_seed")

    def order_seed(self, seed: int) -> int:
        """Of the order of the rows that a run of `seed` sees."""
        return seed if self.data.order_seed is None else self.data.order_seed

    def runs(self) -> list[Run]:
        """A static calibrator starts at zeros: with one order of rows all its seeds are one training."""
        first_only = {
            label
            for label, method in self.method.items()
            if isinstance(method, StaticCalibratorConfig) and self.data.order_seed is not None
        }
        return [
            Run(label, method, seed)
            for seed in self.seeds
            for label, method in self.method.items()
            if seed == self.seeds[0] or label not in first_only
        ]

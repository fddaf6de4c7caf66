"""What a run would train, from the model's geometry alone: no weights, no Ray. Bad methods are refused here."""

from pathlib import Path
from typing import Any, NamedTuple

from aarlib.training.config import RunConfig


class MethodPlan(NamedTuple):
    label: str
    method: str
    num_trainable: int
    num_router: int
    """Of these, weights and biases of the stock routers."""
    layers: tuple[int, ...]
    """With a trained router."""
    aar_layers: tuple[int, ...]


class Plan(NamedTuple):
    model: str
    num_layers: int
    moe_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    """MoE layers with attention weights: where AAR can be attached."""
    num_experts: int
    top_k: int
    methods: tuple[MethodPlan, ...]


def plan(config: RunConfig) -> Plan:
    """Attach every method to the model on the meta device; a ValueError names what cannot be trained."""
    from aarlib.moe.anatomy import anatomy
    from aarlib.moe.loading import load_config, meta_model
    from aarlib.moe.packing import check_packing
    from aarlib.training.methods import build_method

    try:
        geometry = load_config(config.model.name, config.model.revision, config.model.geometry)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.name = {config.model.name!r}: {str(error).splitlines()[0]}") from error
    _check_length(config, geometry.get_text_config())
    model = meta_model(geometry)
    parts = anatomy(model)
    if config.data.packing:
        check_packing(parts)
    methods: list[MethodPlan] = []
    for label, method in config.method.items():
        try:
            handle = build_method(method, 0).attach(model)
        except ValueError as error:
            raise ValueError(f"method.{label}: {error}") from None
        routers = getattr(handle, "routers", {})
        router = sum(
            parameter.numel()
            for name, parameter in handle.trainable()
            if routers and name.endswith((".weight", ".bias"))
        )
        layers = tuple(sorted(routers)) or tuple(getattr(handle, "layers", ()))
        methods.append(
            MethodPlan(label, method.name, handle.num_trainable, router, layers, tuple(getattr(method, "layers", ())))
        )
        handle.detach()
    return Plan(
        config.model.name, len(parts.layers), parts.moe_layers, parts.aar_layers, parts.num_experts, parts.top_k,
        tuple(methods),
    )  # fmt: skip


def _check_length(config: RunConfig, geometry: Any) -> None:
    longest = getattr(geometry, "max_position_embeddings", None)
    if longest is not None and config.data.sequence_length > longest:
        raise ValueError(
            f"data.sequence_length = {config.data.sequence_length} is more than the model's context of {longest}; shorten it"
        )


def check_inputs(config: RunConfig) -> list[str]:
    """Data and chat template, as far as they are on this machine; one line on each that is not. Loads no weights.

    A ValueError for data that is missing and that `prepare` does not ingest, and for a template that cannot be trained on.
    """
    from aarlib.data.chat import check_template
    from aarlib.data.sources import find_sources
    from aarlib.moe.loading import load_tokenizer

    notes: list[str] = []
    if config.data.domains:
        return notes
    try:
        find_sources(config.data.train)
    except ValueError:
        if config.data.hub is None:
            raise
        notes.append(f"data not there yet: `python -m pipelines.prepare` ingests {config.data.hub}")
    name = config.model.name
    if name == "nano" or Path(name).is_dir():
        check_template(load_tokenizer(name, config.model.revision, config.model.chat_template))
    else:
        notes.append(f"chat template not checked: it comes with the tokenizer of {name}")
    return notes


def estimated_rows(config: RunConfig) -> int | None:
    """About how many rows an epoch trains on, from the sizes of local files; None where that is not known beforehand."""
    import pyarrow.parquet as pq

    from aarlib.data.sources import expand_sources

    if config.data.domains:
        return None
    total = 0
    for pattern in config.data.train:
        if pattern.startswith("nano:"):
            total += int(pattern.rsplit(":", 1)[1])
            continue
        for path in expand_sources([pattern]):
            if path.endswith(".parquet") and "://" not in path:
                total += pq.ParquetFile(path).metadata.num_rows
            elif path.endswith(".jsonl") and "://" not in path:
                with Path(path).open("rb") as lines:
                    total += sum(1 for _ in lines)
            else:
                return None
    return round(total * config.data.sample * (1 - config.data.held_out))

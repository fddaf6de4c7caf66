"""Load a frozen model and its tokenizer; build one on the meta device from its geometry alone."""

import json
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aarlib.moe.anatomy import anatomy, check_not_quantised
from aarlib.moe.families import family_of

logger = logging.getLogger("aarlib")

NANO = Path(__file__).parent.parent / "nano" / "weights"
ExpertsImplementation = Literal["eager", "grouped_mm", "batched_mm"]


def load_model(
    name: str = "nano",
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: Any = None,
    experts_implementation: ExpertsImplementation = "grouped_mm",
) -> tuple[Any, Any]:
    """(model, tokenizer): the bundled `nano`, a Hugging Face hub id, or a folder; in eval(), every parameter frozen.

    Code from the hub is never run. Raises ValueError for an unsupported family, a quantised checkpoint, or missing or
    unexpected weights.
    """
    source = str(NANO) if name == "nano" else name
    config = AutoConfig.from_pretrained(source, revision=revision)
    check_config(config, name)
    implementation = "eager" if config.get_text_config().model_type == "gpt_oss" else "sdpa"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source,
        revision=revision,
        dtype=dtype,
        device_map=device_map,
        attn_implementation=implementation,
        output_loading_info=True,
    )
    model, info = loaded
    problems = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(problems.values()):
        found = "; ".join(f"{key}: {', '.join(names[:5])}" for key, names in problems.items() if names)
        raise ValueError(
            f"model {name!r} did not load whole ({found}); check the checkpoint and its transformers layout"
        )
    if device is not None:
        model = model.to(device)
    freeze(model)
    model.set_experts_implementation(experts_implementation)
    anatomy(model)
    return model, load_tokenizer(name, revision)


def load_tokenizer(name: str, revision: str | None = None, chat_template: str | Path | None = None) -> Any:
    """The model's tokenizer; the Jinja file `chat_template`, where given, replaces its own template."""
    tokenizer = AutoTokenizer.from_pretrained(str(NANO) if name == "nano" else name, revision=revision)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def freeze(model: nn.Module) -> None:
    """eval() and no gradients: dropout and router jitter are off, the base never changes."""
    model.eval()
    model.requires_grad_(False)


def check_config(config: Any, name: str) -> None:
    """Refuse what the seam does not support, before weights are read."""
    family_of(config.get_text_config().model_type)
    check_not_quantised(config, name)


def load_config(name: str, revision: str | None = None, geometry: str | Path | None = None) -> Any:
    """The transformers config: from `geometry` (a config.json) where given, else from the bundled, local or hub model."""
    if geometry is None:
        return AutoConfig.from_pretrained(str(NANO) if name == "nano" else name, revision=revision)
    path = Path(geometry)
    if not path.is_file():
        raise ValueError(f"model.geometry = {str(path)!r} does not exist; name a config.json file")
    values = json.loads(path.read_text(encoding="utf-8"))
    return AutoConfig.for_model(values.pop("model_type"), **values)


def meta_model(config: Any) -> Any:
    """The model of a transformers config on the meta device: all shapes, no memory."""
    check_config(config, getattr(config, "name_or_path", "") or config.model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    freeze(model)
    return model

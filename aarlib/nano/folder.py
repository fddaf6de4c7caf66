"""The Hugging Face folder of a nano model: bfloat16 weights, tokenizer, and the world it was trained on."""

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

from aarlib.config import write_text_atomically
from aarlib.nano.config import WorldConfig

WORLD_FILE = "world.json"


def save_folder(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast, world: WorldConfig, folder: Path) -> None:
    """Write beside `folder`, then put every file in its place; README.md stays."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    bf16 = OlmoeForCausalLM(model.config)
    torch.nn.Module.to(bf16, torch.bfloat16)
    bf16.load_state_dict(state)
    bf16.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.bos_token_id]
    bf16.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    write_world(temporary, world)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        os.replace(path, folder / path.name)
    shutil.rmtree(temporary)


def write_world(folder: Path, world: WorldConfig) -> None:
    write_text_atomically(folder / WORLD_FILE, world.to_json() + "\n")


def check_world(folder: Path, world: WorldConfig) -> None:
    """ValueError unless `folder` was made from the same facts: seed, size and registers."""
    path = folder / WORLD_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {WORLD_FILE}: it is no nano checkpoint; name a folder made by pre-training")
    found = WorldConfig.from_mapping(json.loads(path.read_text(encoding="utf-8")), origin=str(path))
    for field in ("seed", "entities_per_subject", "registers"):
        theirs, ours = getattr(found, field), getattr(world, field)
        if theirs != ours:
            raise ValueError(
                f"{folder} is a checkpoint of another world: world.{field} = {theirs!r} there, {ours!r} here; "
                f"set world.{field} = {theirs!r} or start a new run under another name"
            )

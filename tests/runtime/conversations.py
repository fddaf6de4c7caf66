"""A tiny model with the bundled tokenizer in a folder, and a file of conversations, for tests that train on Ray."""

import json
import random
from pathlib import Path

from aarlib.moe.loading import load_tokenizer
from aarlib.training.config import RunConfig
from tests.tiny import tiny_model


def save_model(folder: Path, family: str = "olmoe", **overrides: object) -> Path:
    tokenizer = load_tokenizer("nano")
    tiny_model(family, vocab_size=len(tokenizer), **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_conversations(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Every third prompt fills the sequence, so that its row has no target; answers of uneven length."""
    generator = random.Random(seed)
    words = ("seven", "apples", "and", "two", "boats", "make", "nine", "things", "in", "a", "row")
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            prompt = generator.choices(words, k=200 if index % 3 == 0 else generator.randint(2, 12))
            answer = generator.choices(words, k=generator.randint(1, 15))
            messages = [
                {"role": "user", "content": " ".join(prompt)},
                {"role": "assistant", "content": " ".join(answer)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def run_config(model: Path, data: Path, storage: Path, name: str, **changes: object) -> RunConfig:
    base = RunConfig.from_mapping(
        {
            "name": name,
            "model": {"name": str(model), "dtype": "float32", "experts_implementation": "eager"},
            "data": {"train": [str(data)], "held_out": 0.2, "sequence_length": 48},
            "method": {"aar": {"name": "aar", "layers": [1, 2], "window": 4}},
            "optim": {
                "learning_rate": 1e-3,
                "global_batch": 4,
                "micro_batch": 2,
                "max_steps": 10,
                "log_every": 5,
                "max_grad_norm": 0.5,
            },
            "ray": {"storage": str(storage), "num_workers": 2, "checkpoint_every": 3, "max_failures": 1},
        }
    )
    return base.updated(changes)

"""Two ways of pre-training compared on text that neither was trained on, paired text by text; seeds are averaged first."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from aarlib.moe.loading import load_model
from aarlib.nano.config import WorldConfig
from aarlib.nano.encyclopaedia import REGISTERS
from aarlib.nano.folder import check_world
from aarlib.nano.scoring import text_nats
from aarlib.nano.tokenizer import render
from aarlib.nano.world import held_out_documents, register_texts
from aarlib.stats import Interval, ratio_bootstrap
from aarlib.training.adapter import METADATA, load_adapter


class Comparison(NamedTuple):
    """Bits per byte on one kind of text."""

    text: str
    first: float
    second: float
    difference: Interval
    """second - first."""
    by_seed: tuple[float, ...]
    """The difference of each pair of folders, in the order given."""


def compare(
    first: Sequence[Path], second: Sequence[Path], world: WorldConfig, num_items: int = 500
) -> list[Comparison]:
    """One row a kind of text; folder i of `first` and of `second` share a seed. ValueError where their numbers differ."""
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} folders against {len(second)}; give as many on both sides, in order of seeds")
    documents = held_out_documents(world, num_items)
    texts = {"held-out world text": [document.text or render(document.messages) for document in documents]}
    texts |= {f"{register} articles": register_texts(world, register, num_items) for register in REGISTERS}
    bits = [[_bits(folder, world, texts) for folder in side] for side in (first, second)]
    return [_row(name, [[found[name] for found in side] for side in bits]) for name in texts]


class _Bits(NamedTuple):
    bits_N: NDArray[np.float64]
    bytes_N: NDArray[np.float64]


def _bits(folder: Path, world: WorldConfig, texts: dict[str, list[str]]) -> dict[str, _Bits]:
    check_world(folder, world)
    torch.set_num_threads(1)
    model, tokenizer = load_model(str(folder), dtype="float32")
    if (folder / "adapter" / METADATA).is_file():
        load_adapter(model, folder / "adapter")
    scored = {name: text_nats(model, tokenizer, sample) for name, sample in texts.items()}
    return {name: _Bits(np.array(s.nats) / np.log(2), np.array(s.num_bytes, float)) for name, s in scored.items()}


def _row(name: str, sides: list[list[_Bits]]) -> Comparison:
    """Sums of bits averaged over the seeds of a side; the difference is bootstrapped over texts."""
    means = [np.mean([seed.bits_N for seed in side], axis=0) for side in sides]
    bytes_N = sides[0][0].bytes_N
    first, second = (float(mean.sum() / bytes_N.sum()) for mean in means)
    by_seed = (float((b.bits_N - a.bits_N).sum() / bytes_N.sum()) for a, b in zip(*sides, strict=True))
    return Comparison(name, first, second, ratio_bootstrap(means[1] - means[0], bytes_N), tuple(by_seed))


def comparison_table(rows: Sequence[Comparison], names: tuple[str, str]) -> str:
    lines = [f"| text | {names[0]} | {names[1]} | difference, bits per byte | each seed |", "|---|---|---|---|---|"]
    for row in rows:
        interval = f"{row.difference.mean:+.4f} [{row.difference.low:+.4f}, {row.difference.high:+.4f}]"
        seeds = ", ".join(f"{value:+.4f}" for value in row.by_seed)
        lines.append(f"| {row.text} | {row.first:.4f} | {row.second:.4f} | {interval} | {seeds} |")
    return "\n".join(lines)

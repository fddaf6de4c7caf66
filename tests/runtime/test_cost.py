"""The table of docs/scaling.md is what the counts give."""

from pathlib import Path

import pytest

from aarlib.runtime.cost import Cost, cost
from aarlib.training.config import RunConfig
from pipelines.command_line import resolve_paths

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "pipelines" / "configs"
SUSTAINED = 200e12
"""FLOP/s assumed of a GPU: a fifth of what an H100 is rated at in dense bfloat16. Not measured."""
TULU_ROWS = 939_344
MODELS = {"OLMoE-1B-7B": "olmoe_tulu3", "Qwen1.5-MoE-A2.7B": "qwen15_moe_tulu3", "Qwen3.6-35B-A3B": "qwen36_moe_tulu3"}


def load(name: str) -> RunConfig:
    return resolve_paths(RunConfig.from_toml(CONFIGS / f"{name}.toml"), CONFIGS)


def tokens(config: RunConfig, counted: Cost) -> int:
    """Of one run, at most."""
    rows = round(TULU_ROWS * config.data.sample * (1 - config.data.held_out))
    steps = -(-rows // config.optim.global_batch)
    return min(steps, config.optim.max_steps or steps) * counted.tokens_per_step


def table() -> str:
    lines = [
        "| model | parameters | a token meets | trained | GFLOP a token | tokens a run | runs | hours on 1 GPU | on 4 | on 64 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, name in MODELS.items():
        config = load(name)
        counted = cost(config)
        run = tokens(config, counted)
        hours = len(config.runs()) * run * counted.flops_per_token / SUSTAINED / 3600
        cells = [
            model, f"{counted.num_parameters / 1e9:.2f}B", f"{counted.num_active / 1e9:.2f}B",
            f"{counted.num_trainable / 1e6:.1f}M", f"{counted.flops_per_token / 1e9:.1f}", f"{run / 1e6:.0f}M",
            str(len(config.runs())), f"{hours:.1f}", f"{hours / 4:.1f}", f"{hours / 64:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_olmoe_is_counted_by_hand() -> None:
    """16 layers, d 2048, 64 experts of 1024, top 8, vocabulary 50304."""
    counted = cost(load("olmoe_tulu3"))
    attention, norms = 4 * 2048 * 2048, 4 * 2048
    router, expert, head = 64 * 2048, 3 * 2048 * 1024, 50304 * 2048
    assert counted.num_parameters == 16 * (attention + norms + router + 64 * expert) + 2 * head + 2048
    assert counted.num_active == 16 * (attention + norms + router + 8 * expert) + head + 2048
    assert counted.flops_per_token == 6 * counted.num_active
    assert counted.checkpoint_bytes == 12 * 3_986_816 and counted.gathered_bytes == 0


@pytest.mark.slow
def test_the_documents_table_is_what_the_counts_give() -> None:
    assert table() in (ROOT / "docs" / "scaling.md").read_text()
    qwen36 = cost(load("qwen36_moe_tulu3"))
    assert qwen36.gathered_bytes == 3 * qwen36.base_bytes

"""Measure a speed claim against the plain way, on this machine, with the targets beside.

capture: attention with windows. train: a training step. audit, fdaa, lens: theirs. gpu: OLMoE-1B-7B with random weights.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

LENGTHS = (512, 2048, 4096, 8192)
OLMOE = Path(__file__).parent / "configs" / "geometry" / "olmoe_1b_7b.json"
OLMOE_LAYERS = (9, 10, 11, 12, 13, 14, 15)


@dataclass(frozen=True)
class Arguments:
    name: Annotated[
        tyro.conf.Positional[Literal["capture", "train", "audit", "fdaa", "lens", "gpu"]],
        tyro.conf.arg(metavar="{capture,train,audit,fdaa,lens,gpu}"),
    ]
    lengths: tuple[int, ...] = ()
    """Sequence lengths; default 512 2048 4096 8192 (gpu: 512 4096)."""
    rounds: int = 5
    """Turns of every way after a warm-up; medians are shown."""
    threads: int = 2
    tokens: int = 0
    """Tokens of a training step (train: one row where 0; gpu: 16384 where 0)."""
    memory_limit: float = 0.0
    """GiB a process may hold before it counts as out of memory; 0: what is free now, less 2."""
    out: Path = Path("runs/bench")
    """Folder for <name>.json and <name>.png; an existing file is replaced only by a finished run."""
    tiny: bool = False
    """Small shapes, to see that everything runs."""
    dry_run: bool = False
    """Print what would be measured and stop."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = tyro.cli(
        Arguments,
        prog="python -m pipelines.bench",
        description=__doc__,
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    lengths = arguments.lengths or ((512, 4096) if arguments.name == "gpu" else LENGTHS)
    print(f"bench {arguments.name}: lengths {list(lengths)}, {arguments.threads} threads, {arguments.rounds} rounds")
    if arguments.dry_run:
        return 0
    try:
        record = BENCHES[arguments.name](arguments, lengths)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from aarlib.config import write_text_atomically

    path = arguments.out / f"{arguments.name}.json"
    write_text_atomically(path, json.dumps({**machine(), "threads": arguments.threads, **record}, indent=2))
    print(f"wrote {path}")
    return 0


def machine() -> dict[str, Any]:
    """When and on what, with the load from elsewhere."""
    import os
    import platform
    from datetime import UTC, datetime

    import torch
    import transformers

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "gpu": card,
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def memory_limit(arguments: Arguments) -> float:
    from aarlib.bench.process import free_gib

    limit = arguments.memory_limit or max(2.0, free_gib() - 2)
    print(f"a process that needs more than {limit:.1f} GiB counts as out of memory", flush=True)
    return limit


def gib(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.3f} GiB"


def judged(name: str, value: float, target: float, at_least: bool = False) -> str:
    held = value >= target if at_least else value <= target
    return f"  {name}: {value:.2f} (target {'>=' if at_least else '<='} {target}){'' if held else '  MISSED'}"


def capture(arguments: Arguments, lengths: Sequence[int]) -> dict[str, Any]:
    from aarlib.bench import capture as bench
    from aarlib.bench.chart import draw

    shape = {"heads": 2, "head_dim": 16, "window": 8} if arguments.tiny else {}
    rows = []
    limit = memory_limit(arguments)
    for length in lengths:
        [row] = bench.run([length], arguments.rounds, arguments.threads, limit, **shape)
        rows.append(row)
        print(f"length {length}: " + ", ".join(f"{name} {item.seconds:.4f} s" for name, item in row.turns.items()))
        ratios = row.ratios()
        for name, target in bench.TARGETS.items():
            print(judged(name, ratios.pop(name), target))
        for name, value in ratios.items():
            judge = name == "eager forward / ours" and length == 2048
            print(judged(name, value, bench.EAGER_TARGET, at_least=True) if judge else f"  {name}: {value:.2f}")
        print("  extra memory: " + ", ".join(f"{way} {gib(peak)}" for way, peak in row.memory_gib.items()), flush=True)
    growth = {row.length: row.memory_gib["ours"] for row in rows}
    short, long = growth.get(2048), growth.get(8192)
    if short and long:
        print(judged("extra peak of ours, 8192 over 2048", long / short, bench.MEMORY_TARGET))
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns, peaks = [row.turns for row in rows], [row.memory_gib for row in rows]
    draw(arguments.out / "capture.png", "Attention with windows", lengths, turns, peaks)
    return {"limit_gib": limit, "rows": [as_json(row) for row in rows], "targets": bench.TARGETS}


def train(arguments: Arguments, lengths: Sequence[int]) -> dict[str, Any]:
    from aarlib.bench import train as bench
    from aarlib.bench.chart import draw

    shape = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 128, "num_hidden_layers": 2}
    limit = memory_limit(arguments)
    rows = []
    for length in lengths:
        [row] = bench.run(
            [length],
            arguments.rounds,
            arguments.threads,
            limit,
            arguments.tokens,
            lambda text: print(f"  {text}", file=sys.stderr, flush=True),
            **(shape if arguments.tiny else {}),
        )
        rows.append(row)
        times = ", ".join(f"{name} {item.seconds:.2f} s" for name, item in row.turns.items())
        print(f"length {length}, {row.batch} rows: {times}")
        for name, value in row.ratios().items():
            target = bench.TARGETS.get(length) if name == "aar / routing only" else None
            print(f"  {name}: {value:.2f}" if target is None else judged(name, value, target))
        print("  extra memory: " + ", ".join(f"{way} {gib(peak)}" for way, peak in row.memory_gib.items()), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns, peaks = [row.turns for row in rows], [row.memory_gib for row in rows]
    draw(arguments.out / "train.png", "A training step", lengths, turns, peaks)
    return {"limit_gib": limit, "rows": [as_json(row) for row in rows], "targets": bench.TARGETS}


def as_json(row: Any) -> dict[str, Any]:
    turns = {name: item._asdict() for name, item in row.turns.items()}
    return {**row._asdict(), "turns": turns, "ratios": row.ratios()}


def others(arguments: Arguments, lengths: Sequence[int]) -> dict[str, Any]:
    """The benches of the audit, the heads and the lens print and return what they define themselves."""
    if arguments.name == "audit":
        from aarlib.bench.audit import run

        rows: list[Any] = run(arguments.threads, arguments.rounds)
    elif arguments.name == "fdaa":
        from aarlib.bench.fdaa import Settings, claims

        rows = claims(Settings(), arguments.threads)
    else:
        from aarlib.bench.lens import bench

        rows = [bench(repeats=arguments.rounds, threads=arguments.threads)]
    for row in rows:
        print(row)
    return {"rows": json.loads(json.dumps([row._asdict() for row in rows], default=str))}


def gpu(arguments: Arguments, lengths: Sequence[int]) -> dict[str, Any]:
    import torch

    from aarlib.bench import gpu as bench
    from aarlib.identities.doctor import aware_attach, examine, header, line
    from aarlib.moe import backends
    from aarlib.moe.anatomy import active_parameters
    from aarlib.moe.loading import load_config

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        raise ValueError(
            "no CUDA device: the 7-billion-parameter model is for a GPU; pass --tiny to see the script run"
        )
    config = load_config("olmoe", geometry=OLMOE)
    layers, size = OLMOE_LAYERS, 8192
    if arguments.tiny:
        for name, value in TINY_OLMOE.items():
            setattr(config, name, value)
        layers, size = (1,), 128
    print(f"device {device} {machine()['gpu'] or ''}", flush=True)
    model = bench.build(config, device, torch.bfloat16)
    rate = bench.matmul_rate(device, torch.bfloat16, size)
    print(f"matmul {size}^3 in bfloat16: {rate / 1e12:.3g} TFLOP/s; active parameters {active_parameters(model):,}")
    rows = []
    tokens = arguments.tokens or (256 if arguments.tiny else 16384)
    for row in bench.steps(model, lengths, tokens, layers, 40, rate, arguments.rounds):
        rows.append(row)
        print(step_line(row), flush=True)
    for length in lengths:
        seconds = {row.way: row.seconds for row in rows if row.length == length}
        if seconds["aar"] and seconds["routing only"]:
            print(
                judged(
                    f"length {length}, aar / routing only", seconds["aar"] / seconds["routing only"], bench.AAR_TARGET
                )
            )
    shares = [row.rate_share for row in rows if row.way == "aar" and row.rate_share is not None]
    if shares:
        print(judged("share of the matmul rate, aar", max(shares), bench.RATE_TARGET, at_least=True))
    findings = []
    for dtype in (torch.bfloat16, torch.float32):
        print(f"doctor in {dtype}\n{header()}", flush=True)
        for finding in examine(model.to(dtype), aware_attach(layers, 40)):
            findings.append({"dtype": str(dtype), **finding._asdict(), "passed": finding.passed})
            print(line(finding), flush=True)
    print(f"attention calls with windows: {dict(backends.calls)}")
    return {"matmul_flops": rate, "steps": [row._asdict() for row in rows], "doctor": findings}


TINY_OLMOE = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "eos_token_id": 2,
}


def step_line(row: Any) -> str:
    name = f"length {row.length}, {row.batch} rows, {row.way}"
    if row.seconds is None:
        return f"{name}: out of memory"
    memory = "" if row.peak_gib is None else f", peak {row.peak_gib:.1f} GiB"
    return f"{name}: {row.seconds:.4f} s, {row.tokens_per_second:,.0f} tokens/s{memory}, {row.rate_share:.1%} of the matmul rate"


BENCHES: dict[str, Callable[[Arguments, Sequence[int]], dict[str, Any]]] = {
    "capture": capture,
    "train": train,
    "audit": others,
    "fdaa": others,
    "lens": others,
    "gpu": gpu,
}


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure a speed claim against the plain way, on this machine, with the targets beside.

capture: attention with windows. train: a training step (--method fdaa: the aggregation head's, the same as fdaa). audit, fdaa,
lens: theirs. gpu: OLMoE-1B-7B with random weights. Equal numbers are asserted first. Every part is stored in NAME.partial.json
as soon as it is there, the whole in NAME.json. page: docs/speed.md from docs/studies/results/bench_*.json.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import tyro

LENGTHS = (512, 2048, 4096, 8192)
GPU_LENGTHS = (512, 4096)
ROOT = Path(__file__).parents[1]
OLMOE = Path(__file__).parent / "configs" / "geometry" / "olmoe_1b_7b.json"
OLMOE_LAYERS = (9, 10, 11, 12, 13, 14, 15)
Name = Literal["capture", "train", "audit", "fdaa", "lens", "gpu", "page"]


@dataclass(frozen=True)
class Arguments:
    name: Annotated[tyro.conf.Positional[Name], tyro.conf.arg(metavar="{capture,train,audit,fdaa,lens,gpu,page}")]
    method: Literal["aar", "fdaa"] = "aar"
    """What `train` trains."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths of capture and train (default 512 2048 4096 8192) and of gpu (512 4096)."""
    rounds: int = 5
    """Turns of every way after a warm-up; the median is shown with the least and the most."""
    threads: int = 2
    tokens: int = 0
    """Tokens of a training step (train: one row where 0; gpu: 16384 where 0)."""
    memory_limit: float = 0.0
    """GiB a process may hold before it counts as out of memory; 0: what is free now, less 2."""
    budget: float = 450.0
    """Seconds of gpu; a part that no longer fits is skipped, and said so."""
    out: Path | None = None
    """The JSON file (default runs/bench/NAME.json), a picture beside it; one that is there is replaced only by a finished run.
    Of page: the Markdown file (default docs/speed.md)."""
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
    try:
        if arguments.name == "page":
            return page(arguments)
        name = bench_of(arguments)
        print(f"bench {name}: {arguments.threads} threads, {arguments.rounds} rounds, {sizes(arguments, name)}")
        if not arguments.dry_run:
            measure(arguments, name)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def bench_of(arguments: Arguments) -> str:
    if arguments.method == "aar":
        return arguments.name
    if arguments.name not in ("train", "fdaa"):
        raise ValueError(f"--method={arguments.method}: bench {arguments.name} trains nothing; use it with train")
    return "fdaa"


def sizes(arguments: Arguments, name: str) -> dict[str, Any]:
    """What is measured, JSON-able."""
    found: dict[str, Any] = {"model": "tiny" if arguments.tiny else "OLMoE-1B-7B" if name == "gpu" else "mid"}
    if name in ("capture", "train", "gpu"):
        found["lengths"] = list(arguments.lengths or (GPU_LENGTHS if name == "gpu" else LENGTHS))
    if name in ("train", "gpu"):
        found["tokens"] = arguments.tokens or (0 if name == "train" else 256 if arguments.tiny else 16384)
    return found | (settings(arguments, name)._asdict() if name in ("audit", "fdaa", "lens") else {})


def settings(arguments: Arguments, name: str) -> Any:
    from aarlib.bench.audit import Settings as AuditSettings
    from aarlib.bench.fdaa import Settings as FDAASettings
    from aarlib.bench.lens import Settings as LensSettings

    if not arguments.tiny:
        return {"audit": AuditSettings(), "fdaa": FDAASettings(), "lens": LensSettings()}[name]
    audit = AuditSettings(window=48, horizon=8, positions=16, shape={**TINY, "initializer_range": 0.2})
    fdaa = FDAASettings(rows=2, length=16, shape=TINY)
    return {"audit": audit, "fdaa": fdaa, "lens": LensSettings(documents=4, looped_documents=2, shape=TINY)}[name]


def measure(arguments: Arguments, name: str) -> None:
    """Run every part, print and store it, and put the finished record in its place."""
    from aarlib.config import write_text_atomically

    path = arguments.out or Path("runs/bench") / f"{name}.json"
    partial = path.with_suffix(".partial.json")
    record = {"bench": name, **machine(), "threads": arguments.threads, "rounds": arguments.rounds}
    record |= {"sizes": sizes(arguments, name), "equal": [], "claims": [], "details": {}, "skipped": {}}
    for part in BENCHES[name](arguments):
        show(part)
        record["equal"] += [item._asdict() for item in part.equal]
        record["claims"] += [{**claim._asdict(), "met": claim.met} for claim in part.claims]
        record["details"] |= {part.name: part.details} if part.details else {}
        record["skipped"] |= {part.name: part.skipped} if part.skipped else {}
        write_text_atomically(partial, json.dumps(record, indent=1) + "\n")
    if not record["equal"]:
        raise RuntimeError(f"bench {name} compared no numbers; {partial} holds what it timed")
    if name in PICTURES:
        from aarlib.bench.chart import draw

        draw(path.with_suffix(".png"), PICTURES[name], lengths_in(record))
    partial.replace(path)
    print(f"wrote {path}")


def show(part: Any) -> None:
    if part.skipped:
        print(f"{part.name}: SKIPPED: {part.skipped}", flush=True)
    for item in part.equal:
        print(f"  equal: {item.what}: {item.error:.1e} (tolerance {item.tolerance:.0e})")
    for claim in part.claims:
        print(f"  {claim.line()}")
    for row in part.details.get("steps", ()):
        print(f"  {step_line(row)}")
    for way, peak in part.details.get("memory_gib", {}).items():
        print(f"  {part.name}, extra peak of {way}: {'out of memory' if peak is None else f'{peak:.3f} GiB'}")
    sys.stdout.flush()


def step_line(row: dict[str, Any]) -> str:
    name, wall = f"length {row['length']}, {row['batch']} rows, {row['way']}", row["turns"]["wall"]
    if not wall:
        return f"{name}: out of memory"
    memory = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
    speed = f"{row['tokens_per_second']:,.0f} tokens/s{memory}, {row['rate_share']:.1%} of the matmul rate"
    return f"{name}: {median(wall):.4f} s [{min(wall):.4f}, {max(wall):.4f}], {speed}"


def lengths_in(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [item for item in record["details"].values() if "length" in item]


def machine() -> dict[str, Any]:
    """When and on what, with the load from elsewhere."""
    import os
    import platform

    import torch

    from aarlib.version import made_with

    return {
        **made_with(),
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
    }


def memory_limit(arguments: Arguments) -> float:
    from aarlib.bench.process import free_gib

    limit = arguments.memory_limit or max(2.0, free_gib() - 2)
    print(f"a process that needs more than {limit:.1f} GiB counts as out of memory", flush=True)
    return limit


def capture(arguments: Arguments) -> Iterator[Any]:
    from aarlib.bench.capture import run

    shape = {"heads": 2, "head_dim": 16, "window": 8} if arguments.tiny else {}
    limit, lengths = memory_limit(arguments), sizes(arguments, "capture")["lengths"]
    return run(lengths, arguments.rounds, arguments.threads, limit, **shape)


def train(arguments: Arguments) -> Iterator[Any]:
    from aarlib.bench.train import run

    lengths, limit = sizes(arguments, "train")["lengths"], memory_limit(arguments)
    shape = {**TINY, "num_hidden_layers": 2} if arguments.tiny else {}
    return run(lengths, arguments.rounds, arguments.threads, limit, arguments.tokens, progress, **shape)


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def others(arguments: Arguments) -> Iterator[Any]:
    from aarlib.bench import audit, fdaa, lens

    name = bench_of(arguments)
    run = {"audit": audit.run, "fdaa": fdaa.run, "lens": lens.run}[name]
    return run(settings(arguments, name), arguments.threads, arguments.rounds)


def gpu(arguments: Arguments) -> Iterator[Any]:
    import torch

    from aarlib.bench.gpu import Plan, run
    from aarlib.moe import backends
    from aarlib.moe.loading import load_config

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        raise ValueError(
            "no CUDA device: the 7-billion-parameter model is for a GPU; pass --tiny to see the script run"
        )
    config, found = load_config("olmoe", geometry=OLMOE), sizes(arguments, "gpu")
    for name, value in (TINY_OLMOE if arguments.tiny else {}).items():
        setattr(config, name, value)
    layers, matmul = ((1,), 128) if arguments.tiny else (OLMOE_LAYERS, 8192)
    plan = Plan(layers, found["lengths"], found["tokens"], arguments.rounds, matmul, arguments.budget)
    yield from run(config, device, plan, lambda model, dtype: doctor(model, dtype, layers))
    print(f"attention calls with windows: {dict(backends.calls)}")


def doctor(model: Any, dtype: Any, layers: tuple[int, ...]) -> Any:
    from aarlib.bench.claims import Part
    from aarlib.identities.doctor import aware_attach, examine, header, line

    print(f"doctor in {dtype}\n{header()}", flush=True)
    findings = []
    for finding in examine(model.to(dtype), aware_attach(layers, 40)):
        findings.append({**finding._asdict(), "passed": finding.passed})
        print(line(finding), flush=True)
    return Part(f"doctor, {dtype}", details={"dtype": str(dtype), "findings": findings})


def page(arguments: Arguments) -> int:
    """Every measured ratio into the page, and the pictures by length."""
    from aarlib.bench.chart import draw
    from aarlib.bench.page import filled, read_records
    from aarlib.config import write_text_atomically

    path, studies = arguments.out or ROOT / "docs" / "speed.md", ROOT / "docs" / "studies"
    records = read_records(studies / "results")
    if arguments.dry_run:
        print(f"{path}: {', '.join(records) or 'no results'}")
        return 0
    for page_path in (path, studies / "fdaa.md"):
        write_text_atomically(page_path, filled(page_path.read_text(encoding="utf-8"), records))
        print(f"wrote {page_path}")
    for name in PICTURES.keys() & records.keys():
        print(f"wrote {draw(studies / 'figures' / f'bench_{name}.png', PICTURES[name], lengths_in(records[name]))}")
    return 0


TINY = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
TINY_OLMOE = {**TINY, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2}
PICTURES = {"capture": "Attention with windows", "train": "A training step"}
BENCHES: dict[str, Callable[[Arguments], Iterator[Any]]] = {
    "capture": capture,
    "train": train,
    "audit": others,
    "fdaa": others,
    "lens": others,
    "gpu": gpu,
}


if __name__ == "__main__":
    raise SystemExit(main())

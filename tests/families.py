"""A saved tiny checkpoint of each family through doctor, train, evaluate, audit and decompose: real verbs on shipped configs,
only model and sizes overridden. `make families` runs all eight and writes README's family table; the tests run three.

python -m tests.families [FAMILY ...]
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from aarlib.config import write_text_atomically
from aarlib.moe.anatomy import anatomy
from pipelines import audit, decompose, doctor, evaluate, train
from tests.runtime.conversations import save_model
from tests.tiny import FAMILIES, tiny_model

ROOT = Path(__file__).parents[1]
CONFIGS, README = ROOT / "pipelines" / "configs", ROOT / "README.md"
PACKAGES = ("aarlib", "torch", "transformers", "ray", "deepspeed", "lm_eval")
BLOCK = re.compile(r"(<!-- families -->\n).*?(<!-- end families -->)", re.DOTALL)
NOTES = {
    "olmoe": "",
    "flex_olmo": "norms on sub-layer outputs",
    "qwen2_moe": "dense layers, gated shared expert",
    "qwen3_moe": "",
    "qwen3_5_moe": "AAR on full-attention layers only; packing refused",
    "mixtral": "with and without sliding window",
    "deepseek_v2": "dense first layer, unequal value heads, group limits",
    "gpt_oss": "attention sinks, alternating sliding layers; MXFP4 checkpoints are refused",
}
IDENTITIES = "identities"


class Verb(NamedTuple):
    name: str
    main: Callable[[Sequence[str]], int]
    config: str
    sizes: tuple[str, ...]


RUN_SIZES = (
    '--data.train=["nano:sft:60"]', "--data.sequence_length=96", "--optim.max_steps=2", "--optim.global_batch=4",
    "--optim.micro_batch=4", "--ray.num_workers=1", '--evaluate.tasks=["nano_ioi"]', "--evaluate.limit=4",
    "--evaluate.num_actors=1",
)  # fmt: skip
VERBS = (
    Verb("train", train.main, "nano_smoke.toml", RUN_SIZES),
    Verb("evaluate", evaluate.main, "nano_smoke.toml", RUN_SIZES),
    Verb(
        "audit",
        audit.main,
        "nano_audit.toml",
        (
            '--audit.domains={almanac={source="nano:almanac", joined=true}}', "--audit.seeds=[0]", "--audit.window=24",
            '--audit.horizons=["full"]', "--audit.development=4", "--audit.locked=4", "--audit.windows_per_unit=8",
            "--audit.predictors=false",
        ),
    ),
    Verb(
        "decompose",
        decompose.main,
        "nano_lens.toml",
        (
            '--lens.sources={world={source="nano:web", documents=8, length=16}}', '--lens.causal_source="world"',
            "--lens.causal_documents=4", "--lens.documents_per_unit=4", "--lens.ablated_experts=2", "--lens.ioi_prompts=4",
        ),
    ),
)  # fmt: skip


def run(family: str, folder: Path) -> dict[str, bool]:
    """Whether the identities hold (of `doctor`) and each verb ended well, in the order of VERBS."""
    model = save_model(folder / "model", family)
    parts = anatomy(tiny_model(family))
    places = {
        "train": [f"--method.aar.layers={list(parts.aar_layers[-2:])}", '--model.dtype="float32"'],
        "audit": [f"--audit.layers={list(parts.moe_layers[-2:])}"],
    }
    places["evaluate"] = places["train"]
    passed = {IDENTITIES: doctor.main([str(model), "--dtype=float32", "--device=cpu"]) == 0}
    for verb in VERBS:
        shared = [f"--model.name={model}", f"--ray.storage={folder / 'runs'}", *places.get(verb.name, [])]
        passed[verb.name] = verb.main([str(CONFIGS / verb.config), *verb.sizes, *shared]) == 0
    record = json.loads((folder / "runs" / "nano_smoke" / "aar-seed0" / "result.json").read_text())
    assert record["steps"] == 2 and record["frozen_sha256_before"] == record["frozen_sha256_after"]
    return passed


def table(results: Mapping[str, Mapping[str, bool]]) -> str:
    names = [IDENTITIES, *(verb.name for verb in VERBS)]
    lines = [f"| family | {' | '.join(names)} | note |", "|---" * (len(names) + 2) + "|"]
    for family, passed in results.items():
        cells = ["yes" if passed[name] else "no" for name in names]
        lines.append(f"| {family} | {' | '.join(cells)} | {NOTES[family]} |")
    return "\n".join(lines)


def filled(readme: str, results: Mapping[str, Mapping[str, bool]]) -> str:
    """The page with the table, and the versions it holds for, in its block."""
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return BLOCK.sub(lambda match: f"{match[1]}{table(results)}\n\nWith {versions}.\n{match[2]}", readme)


def main(argv: Sequence[str]) -> int:
    results = {}
    for family in argv or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            results[family] = run(family, Path(folder))
    print(f"\n{table(results)}")
    if set(results) == set(FAMILIES):
        write_text_atomically(README, filled(README.read_text(encoding="utf-8"), results))
    return 0 if all(all(passed.values()) for passed in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Measure every identity that aarlib rests on, on your own model, in its dtype and on its device. Exit code 1 where one fails.

python -m pipelines.doctor nano
python -m pipelines.doctor allenai/OLMoE-1B-7B-0924 --dtype float32 --adapter runs/olmoe/aar-seed0/adapter
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro


@dataclass(frozen=True)
class Arguments:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """`nano`, a folder, or a Hugging Face hub id."""
    adapter: str | None = None
    """A folder or hub id of a saved adapter, examined instead of random attention-aware routers."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    """For example cuda or cpu; the default is a GPU where there is one."""
    layers: tuple[int, ...] = ()
    """Where random attention-aware routers are attached; default: the last half of the layers that allow them."""
    window: int = 20
    length: int | None = None
    """Tokens in a row of the test batch; default: 48, or enough to get past a sliding range of up to 512 tokens."""
    dry_run: bool = False
    """Read the model's config, print what would be examined and stop."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = tyro.cli(
        Arguments,
        prog="python -m pipelines.doctor",
        description=__doc__,
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return describe(arguments) if arguments.dry_run else examine_model(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def describe(arguments: Arguments) -> int:
    from aarlib.moe.anatomy import anatomy
    from aarlib.moe.loading import load_config, meta_model

    parts = anatomy(meta_model(load_config(arguments.model, arguments.revision)))
    print(
        f"{arguments.model}: {parts.config.model_type}, {len(parts.layers)} layers, MoE at {list(parts.moe_layers)}, "
        f"attention-aware routers possible at {list(parts.aar_layers)}, {parts.num_experts} experts, top {parts.top_k}"
    )
    return 0


def examine_model(arguments: Arguments) -> int:
    import torch

    from aarlib.identities.doctor import IDENTITIES, examine, header, line
    from aarlib.moe import backends
    from aarlib.moe.loading import load_model

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    print(f"loading {arguments.model} on {device}", file=sys.stderr, flush=True)
    model, _ = load_model(arguments.model, arguments.revision, dtype=arguments.dtype, device=device)
    attach = choose_attach(arguments, model)
    print(f"{arguments.model}: {model.config.model_type}, {model.dtype}, {device}, torch {torch.__version__}")
    print(f"       {header()}")
    failed, findings = 0, examine(model, attach, arguments.window, arguments.length)
    for index, identity in enumerate(IDENTITIES, start=1):
        print(f"{index}/{len(IDENTITIES)} {identity.name} ...", file=sys.stderr, flush=True)
        finding = next(findings)
        failed += not finding.passed
        print(f"{index:>2}/{len(IDENTITIES)}  {line(finding)}", flush=True)
    served = ", ".join(f"{name} {count}" for name, count in sorted(backends.calls.items()))
    print(f"attention calls with windows: {served}")
    print(f"{failed} of {len(IDENTITIES)} identities failed" if failed else "all identities hold")
    return 1 if failed else 0


def choose_attach(arguments: Arguments, model: Any) -> Callable[[Any], Any] | None:
    """How the routers to be examined get on the model; refuses a bad adapter or layer before anything long runs."""
    if arguments.adapter is not None and arguments.layers:
        raise ValueError("--layers belongs to random routers; an adapter has its own layers: leave one of the two out")
    attach: Callable[[Any], Any] | None = None
    if arguments.adapter is not None:
        from aarlib.training.adapter import load_adapter

        attach = partial(load_adapter, path_or_hub_id=arguments.adapter)
    elif arguments.layers:
        from aarlib.identities.doctor import aware_attach

        attach = aware_attach(arguments.layers, arguments.window)
    if attach is not None:
        handle = attach(model)
        handle.detach()
        if not hasattr(handle, "routers"):
            raise ValueError(
                f"--adapter {arguments.adapter}: it holds an aggregation head, and trained routers are examined; leave it out: "
                "a head of the doctor's own is examined on every model"
            )
    return attach


if __name__ == "__main__":
    raise SystemExit(main())

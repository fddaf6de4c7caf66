"""Submit a verb to a Ray cluster and follow its log: the size of what is uploaded is checked first.

    python -m pipelines.submit -- python -m pipelines.train pipelines/configs/olmoe_tulu3.toml --ray.storage=/shared/runs

HF_HOME, HF_TOKEN and MLFLOW_TRACKING_URI of this shell go along; .git, data, runs, checkpoints and tests are left out. With
RAY_AUTH_MODE=token the token in RAY_AUTH_TOKEN or ~/.ray/auth_token is used.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Submission:
    address: str = "http://127.0.0.1:8265"
    """Of the cluster's dashboard, such as one forwarded by `ray attach ... -p 8265`."""
    working_dir: Path = Path(".")
    """Uploaded to every node."""
    max_mib: float = 100.0
    """More than this is refused."""
    dry_run: bool = False
    """Show what would be uploaded and stop."""


def main(argv: Sequence[str] | None = None) -> int:
    own, entrypoint = split_entrypoint(sys.argv[1:] if argv is None else argv)
    prog = "python -m pipelines.submit"
    line = tyro.cli(Submission, prog=prog, description=__doc__, args=own, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        if not entrypoint:
            raise ValueError(
                f"nothing to run; give a command after --, such as {prog} -- python -m pipelines.train CONFIG"
            )
        from aarlib.runtime.jobs import check_upload, submit

        folder = line.working_dir.resolve()
        upload = check_upload(folder, line.max_mib)
        print(f"{folder}: {upload.mib:.1f} MiB to upload")
        if line.dry_run:
            print("\n".join(f"{size:10.2f} MiB  {path}" for path, size in upload.largest))
            return 0
        status = submit(line.address, shlex.join(entrypoint), folder, lambda text: print(text, end="", flush=True))
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"job {status.lower()}")
    return 0 if status == "SUCCEEDED" else 1


def split_entrypoint(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our own arguments, the command after --)."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    raise SystemExit(main())

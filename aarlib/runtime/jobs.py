"""`ray job submit` with the checks that save a wait: what would be uploaded, how large it is, which settings go along."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

TOP_EXCLUDES = ("data", "runs", "checkpoints", "mlruns", "tests")
"""Folders directly in the working directory that are never uploaded (aarlib/data is code)."""
EXCLUDES = (".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
"""Names that are never uploaded, wherever they lie."""
PASSED_ON = ("HF_HOME", "HF_TOKEN", "MLFLOW_TRACKING_URI")
MAX_MIB = 100.0
SHOWN = 8
NO_AGENT = "No available agent to submit job"
AGENT_WAIT_S, AGENT_POLL_S = 60.0, 5.0


class Upload(NamedTuple):
    """What a working directory holds, the excluded left out."""

    mib: float
    largest: tuple[tuple[str, float], ...]
    """(path, MiB) of the largest files and of the folders that hold many small ones."""


def measure(folder: Path) -> Upload:
    """Sizes as Ray would zip them, before compression; links are not followed."""
    sizes: Counter[str] = Counter()
    for parent, folders, files in os.walk(folder):
        excludes = (*EXCLUDES, *TOP_EXCLUDES) if Path(parent) == folder else EXCLUDES
        folders[:] = sorted(name for name in folders if not _matches(name, excludes))
        for name in files:
            path = Path(parent, name)
            if not _matches(name, excludes) and not path.is_symlink():
                sizes[str(path.relative_to(folder))] = path.stat().st_size
    groups: Counter[str] = Counter(sizes)
    for path, size in sizes.items():
        groups[f"{path.partition('/')[0]}/"] += size if "/" in path else 0
    shown = tuple((path, size / 2**20) for path, size in groups.most_common(SHOWN) if size)
    return Upload(sum(sizes.values()) / 2**20, shown)


def check_upload(folder: Path, max_mib: float = MAX_MIB) -> Upload:
    """A ValueError that names the largest paths where the working directory is too large to send to every node."""
    upload = measure(folder)
    if upload.mib > max_mib:
        listed = ", ".join(f"{path} {size:.1f} MiB" for path, size in upload.largest)
        raise ValueError(
            f"{folder} has {upload.mib:.0f} MiB to upload, more than {max_mib:g}: {listed}. Move data and models to storage that "
            f"the cluster sees (the folders {', '.join(TOP_EXCLUDES)} are left out), or raise --max-mib"
        )
    return upload


def runtime_env(folder: Path) -> dict[str, Any]:
    """The working directory without what is excluded, and the settings of this shell that jobs need."""
    variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    excludes = [*EXCLUDES, *(f"/{name}" for name in TOP_EXCLUDES)]
    return {
        "working_dir": str(folder),
        "excludes": excludes,
        "env_vars": {"TOKENIZERS_PARALLELISM": "false"} | variables,
    }


def submit(address: str, entrypoint: str, folder: Path, show: Callable[[str], None]) -> str:
    """Submit, pass the log on to `show` line by line, and return how the job ended, such as SUCCEEDED.

    A ConnectionError where the cluster is not reached or does not take the job, a wrong token included.
    """
    try:
        client = JobSubmissionClient(address)
        job = _submitted(client, entrypoint, runtime_env(folder), show)
    except (RuntimeError, AuthenticationError) as error:
        raise ConnectionError(f"{address} does not take the job: {error}") from error
    show(f"job {job} at {address}; stop it with: ray job stop --address {address} {job}\n")
    asyncio.run(_follow(client, job, show))
    status = client.get_job_status(job)
    if status is not JobStatus.SUCCEEDED:
        show(f"{client.get_job_info(job).message}\n")
    return str(status.value)


def _submitted(client: JobSubmissionClient, entrypoint: str, env: dict[str, Any], show: Callable[[str], None]) -> str:
    """The job's id. A head that has just started has no agent to take jobs yet: it is asked again for AGENT_WAIT_S."""
    deadline = time.monotonic() + AGENT_WAIT_S
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env=env)
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise
            show("the cluster takes no jobs yet; asking again\n")
            time.sleep(AGENT_POLL_S)


async def _follow(client: JobSubmissionClient, job: str, show: Callable[[str], None]) -> None:
    async for text in client.tail_job_logs(job):
        show(text)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)

"""The cluster files: valid by the schemas of their tools, consistent with this package, and the shell script clean."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ray = pytest.importorskip("ray")

from aarlib.runtime.jobs import EXCLUDES, TOP_EXCLUDES, check_upload, measure, runtime_env  # noqa: E402
from pipelines import submit  # noqa: E402

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


def test_the_cluster_yaml_is_valid_by_rays_own_schema() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load("ray-cluster.yaml"))
    validate_config(config)
    with pytest.raises(Exception, match="cluster_nme"):
        validate_config({**config, "cluster_nme": "x"})
    head = next(line for line in config["head_start_ray_commands"] if "ray start" in line)
    assert "--dashboard-host=127.0.0.1" in head and "RAY_AUTH_MODE=token" in head


def test_every_version_of_ray_is_the_installed_one() -> None:
    job = load("rayjob.yaml")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__
    assert f"rayproject/ray:{ray.__version__}-py311" in (CLUSTER / "Dockerfile").read_text()


def test_the_dockerfile_copies_what_the_package_consists_of() -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY --chown=ray (.+) \S+$", text, re.MULTILINE))
    assert {"aarlib", "pipelines", "tune_spaces"} <= copied
    files = next(line for line in copied if "pyproject.toml" in line).split()
    assert all((ROOT / name).is_file() for name in files)


def test_the_rayjob_uses_fields_of_the_crd() -> None:
    """Names as in the CRD of KubeRay 1.7.0 (ray.io/v1), against which the file was validated."""
    job = load("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= {
        "entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit",
        "runtimeEnvYAML", "rayClusterSpec", "activeDeadlineSeconds", "suspend", "entrypointNumCpus",
    }  # fmt: skip
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) <= {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"}
    assert set(cluster["headGroupSpec"]) <= {"serviceType", "rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert set(yaml.safe_load(job["spec"]["runtimeEnvYAML"])) <= {"working_dir", "env_vars"}


@pytest.mark.slow
def test_the_rayjobs_entrypoint_runs() -> None:
    """As it stands in the file, with --dry-run: config, method and model geometry are checked, nothing is trained."""
    spec = load("rayjob.yaml")["spec"]
    command = shlex.split(spec["entrypoint"])
    assert command[:3] == ["python", "-m", "pipelines.train"]
    result = subprocess.run(
        [sys.executable, *command[1:], "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "4 GPU workers, ZeRO 0" in result.stdout
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    assert group["replicas"] == 4 and f"--ray.min_workers={group['minReplicas']}" in command


def test_the_slurm_script_is_clean() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    result = subprocess.run([shellcheck, CLUSTER / "slurm.sh"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_an_upload_is_measured_without_what_is_left_out(tmp_path: Path) -> None:
    for name, size in (
        ("aarlib/data/code.py", 10), ("weights/big.bin", 3 << 20), ("weights/small.bin", 1 << 20), ("data/rows.parquet", 9 << 20),
        (".git/objects/pack", 9 << 20), ("runs/x/adapter.safetensors", 9 << 20), ("a/__pycache__/b.pyc", 9 << 20),
        ("checkpoints/c", 9 << 20),
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    upload = measure(tmp_path)
    assert abs(upload.mib - 4) < 1e-3
    assert upload.largest[:2] == (("weights/", 4.0), ("weights/big.bin", 3.0))
    assert any(name.startswith("aarlib") for name, _ in upload.largest)
    with pytest.raises(
        ValueError, match=r"has 4 MiB to upload, more than 2: weights/ 4.0 MiB, weights/big.bin 3.0 MiB"
    ):
        check_upload(tmp_path, 2)


def test_settings_go_along_and_excludes_do_not_hide_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", "/shared/hf")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    environment = runtime_env(tmp_path)
    assert environment["env_vars"]["HF_HOME"] == "/shared/hf" and "HF_TOKEN" not in environment["env_vars"]
    assert environment["env_vars"]["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert "/data" in environment["excludes"] and "data" not in environment["excludes"]
    assert set(environment["excludes"]) == {*EXCLUDES, *(f"/{name}" for name in TOP_EXCLUDES)}


def test_submit_refuses_before_it_connects(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main([]) == 2
    assert "nothing to run; give a command after --" in capsys.readouterr().err
    assert submit.main(["--max-mib=0.5", "--", "python", "-m", "pipelines.train"]) == 2
    assert "MiB to upload, more than 0.5: aarlib/" in capsys.readouterr().err
    assert submit.main(["--dry-run", "--", "python"]) == 0
    assert "aarlib/nano/weights/model.safetensors" in capsys.readouterr().out

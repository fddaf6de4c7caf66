"""Through Ray Data, TorchTrainer and DeepSpeed: workers and accumulation change nothing, a killed worker changes nothing."""

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pandas as pd
import psutil
import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.object_store import object_store
from tests.runtime.conversations import run_config, save_model, write_conversations
from tests.runtime.processes import kill_a_worker, start_driver, train_workers, wait_for

pytestmark = pytest.mark.ray
pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from aarlib.moe.loading import load_model  # noqa: E402
from aarlib.runtime import tracking, trainer  # noqa: E402
from aarlib.runtime.batches import encoded_rows, micro_batches  # noqa: E402
from aarlib.runtime.checkpoints import checkpoints  # noqa: E402
from aarlib.runtime.cluster import worker_environment  # noqa: E402
from aarlib.runtime.mlflow_store import client_of  # noqa: E402
from aarlib.runtime.run_directory import claim, held, pending_runs, run_directory, update  # noqa: E402
from aarlib.runtime.storage import SCRATCH  # noqa: E402
from aarlib.runtime.trainer import Prepared, TrainingResult, check, prepare, train, train_on  # noqa: E402
from aarlib.runtime.training_run import _check_same_base  # noqa: E402
from aarlib.runtime.writer import adapter_folder  # noqa: E402
from aarlib.training.adapter import load_adapter, read_metadata  # noqa: E402
from aarlib.training.config import RayConfig, RunConfig  # noqa: E402

RUN = "aar-seed0"
TWO_EPOCHS = {"optim.epochs": 2, "optim.max_steps": 16}
"""An epoch has about 13 steps."""


class Bench(NamedTuple):
    """One corpus shared by the trainings of this file."""

    model: Path
    data: Path
    storage: Path
    prepared: Prepared

    def config(self, name: str, **changes: Any) -> RunConfig:
        return run_config(self.model, self.data, self.storage, name, **{**TWO_EPOCHS, **changes})

    def train(self, name: str, **changes: Any) -> TrainingResult:
        config = self.config(name, **changes)
        folder = claim(config)
        return train_on(config, self.prepared, folder, check(config), tracking.start(config, folder))


@pytest.fixture(scope="module")
def bench(local_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("trainer")
    model = save_model(folder / "model")
    data = write_conversations(folder / "rows.jsonl", 64)
    return Bench(
        model, data, folder / "runs", prepare(run_config(model, data, folder / "runs", "corpus", **TWO_EPOCHS))
    )


@pytest.fixture(scope="module")
def two_workers(bench: Bench) -> TrainingResult:
    before = signal.getsignal(signal.SIGINT)
    result = bench.train("two")
    assert signal.getsignal(signal.SIGINT) is before, "a later Ctrl-C would end in Ray Train"
    return result


def adapter(result: TrainingResult) -> dict[str, Tensor]:
    return load_file(result.folder / RUN / "adapter" / "adapter.safetensors")


def in_scratch(ray: RayConfig, folder: Path) -> dict[str, Any]:
    """runtime_env of workers whose node keeps its working copies in `folder`."""
    settings = worker_environment(ray)
    return {**settings, "env_vars": {**settings["env_vars"], SCRATCH: str(folder)}}


def lines(result: TrainingResult, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / RUN / name).read_text().splitlines()]


def largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def assert_same_history(ours: TrainingResult, theirs: TrainingResult, but: tuple[str, ...] = ("speed/",)) -> None:
    """Losses, gradient norms, rates, and routing (of each worker's first micro-batch), but for what depends on the workers."""
    for mine, other in zip(lines(ours, "metrics.jsonl"), lines(theirs, "metrics.jsonl"), strict=True):
        kept, expected = (
            {name: value for name, value in line.items() if not name.startswith(but)} for line in (mine, other)
        )
        assert {"train/ce", "optim/grad_norm"} <= kept.keys() and kept == pytest.approx(expected, rel=1e-4)


def assert_same_training(ours: TrainingResult, theirs: TrainingResult, but: tuple[str, ...] = ("speed/",)) -> None:
    """Adapters, rows of every step, histories and held-out losses."""
    assert largest(adapter(ours), adapter(theirs)) < 1e-5
    assert lines(ours, "rows.jsonl") == lines(theirs, "rows.jsonl")
    assert_same_history(ours, theirs, but)
    mine, other = (pd.read_parquet(result.folder / RUN / "held_out.parquet") for result in (ours, theirs))
    assert mine["row_id"].tolist() == other["row_id"].tolist()
    assert abs(mine["ce_sum"] - other["ce_sum"]).max() < 1e-3


def test_one_worker_that_accumulates_is_two_workers(bench: Bench, two_workers: TrainingResult) -> None:
    start, _ = load_model(str(bench.model))
    trained = load_adapter(start, two_workers.folder / RUN / "adapter")
    weights = {name: parameter.detach() for name, parameter in trained.trainable()}
    routers = {f"{i}.weight": start.model.layers[i].mlp.gate.weight for i in (0, 1, 2)}
    assert largest({name: weights[name] for name in routers}, routers) > 1e-3
    one = bench.train("one", **{"ray.num_workers": 1, "optim.micro_batch": 1, "ray.zero_stage": 1})
    assert_same_training(one, two_workers, but=("speed/", "routing/"))


@pytest.mark.long
def test_one_worker_that_takes_a_batch_at_once_is_two_workers(bench: Bench, two_workers: TrainingResult) -> None:
    one = bench.train("at_once", **{"ray.num_workers": 1, "optim.micro_batch": 4, "ray.checkpoint_every": 100})
    assert_same_training(one, two_workers, but=("speed/", "routing/"))


def test_targets_were_uneven(bench: Bench, two_workers: TrainingResult) -> None:
    """Per step and worker; in some step one of the workers had none."""
    dataset = bench.prepared.epochs["train-seed0-epoch0"]
    rows = {row.row_id: row for table in dataset.iter_batches(batch_format="pyarrow") for row in encoded_rows(table)}
    counts = []
    for line in lines(two_workers, "rows.jsonl"):
        batch = [rows[row_id] for row_id in line["row_ids"]]
        shares = [micro_batches(batch, rank, 2, 2)[0] for rank in range(2)]
        counts.append(tuple(sum(row.num_targets for row in share) for share in shares))
    assert len(counts) == 16 and sum(first != second for first, second in counts) > 10
    assert any(0 in pair for pair in counts)


def test_artefacts(bench: Bench, two_workers: TrainingResult) -> None:
    folder = two_workers.folder
    result = json.loads((folder / RUN / "result.json").read_text())
    assert result["frozen_sha256_before"] == result["frozen_sha256_after"]
    assert result["steps"] == 16 and len(result["peak_gib"]) == 2 and result["tracking_problems"] == []
    held_out = pd.read_parquet(folder / RUN / "held_out.parquet")
    assert len(held_out) == bench.prepared.corpus.num_held_out == held_out["row_id"].nunique()
    assert held_out["num_targets"].min() > 0
    untouched = pd.read_parquet(folder / "untouched" / "held_out.parquet")
    step0 = pd.read_parquet(folder / RUN / "step0_held_out.parquet")
    assert untouched["row_id"].tolist() == step0["row_id"].tolist() == held_out["row_id"].tolist()
    assert result["held_out_ce"] < result["step0_ce"] and result["untouched_ce"] != result["step0_ce"]
    metrics = lines(two_workers, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 5, 10, 15]
    assert {"routing/entropy", "routing/mass", "routing/expert_load_max_share/layer_1"} <= metrics[-1].keys()
    assert {"train/ce", "optim/grad_norm", "optim/learning_rate", "speed/tokens_per_s"} <= metrics[0].keys()
    assert metrics[-1]["routing/picks_changed"] > 0
    tracked = two_workers.tracking
    assert tracked is not None and not two_workers.problems
    child = client_of(tracked.uri).get_run(tracked.children[RUN])
    assert child.info.status == "FINISHED" and child.data.metrics["held_out/ce"] == result["held_out_ce"]
    last = {name: value for name, value in metrics[-1].items() if "/" in name}
    assert last and child.data.metrics.items() >= last.items()
    order = [row_id for line in lines(two_workers, "rows.jsonl") for row_id in line["row_ids"]]
    first, second = order[: bench.prepared.corpus.num_train], order[bench.prepared.corpus.num_train :]
    assert len(set(first)) == len(first) and second and set(second) < set(first) and second != first[: len(second)]


def test_a_finished_run_is_not_run_again(bench: Bench, two_workers: TrainingResult) -> None:
    before = (two_workers.folder / RUN / "result.json").stat().st_mtime_ns
    assert train(bench.config("two")).tracking is None
    assert (two_workers.folder / RUN / "result.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="exists with another config"):
        train(bench.config("two", **{"optim.learning_rate": 0.5}))


def test_a_killed_worker_changes_nothing_also_on_a_node_without_the_drivers_folder(
    bench: Bench, two_workers: TrainingResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is a bucket; the workers have another scratch folder than the driver, as they have on another node."""
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    monkeypatch.setattr(trainer, "worker_environment", lambda ray: in_scratch(ray, tmp_path / "node"))
    with object_store("gs", "runs") as store:
        config = bench.config("killed", **{"ray.storage": store.uri("runs")})
        there = tmp_path / "node" / run_directory(config).relative_to(tmp_path / "driver")
        killer = threading.Thread(target=kill_a_worker, args=(there / RUN / "rows.jsonl", 11))
        killer.start()
        with held(config) as folder:
            claim(config)
            killed = train_on(config, bench.prepared, folder, check(config), tracking.start(config, folder))
        killer.join()
        starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
        assert len(starts) == 2 and (there / RUN / "result.json").is_file()
        name = f"killed/{RUN}/adapter"
        digest = read_metadata(folder / RUN / "adapter")["sha256"]
        monkeypatch.setenv(SCRATCH, str(tmp_path / "third"))
        copy = adapter_folder(config.ray.storage, name, digest)
        assert copy.is_relative_to(tmp_path / "third") and read_metadata(copy)["sha256"] == digest
        with pytest.raises(ValueError, match="does not see the driver's"):
            adapter_folder(config.ray.storage, name, "of another adapter")
        assert run_directory(config) != folder and not pending_runs(update(config), config)
    assert largest(adapter(killed), adapter(two_workers)) < 1e-6
    assert lines(killed, "rows.jsonl") == lines(two_workers, "rows.jsonl")
    assert_same_history(killed, two_workers)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_driver_and_a_killed_tree_change_nothing(
    bench: Bench, two_workers: TrainingResult, tmp_path: Path
) -> None:
    """The driver is killed and its workers live on, then the whole tree and a torn checkpoint; one worker ends it."""
    config = bench.config("orphaned")
    folder = Path(config.ray.storage) / "orphaned"
    driver = start_driver(config, tmp_path)
    while len(orphans := train_workers(psutil.Process(driver.pid))) < 2:
        assert driver.poll() is None
        time.sleep(0.1)
    wait_for(folder / RUN / "rows.jsonl", 5, driver)
    for orphan in orphans:
        orphan.suspend()
    driver.kill()
    driver.wait()
    first = checkpoints(folder / RUN)[-1].name

    driver = start_driver(config, tmp_path)
    while len(train_workers(psutil.Process(driver.pid))) < 2:
        assert driver.poll() is None
        time.sleep(0.1)
    time.sleep(5)
    starts = len((folder / "starts.jsonl").read_text().splitlines())
    assert starts == 1 or not all(orphan.is_running() for orphan in orphans), "two worker groups write at once"
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    wait_for(folder / "starts.jsonl", 2, driver)
    wait_for(folder / RUN / "rows.jsonl", 8, driver)
    for process in [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    driver.wait()
    newest = checkpoints(folder / RUN)[-1]
    assert newest.name > first
    tensors = (newest / "state.safetensors").read_bytes()
    (newest / "state.safetensors").write_bytes(tensors[: len(tensors) // 2])

    ended = bench.train("orphaned", **{"ray.num_workers": 1})
    assert largest(adapter(ended), adapter(two_workers)) < 1e-6
    assert lines(ended, "rows.jsonl") == lines(two_workers, "rows.jsonl")
    starts = [json.loads(line)["num_workers"] for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert starts == [2, 2, 1]
    assert not checkpoints(folder / RUN)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill_the_disk(history: Path, steps: int) -> None:
    """To the last byte, once `history` has as many steps, past the first checkpoint."""
    while not history.is_file() or len(history.read_text().splitlines()) < steps:
        time.sleep(0.02)
    with (history.parents[2] / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 12))


@pytest.mark.long
@pytest.mark.slow
def test_a_full_disk_ends_a_training_that_goes_on_when_there_is_room(
    bench: Bench, two_workers: TrainingResult, small_disk: Path
) -> None:
    config = bench.config("full", **{"ray.storage": str(small_disk)})
    threading.Thread(target=fill_the_disk, args=(small_disk / "full" / RUN / "rows.jsonl", 5)).start()
    with pytest.raises(Exception, match="No space left on device"):
        train(config)
    saved = [path.name for path in checkpoints(small_disk / "full" / RUN)]
    assert saved and not (small_disk / "full" / RUN / "result.json").exists()
    (small_disk / "filler").unlink()
    ended = train(config)
    assert largest(adapter(ended), adapter(two_workers)) < 1e-6
    assert lines(ended, "rows.jsonl") == lines(two_workers, "rows.jsonl")
    assert [line["step"] for line in lines(ended, "metrics.jsonl")] == [0, 5, 10, 15]


def test_another_base_than_the_run_was_begun_with_is_refused(bench: Bench, tmp_path: Path) -> None:
    stored = tmp_path / "base_sha256"
    session: Any = SimpleNamespace(rank=0, config=bench.config("rebased"), frozen="1" * 64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stored.write_text("1" * 64)
        _check_same_base(session, stored)
        stored.write_text("0" * 64)
        with pytest.raises(ValueError, match="the base is not the one this run directory was begun with"):
            _check_same_base(session, stored)
    finally:
        dist.destroy_process_group()


def rank_1_fails_at_step_2(job: dict[str, Any]) -> None:
    import torch.distributed as dist

    from aarlib.runtime import training_run
    from aarlib.runtime.worker import train_worker

    train_step = training_run.train_step

    def fails(*arguments: Any) -> Any:
        if arguments[3] == 2 and dist.get_rank() == 1:
            raise ValueError("rank 1 alone met bad input")
        return train_step(*arguments)

    training_run.train_step = fails
    train_worker(job)


def test_a_value_error_of_one_worker_in_the_middle_ends_the_training_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other waits for it in a collective."""
    monkeypatch.setattr("aarlib.runtime.trainer.train_worker", rank_1_fails_at_step_2)
    started = time.monotonic()
    with pytest.raises(ValueError, match="^rank 1 alone met bad input$"):
        bench.train("one_fails")
    folder = bench.storage / "one_fails"
    assert len((folder / "starts.jsonl").read_text().splitlines()) == 1
    assert len((folder / RUN / "rows.jsonl").read_text().splitlines()) == 2
    assert time.monotonic() - started < 600, "it waited for a collective's time-out"


def test_three_workers_packed_rows_and_a_partitioned_base_are_two_workers(
    bench: Bench, two_workers: TrainingResult
) -> None:
    """4 rows of at most 48 tokens a step do not divide by 3, and pack into fewer; ZeRO-3."""
    packed = bench.train("packed", **{"ray.num_workers": 3, "data.packing": True, "ray.zero_stage": 3})
    assert_same_training(packed, two_workers)


def test_more_workers_than_the_cluster_has(bench: Bench) -> None:
    with pytest.raises(ValueError, match="ray.num_workers = 64 needs 64 CPU, the cluster has 8"):
        train(bench.config("many_workers", **{"ray.num_workers": 64, "optim.global_batch": 128}))
    assert not (bench.storage / "many_workers").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.aar.layers": [7]}, r"method.aar: layers = \[7\]: \[7\] have no router"),
        ({"data.train": ["nowhere.jsonl"]}, "names no .parquet"),
        ({"model.name": "no/such/folder/here"}, "no/such/folder/here"),
    ],
)
def test_bad_input_dies_before_a_worker_starts(bench: Bench, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        train(bench.config("bad", **changes))
    assert not (bench.storage / "bad").exists()


def test_a_model_whose_routers_get_no_gradient_is_refused(bench: Bench, tmp_path: Path) -> None:
    model = save_model(tmp_path / "top1", num_experts_per_tok=1, norm_topk_prob=True)
    with pytest.raises(ValueError, match="no gradient reaches the router"):
        train(bench.config("top1", **{"model.name": str(model)}))

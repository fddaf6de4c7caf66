"""DeepSpeed on two gloo processes against plain PyTorch, ZeRO 0-3; resuming; the frozen hash. One start-up for everything."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from aarlib.data.chat import collate
from aarlib.runtime.engine import (
    Setup,
    checkpoint_activations,
    fetch_experts_whole,
    learning_rate,
    skip_shared_memory_build,
)
from aarlib.runtime.sharding import check_frozen, frozen_hash
from aarlib.training.adapter import fingerprint, load_adapter
from aarlib.training.config import OptimConfig
from aarlib.training.methods import build_method
from aarlib.training.objectives import next_token_ce
from tests.runtime.engine_process import other_number, process
from tests.runtime.plain_pytorch import METHOD, OPTIM, STEPS, batches, bfloat16_reference, reference
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.xdist_group("engine")  # one process of `make test`, one start-up


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("engine")
    spawn: Callable[..., Any] = mp.spawn
    spawn(process, args=(2, free_port(), str(folder)), nprocs=2)
    spawn(other_number, args=(1, free_port(), str(folder)), nprocs=1)
    alone = torch.load(folder / "resumed_by_1.pt", weights_only=False)
    return {**torch.load(folder / "found.pt", weights_only=False), "alone": alone, "adapter": folder / "adapter"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_the_case_is_hard(found: dict[str, Any]) -> None:
    """Target counts differ between the ranks in every step, and once a rank has none."""
    assert all(first != second for first, second in found["targets"])
    assert any(0 in counts for counts in found["targets"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_workers_with_accumulation_are_plain_pytorch(found: dict[str, Any], stage: int) -> None:
    start = {name: value.detach() for name, value in build_method(METHOD, 0).attach(tiny_model("olmoe")).trainable()}
    expected, ours = reference(), found[f"zero{stage}"]
    assert largest(expected.values, start) > 1e-3
    assert largest(ours["values"], expected.values) < 1e-5
    assert ours["norms"] == pytest.approx(expected.norms, rel=1e-4)
    assert ours["ce_sums"] == pytest.approx(expected.ce_sums, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_agree(found: dict[str, Any], stage: int) -> None:
    assert largest(found[f"zero{stage}"]["values"], found["zero0"]["values"]) < 1e-5
    assert found[f"zero{stage}"]["norms"] == pytest.approx(found["zero0"]["norms"], rel=1e-4)
    assert max(found["zero0"]["norms"]) > (OPTIM.max_grad_norm or 0.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resumed_is_uninterrupted(found: dict[str, Any], stage: int) -> None:
    assert largest(found[f"zero{stage}"]["resumed"], found[f"zero{stage}"]["values"]) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_worker_goes_on_from_what_two_saved(found: dict[str, Any], stage: int) -> None:
    assert largest(found["alone"][f"zero{stage}"], found[f"zero{stage}"]["values"]) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_without_targets_raises_the_same_on_every_worker(found: dict[str, Any], stage: int) -> None:
    first, second = found[f"zero{stage}"]["errors"]
    assert first[0] == second[1]
    assert first[0].startswith("step 7: no row of the global batch has a target token")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_hash_is_unchanged_by_training_and_catches_one_element(found: dict[str, Any], stage: int) -> None:
    before, after = found[f"hash{stage}"]
    check_frozen(before, after)
    with pytest.raises(RuntimeError, match="the frozen model changed during training"):
        check_frozen(before, found[f"flipped{stage}"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fingerprint_needs_no_more_than_one_whole_tensor(found: dict[str, Any], stage: int) -> None:
    assert found[f"fingerprint{stage}"] == fingerprint(tiny_model("olmoe"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32_routers_on_a_bfloat16_base(found: dict[str, Any], stage: int) -> None:
    """Also: workers whose tokens go to different experts do not wait for each other for ever."""
    result = found[f"bfloat16/{stage}"]
    first, second = result["values"]
    assert all(value.dtype == torch.float32 for value in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(first[name], result["start"][name]) for name in first)
    assert result["norms"] == pytest.approx(bfloat16_reference(), rel=1e-2)
    check_frozen(*result["hash"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_trains_what_is_trainable_in_eval_mode_on_the_models_device(
    found: dict[str, Any], stage: int
) -> None:
    made = found[f"zero{stage}"]["made"]
    assert made["in_training_mode"] == [] and made["only_trainable"] and made["on_cpu"] is None
    assert made["on_meta"].startswith("ray.use_gpu: DeepSpeed works on cpu, the model is on meta")


@pytest.mark.parametrize("stage", [0, 3])
def test_recomputed_activations_train_the_same(found: dict[str, Any], stage: int) -> None:
    """Twice a layer for each of the steps' 2 micro-batches; only the decoder layers are in training mode."""
    result = found[f"checkpointed{stage}"]
    assert result["runs"] == 2 * 2 * STEPS
    assert result["in_training_mode"] == [f"model.layers.{layer}" for layer in range(3)]
    assert largest(result["values"], found[f"zero{stage}"]["values"]) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_zero3_fetches_every_experts_module_whole(family: str) -> None:
    leaves = pytest.importorskip("deepspeed.utils")
    model = tiny_model(family)
    experts = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    assert experts and not any(map(leaves.z3_leaf_module, experts))
    fetch_experts_whole(model)
    assert all(map(leaves.z3_leaf_module, experts))


def test_zero3_partitions_the_base_while_it_is_read(found: dict[str, Any]) -> None:
    """Nothing is whole anywhere, routers included (threshold 0); what was read was saved; training is plain PyTorch, as is
    training resumed, and what is saved is whole."""
    result = found["partitioned"]
    assert set(result["held"].values()) == set(result["held_trained"].values()) == {0}
    assert result["hash"][0] == result["hash"][1] == frozen_hash(tiny_model("olmoe"))
    assert result["fingerprint"] == fingerprint(tiny_model("olmoe"))
    assert largest(result["values"], reference().values) < 1e-5
    assert largest(result["resumed"], result["values"]) < 1e-6
    saved = dict(load_adapter(tiny_model("olmoe"), found["adapter"]).trainable())
    assert largest({name: value.detach() for name, value in saved.items()}, result["values"]) == 0.0


def test_shared_memory_build_is_skipped() -> None:
    """Guards the internal name that skip_shared_memory_build relies on."""
    ops = pytest.importorskip("deepspeed.ops")
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
    skip_shared_memory_build()
    assert ops.__compatible_ops__[ShareMemCommBuilder.NAME] is False


def test_learning_rate_rises_then_falls_to_zero() -> None:
    setup = Setup(OptimConfig(learning_rate=1.0, warmup_ratio=0.1), 0, 0, 1, 100)
    rates = [learning_rate(setup, step) for step in range(101)]
    assert max(range(101), key=rates.__getitem__) == 10
    assert rates[10] == 1.0 and rates[100] == 0.0 and 0 < rates[0] < 0.1
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_checkpointed_activations_give_the_same_gradients(family: str) -> None:
    """And the layers do run twice, in eval mode (Mixtral's jitter is off)."""
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = tiny_model(family, **({"router_jitter_noise": 0.5} if family == "mixtral" else {}))
        if checkpointing:
            checkpoint_activations(model)
        handle = build_method(METHOD, 0).attach(model)
        count = [0]
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, n=count: n.__setitem__(0, n[0] + 1))
        next_token_ce(model, collate(batches()[0], 0)).ce_sum.sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in handle.trainable()})
        calls.append(count[0])
    assert calls == [1, 2]
    assert max(float(value.abs().max()) for value in gradients[0].values()) > 1e-2
    assert largest(gradients[1], gradients[0]) < 1e-5

import pytest

pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from aarlib.aar.config import AARConfig  # noqa: E402
from aarlib.fdaa.config import FDAAConfig, StaticCalibratorConfig  # noqa: E402
from aarlib.runtime.checkpoints import TrainingState  # noqa: E402
from aarlib.runtime.engine import Setup  # noqa: E402
from aarlib.runtime.population import Pending, groups, with_own_rate  # noqa: E402
from aarlib.training.config import OptimConfig, Run  # noqa: E402

HEAD, TABLE, ROUTER = FDAAConfig(layers=(3,)), StaticCalibratorConfig(layers=(3,)), AARConfig(layers=(3,))
ELSEWHERE = FDAAConfig(layers=(2, 3))


def pending(label, method, seed=0, step=0):
    return Pending(Run(label, method, seed), TrainingState(f"{label}-seed{seed}", step, 0, 0.0, {}) if step else None)


def test_heads_of_the_same_layers_that_stopped_at_the_same_step_train_together():
    items = [
        *(pending("a", HEAD), pending("b", TABLE), pending("a", HEAD, 1), pending("c", ELSEWHERE)),
        *(pending("d", ROUTER), pending("a", HEAD, 2, step=5), pending("b", TABLE, 2, step=5)),
    ]
    found = [[item.run.name for item in group] for group in groups(items, population=True)]
    assert found == [["a-seed0", "b-seed0", "a-seed1"], ["c-seed0"], ["d-seed0"], ["a-seed2", "b-seed2"]]
    assert [len(group) for group in groups(items, population=False)] == [1] * 7


def test_a_method_may_have_its_own_learning_rate():
    setup = Setup(OptimConfig(learning_rate=1e-3), 0, 0, 1, 10)
    assert with_own_rate(setup, HEAD) == setup
    assert with_own_rate(setup, TABLE.updated({"learning_rate": 0.1})).optim.learning_rate == 0.1
    assert with_own_rate(setup, ROUTER) == setup

"""A training step of AAR (last half of the layers) against the routing-only step and against the plain way, on `mid`.

ours: the frozen model in its own attention, aarlib's routers, AdamW. plain: Hugging Face eager attention with hooks
(aarlib/bench/plain.py) in the Hugging Face Trainer, on the same rows, from the same values, in the same precision.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.bench.chart import by_length
from aarlib.bench.claims import Claim, Equal, Part, paired, within
from aarlib.bench.measure import mid_model
from aarlib.bench.plain import PlainAAR
from aarlib.bench.process import OutOfMemory, Turns, extra_peak, run_job, take_turns
from aarlib.moe.anatomy import anatomy
from aarlib.training.objectives import next_token_ce

JOB = "aarlib.bench.train"
WINDOW = 40
LEARNING_RATE = 1e-4
WAYS = ("routing only", "aar", "plain")
TARGETS = {512: 1.10, 2048: 1.12}
"""AAR step over routing-only step, by sequence length."""
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-4
CHECKED_LENGTH = 512
"""Equal numbers are asserted at this length or below, where materialised attention fits; first losses at every length."""


def rows_of(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator)


def config_of(model: Any, window_grad: bool = True) -> AARConfig:
    layers = anatomy(model).aar_layers
    return AARConfig(layers=layers[len(layers) // 2 :], window=WINDOW, window_grad=window_grad)


class Gradients(NamedTuple):
    loss: float
    by_name: dict[str, Tensor]


class Stepper:
    """One optimizer step a call, on the same rows; `handle` is enabled for it alone."""

    def __init__(self, model: Any, config: AARConfig | RouterSFTConfig, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.handle: RoutingHandle = attach_aar(model, config, seed=0)
        self.optimizer = torch.optim.AdamW([parameter for _, parameter in self.handle.trainable()], lr=LEARNING_RATE)
        self.handle.enabled = False

    def __call__(self) -> float:
        loss = self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self) -> Gradients:
        """Without a step; by parameter name, as layer.tensor."""
        loss = self._backward()
        found = {
            f"{index}.{name}": parameter.grad.clone()
            for index, router in self.handle.routers.items()
            for name, parameter in router.named_parameters()
            if parameter.grad is not None
        }
        self.optimizer.zero_grad()
        return Gradients(loss, found)

    def _backward(self) -> float:
        self.handle.enabled = True
        rows = next_token_ce(self.model, {"input_ids": self.ids, "labels": self.ids})
        loss = rows.ce_sum.sum() / rows.num_targets.sum()
        loss.backward()
        self.handle.enabled = False
        return float(loss.detach())


def timings(length: int, rounds: int, batch: int, **shape: int) -> dict[str, Any]:
    """Turns of the steps that share a process: routing only, AAR, AAR with constant windows."""
    model = mid_model(**shape)
    ids = rows_of(model, batch, length)
    calls = {
        "routing only": Stepper(model, RouterSFTConfig(), ids),
        "aar": Stepper(model, config_of(model), ids),
        "aar, windows constant": Stepper(model, config_of(model, window_grad=False), ids),
    }
    return {name: list(turns) for name, turns in take_turns(calls, rounds).items()}


def memory(way: str, length: int, batch: int, rounds: int, **shape: int) -> dict[str, Any]:
    """First loss and extra peak of one way, in its own process; for the plain way also the seconds of each step."""
    model = mid_model(**shape)
    ids = rows_of(model, batch, length)
    if way == "plain":
        return _in_the_trainer(model, ids, rounds)
    step = Stepper(model, config_of(model) if way == "aar" else RouterSFTConfig(), ids)
    losses: list[float] = []
    peak = extra_peak(lambda: losses.append(step()))
    return {"loss": losses[0], "extra_gib": peak, "wall": [], "cpu": []}


def plain_model(model: Any) -> PlainAAR:
    """The plain way from the values that attach_aar gives with the same seed."""
    handle = attach_aar(model, config_of(model), seed=0)
    tensors = {index: dict(router.named_parameters()) for index, router in handle.routers.items()}
    handle.detach()
    return PlainAAR(model, tensors, WINDOW)


def _in_the_trainer(model: Any, ids: Tensor, steps: int) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    turns, losses = Turns([], []), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.wall.append(time.perf_counter() - self.wall)
            turns.cpu.append(time.process_time() - self.cpu)

    class KeepsLosses(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps + 1,
            per_device_train_batch_size=ids.shape[0],
            learning_rate=LEARNING_RATE,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.0,
        )
        rows = [{"input_ids": row, "labels": row} for row in ids] * (steps + 1)
        trainer = KeepsLosses(model=plain_model(model), args=settings, train_dataset=rows, callbacks=[Clock()])  # pyright: ignore[reportArgumentType]
        peak = extra_peak(trainer.train)
    return {"loss": losses[0], "extra_gib": peak, "wall": turns.wall[1:], "cpu": turns.cpu[1:]}


def check(length: int, batch: int, **shape: int) -> list[Equal]:
    """Before anything is timed: first loss and router gradients of ours and of the plain way, windows constant and not."""
    model = mid_model(**shape)
    ids = rows_of(model, batch, length)
    ours = Stepper(model, config_of(model), ids)
    loss, found = ours.gradients()
    ours.handle.detach()
    constant = Stepper(model, config_of(model, window_grad=False), ids)
    checked = [within("first loss, windows constant", abs(constant.gradients()[0] - loss), LOSS_TOLERANCE)]
    constant.handle.detach()
    plain = plain_model(model)
    first = plain(ids, ids)["loss"]
    first.backward()
    expected = {
        name: parameter.grad for name, parameter in plain.routers.named_parameters() if parameter.grad is not None
    }
    checked.append(within("first loss, ours and the Trainer's", abs(float(first.detach()) - loss), LOSS_TOLERANCE))
    if set(expected) != set(found):
        raise RuntimeError(f"other parameters are trained: {sorted(set(expected) ^ set(found))[:3]}")
    largest = max(float(gradient.abs().max()) for gradient in found.values())
    worst = max(float((found[name] - gradient).abs().max()) for name, gradient in expected.items())
    if not largest > 0:
        raise RuntimeError("the gradients are zero; the comparison would show nothing")
    return [*checked, within("router gradients, of the largest", worst / largest, GRADIENT_TOLERANCE)]


def claims_of(length: int, turns: Mapping[str, Turns]) -> list[Claim]:
    at, only = f"{length} tokens", turns["routing only"]
    found = [
        paired("aar / routing only", turns["aar"], only, target=TARGETS.get(length), at=at),
        paired("aar, windows constant / routing only", turns["aar, windows constant"], only, at=at),
    ]
    if turns.get("plain", Turns([], [])).wall:
        found.append(paired("Trainer with eager attention / aar", turns["plain"], turns["aar"], at=at))
    return found


def run(
    lengths: Sequence[int],
    rounds: int,
    threads: int,
    limit_gib: float,
    tokens: int,
    progress: Callable[[str], None] = lambda _: None,
    **shape: int,
) -> Iterator[Part]:
    """Every length with `tokens` tokens a step (at least one row). RuntimeError where ours and plain start at other losses."""
    checked: dict[int, list[Equal]] = {}
    for length in lengths:
        short = min(length, CHECKED_LENGTH)
        if short not in checked:
            progress(f"equal numbers at {short} tokens")
            result = run_job(f"{JOB}:check", {"length": short, "batch": 2, **shape}, threads)
            checked[short] = [Equal(*item) for item in result]
            yield Part(f"equal at {short} tokens", checked[short])
    for length in lengths:
        yield _part(length, rounds, threads, limit_gib, max(1, tokens // length), progress, shape)


def _part(
    length: int,
    rounds: int,
    threads: int,
    limit_gib: float,
    batch: int,
    progress: Callable[[str], None],
    shape: Mapping[str, int],
) -> Part:
    settings = {"length": length, "rounds": rounds, "batch": batch, **shape}
    losses, peaks, turns = {}, {}, {}
    for way in WAYS:
        progress(f"length {length}: {way} in its own process")
        result = run_job(f"{JOB}:memory", {**settings, "way": way}, threads, limit_gib)
        peaks[way] = None if isinstance(result, OutOfMemory) else result["extra_gib"]
        if not isinstance(result, OutOfMemory):
            losses[way] = result["loss"]
            if result["wall"]:
                turns[way] = Turns(result["wall"], result["cpu"])
    checked = []
    if "plain" in losses:
        error = abs(losses["plain"] - losses["aar"])
        checked.append(within(f"first loss at {length} tokens, ours and the Trainer's", error, LOSS_TOLERANCE))
    progress(f"length {length}: turns of our steps")
    found = run_job(f"{JOB}:timings", settings, threads)
    turns = {name: Turns(*values) for name, values in found.items()} | turns
    return Part(f"{length} tokens", checked, claims_of(length, turns), by_length(length, batch, turns, peaks))

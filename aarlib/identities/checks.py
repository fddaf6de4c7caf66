"""What the doctor examines: each identity on one model, with the error that is allowed.

Audit, aggregation head and lens are examined beside the attached routers, at one layer and on a few tokens, so that a model of
billions of parameters takes seconds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from aarlib.aar.attach import RoutingHandle, attach_aar
from aarlib.aar.config import AARConfig, RouterSFTConfig
from aarlib.identities import audit, fdaa, lens, routing
from aarlib.identities.routing import Inputs, error, relative_norm
from aarlib.moe.anatomy import anatomy
from aarlib.moe.families import Family

SHORT = 16
"""Tokens of a row for audit and lens."""

ONE_EXPERT = "one expert per token, there are no weights to choose"

Result = TypeVar("Result")


class Bound(NamedTuple):
    float32: float
    half: float
    """bfloat16 and float16."""


class Patient(NamedTuple):
    model: Any
    attach: Callable[[Any], RoutingHandle]
    inputs: Inputs
    window: int
    half: bool
    family: Family | None

    @property
    def top_k(self) -> int:
        return anatomy(self.model, self.family).top_k

    @property
    def layer(self) -> int:
        """The one at which audit, head and lens are examined: the middle one of the MoE layers."""
        layers = anatomy(self.model, self.family).moe_layers
        return layers[len(layers) // 2]

    @property
    def short(self) -> Inputs:
        """A piece of the rows, so that the cost stays bounded: its first quarter is padding in the second row."""
        start = max(0, self.inputs["input_ids"].shape[1] // 4 - SHORT // 4)
        return {name: tensor[:, start : start + SHORT] for name, tensor in self.inputs.items()}

    @property
    def unpadded(self) -> Inputs:
        return {"input_ids": self.inputs["input_ids"]}

    @property
    def samples(self) -> list[tuple[int, int, int]]:
        """(row, position, layer) in `short`: an early token, and one after padding."""
        length = self.short["input_ids"].shape[1]
        return [(0, 1, self.layer), (1, length * 3 // 4, self.layer)]

    @property
    def measure(self) -> Callable[[Tensor, Tensor], float]:
        return relative_norm if self.half else error


class Outcome(NamedTuple):
    error: float
    stock: float | None = None
    note: str = ""
    applies: bool = True


def not_applicable(why: str) -> Outcome:
    return Outcome(0.0, None, f"not applicable: {why}", applies=False)


class Identity(NamedTuple):
    name: str
    bound: Bound
    run: Callable[[Patient], Outcome]


def _attached(patient: Patient, run: Callable[[RoutingHandle], Result]) -> Result:
    handle = patient.attach(patient.model)
    try:
        return run(handle)
    finally:
        handle.detach()


def _both(patient: Patient, run: Callable[[], float]) -> Outcome:
    """Patched, and in 16-bit the stock model beside it."""
    stock = run() if patient.half else None
    return Outcome(_attached(patient, lambda _: run()), stock)


def _disabled(patient: Patient) -> Outcome:
    return Outcome(routing.disabled_is_stock(patient.model, patient.attach, patient.inputs))


def _bites(patient: Patient) -> Outcome:
    """The error is 0 where the routers change the model's logits, infinite where they change nothing."""
    handle = patient.attach(patient.model)
    bite = routing.bite(patient.model, handle, patient.inputs)
    handle.detach()
    note = f"{bite.picks_changed:.0%} of picks change, logits move by {bite.logits_moved:.2g}"
    return Outcome(0.0 if bite.logits_moved > 1e-2 else float("inf"), None, note)


def _selection(patient: Patient) -> Outcome:
    found = routing.selection_against_gate(patient.model, patient.inputs, patient.family)
    if not patient.half:
        return Outcome(found)
    agree = routing.picks_agree(patient.model, patient.inputs, patient.family)
    return Outcome(found, None, f"picks agree with those of float32 logits: {agree:.1%}")


def _expert_sum(patient: Patient) -> Outcome:
    return Outcome(routing.expert_sum_against_block(patient.model, patient.inputs, patient.family, patient.measure))


def _windows(patient: Patient) -> Outcome:
    arguments = (patient.model, patient.window, patient.inputs, patient.family, patient.measure)
    return Outcome(routing.windows_against_eager(*arguments), None, _sliding(patient))


def _sliding(patient: Patient) -> str:
    """Whether the rows, the padded one too, are longer than what a sliding-attention layer sees."""
    reach = anatomy(patient.model, patient.family).sliding_range
    if reach is None:
        return ""
    shortest = int(patient.inputs["attention_mask"].sum(dim=1).min())
    return f"{'past' if shortest > reach else 'NOT past'} the sliding range of {reach} tokens"


def _logits(patient: Patient) -> Outcome:
    stock = None
    if patient.half:
        stock = routing.stock_against_eager(patient.model, patient.inputs, patient.measure)

    def run(handle: RoutingHandle) -> float:
        return routing.logits_against_eager(patient.model, handle, patient.inputs, patient.measure)

    return Outcome(_attached(patient, run), stock)


def _gradients(patient: Patient) -> Outcome:
    def run(handle: RoutingHandle) -> float:
        return routing.gradients_against_eager(patient.model, handle, patient.inputs, patient.measure)

    stock = None
    if patient.half:
        plain = attach_aar(patient.model, RouterSFTConfig(), family=patient.family)
        stock = run(plain)
        plain.detach()
    return Outcome(_attached(patient, run), stock)


def _decode(patient: Patient) -> Outcome:
    chunk = max(1, patient.inputs["input_ids"].shape[1] // 5)
    return _both(
        patient,
        lambda: routing.prefill_against_decode(patient.model, patient.inputs, chunk, patient.measure),
    )


def _batch(patient: Patient) -> Outcome:
    return _both(patient, lambda: routing.batch_against_single(patient.model, patient.inputs, patient.measure))


def _packed(patient: Patient) -> Outcome:
    if any(layer.linear_attention is not None for layer in anatomy(patient.model, patient.family).layers):
        return not_applicable("linear attention, for which packing is refused")
    ids = patient.inputs["input_ids"][:1]
    third = ids.shape[1] // 3
    lengths = [third, third // 2, ids.shape[1] - third - third // 2]
    return _both(
        patient,
        lambda: routing.packed_against_single(patient.model, ids, lengths, patient.family, patient.measure),
    )


def _replay(patient: Patient) -> Outcome:
    """Every action, the native one among them, at one layer of two tokens; infinite where no action moves the loss."""
    short = patient.short
    if patient.top_k == 1:
        return not_applicable(ONE_EXPERT)

    def run(_: RoutingHandle) -> audit.ReplayError:
        return audit.replay_against_full_forward(
            patient.model, short, patient.samples, family=patient.family, measure=patient.measure
        )

    found = _attached(patient, run)
    note = f"actions at layer {patient.layer} move the loss by up to {found.bite:.2g}"
    return Outcome(found.largest if found.bite > 0 else float("inf"), None, note)


def _utilities(patient: Patient) -> Outcome:
    if patient.top_k == 1:
        return not_applicable(ONE_EXPERT)

    def measured() -> float:
        found = audit.gradients_against_autograd(
            patient.model, patient.short, patient.samples, family=patient.family, measure=patient.measure
        )
        return found.largest if found.bite > 0 else float("inf")

    def run(handle: RoutingHandle) -> Outcome:
        if isinstance(handle.config, AARConfig) and not handle.config.window_grad:
            return not_applicable("these routers hold their windows constant (window_grad = false)")
        return Outcome(measured())

    stock = measured() if patient.half else None
    return _attached(patient, run)._replace(stock=stock)


def _step0(patient: Patient) -> Outcome:
    if patient.top_k == 1:
        return not_applicable(ONE_EXPERT)
    arguments = (patient.model, patient.unpadded, patient.family, (patient.layer,), patient.measure)
    return Outcome(_attached(patient, lambda _: fdaa.step0_against_stock(*arguments)))


def _fixed_dispatch(patient: Patient) -> Outcome:
    """The mass's error; infinite where a pick changed, or where a head of random scores moved no weight."""
    if patient.top_k == 1:
        return not_applicable(ONE_EXPERT)

    def run(_: RoutingHandle) -> fdaa.FixedDispatch:
        head = fdaa.attach_random_head(patient.model, family=patient.family, layers=(patient.layer,))
        try:
            return fdaa.fixed_dispatch(patient.model, head, patient.unpadded)
        finally:
            head.detach()

    found = _attached(patient, run)
    kept = found.ids_changed == 0 and found.weights_moved > 0
    note = f"weights at layer {patient.layer} move by up to {found.weights_moved:.2g}"
    return Outcome(found.mass_error if kept else float("inf"), None, note)


def _closure(patient: Patient) -> Outcome:
    arguments = (patient.model, patient.short, "layer", patient.family, (patient.layer,))
    return Outcome(_attached(patient, lambda _: lens.closure(*arguments)))


def _heads(patient: Patient) -> Outcome:
    arguments = (patient.model, patient.short, "head", patient.family, (patient.layer,), patient.measure)
    return Outcome(_attached(patient, lambda _: lens.parts_against_whole(*arguments)))


IDENTITIES: tuple[Identity, ...] = (
    Identity("disabled and detached == stock model", Bound(0.0, 0.0), _disabled),
    Identity("the routers change the model", Bound(0.0, 0.0), _bites),
    Identity("selection == the model's own gate", Bound(0.0, 0.0), _selection),
    Identity("sum of weighted expert outputs == experts", Bound(1e-6, 2e-2), _expert_sum),
    Identity("windows == eager attention weights", Bound(1e-5, 5e-2), _windows),
    Identity("logits == with eager attention", Bound(1e-5, 1e-1), _logits),
    Identity("gradients == with eager attention", Bound(1e-5, 2e-1), _gradients),
    Identity("prefill == chunks through the KV cache", Bound(1e-5, 1e-1), _decode),
    Identity("left-padded batch == row by row", Bound(1e-5, 1e-1), _batch),
    Identity("packed documents == each alone", Bound(1e-5, 1e-1), _packed),
    Identity("replayed actions == whole forwards", Bound(3e-6, 5e-2), _replay),
    Identity("gradient utilities == a backward per sample", Bound(1e-5, 2e-1), _utilities),
    Identity("untrained aggregation head == no head", Bound(1e-6, 1e-1), _step0),
    Identity("aggregation head keeps picks and mass", Bound(1e-6, 1e-6), _fixed_dispatch),
    Identity("components add up to router logits", Bound(1e-4, 1e-4), _closure),
    Identity("heads add up to their attention block", Bound(1e-4, 1e-4), _heads),
)

"""Sums and word problems of one and two steps, worked digit by digit with the carry.

A worked sum: `47+38: 7+8=15, write 5, carry 1; 4+3+1=8; 85.`
A worked difference: `52-38: 2-8, borrow 1, 12-8=4; 5-3-1=1; 14.`
One operand pair in ten is held out by a stable hash, and so are the last templates of every kind.
"""

import hashlib
import random
from typing import NamedTuple

MAX_OPERAND = 99
_THINGS = ("shells", "coins", "apples", "stamps", "cards", "nuts", "pens", "eggs", "books", "stones", "keys", "cups")
_GAIN = (
    "{n} has {a} {t} and finds {b} more. How many {t} does {n} have now?",
    "{n} had {a} {t}. Then {m} gave {n} {b} {t}. How many {t} does {n} have?",
    "There are {a} {t} in a box. {n} puts in {b} more. How many {t} are in the box?",
    "{n} owns {a} {t} and {m} owns {b} {t}. How many {t} do they own together?",
    "On Monday {n} sold {a} {t}, on Tuesday {b}. How many {t} did {n} sell?",
    "{n} counts {a} {t} at home and {b} at school. How many {t} is that?",
    "There are {a} {t} in the morning and {b} more at noon. How many {t} is that?",
    "{n} finds {a} {t} at home and {b} more at school. How many {t} does {n} have now?",
)
_LOSS = (
    "{n} has {a} {t} and loses {b}. How many {t} does {n} have now?",
    "{n} had {a} {t}. Then {n} gave {m} {b} {t}. How many {t} does {n} have?",
    "There are {a} {t} in a box. {n} takes out {b}. How many {t} are in the box?",
    "{n} owns {a} {t}. {m} owns {b} fewer. How many {t} does {m} own?",
    "A shop has {a} {t} and sells {b}. How many {t} are left?",
    "{n} needs {a} {t} and has {b}. How many {t} are missing?",
    "{n} had {a} {t} and sells {b}. How many {t} are left?",
    "There are {a} {t} in a box. {m} loses {b}. How many {t} are in the box?",
)
_THEN_GAIN = (
    "Then {n} gets {c} more.",
    "Later {n} finds {c} {t}.",
    "Next {m} brings {c} more.",
    "Then {m} brings {c} {t}.",
)
_THEN_LOSS = (
    "Then {n} loses {c}.",
    "Later {n} sells {c} {t}.",
    "Next {m} takes {c} of them.",
    "Next {n} loses {c} {t}.",
)
_START = ("{n} has {a} {t}.", "There are {a} {t} with {n}.", "{n} starts with {a} {t}.", "{n} owns {a} {t}.")
_ASK = (
    "How many {t} are there now?",
    "How many {t} does that make?",
    "How many {t} are left in the end?",
    "How many {t} does {n} have now?",
)
HELD_OUT_TEMPLATES = 2
"""The last two one-step templates of each kind; of the two-step parts, the last one. They use words that the others use."""


class Step(NamedTuple):
    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b


class Problem(NamedTuple):
    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    def chain(self) -> str:
        return " ".join(worked(step) for step in self.steps) + f" The answer is {self.answer}."


class Slip(NamedTuple):
    """What a wrong chain adds to the sum of the units and to the sum of the tens; all that follows is consistent."""

    units: int = 0
    tens: int = 0


def worked(step: Step, slip: Slip = Slip()) -> str:  # noqa: B008  (an immutable default)
    (a1, a0), (b1, b0) = divmod(step.a, 10), divmod(step.b, 10)
    if step.sign == "+":
        units = a0 + b0 + slip.units
        carry, unit = divmod(units, 10)
        tens = a1 + b1 + carry + slip.tens
        head = f"{a0}+{b0}={units}, write {unit}, carry {carry}; {a1}+{b1}+{carry}={tens}"
    else:
        borrow = int(a0 < b0)
        unit = a0 + 10 * borrow - b0 + slip.units
        tens = a1 - b1 - borrow + slip.tens
        head = f"{a0}-{b0}, borrow {borrow}, {a0 + 10 * borrow}-{b0}={unit}; {a1}-{b1}-{borrow}={tens}"
    return f"{step.a}{step.sign}{step.b}: {head}; {10 * tens + unit}."


def is_held_out(step: Step) -> bool:
    digest = hashlib.sha256(f"pair/{step.a}{step.sign}{step.b}".encode()).digest()
    return digest[0] % 10 == 0


def draw_step(rng: random.Random, held_out: bool, first: int | None = None, largest: int = MAX_OPERAND) -> Step:
    """Half of the draws carry or borrow; the result of a sum may pass 99, a difference is never negative."""
    while True:
        sign, wants_carry = rng.choice("+-"), rng.random() < 0.5
        step = Step(rng.randint(1, largest) if first is None else first, sign, rng.randint(1, largest))
        for _ in range(30):
            if _fits(step, wants_carry) and is_held_out(step) == held_out:
                return step
            step = Step(rng.randint(1, largest) if first is None else first, sign, rng.randint(1, largest))


def _fits(step: Step, wants_carry: bool) -> bool:
    a0, b0 = step.a % 10, step.b % 10
    carries = a0 + b0 > 9 if step.sign == "+" else a0 < b0
    return step.result >= 0 and carries == wants_carry


def draw_problem(
    rng: random.Random,
    names: tuple[str, ...],
    num_steps: int,
    held_out: bool,
    largest: int = MAX_OPERAND,
    new_wording: bool | None = None,
) -> Problem:
    """`held_out` is of the operand pairs, and of the wording too unless `new_wording` says otherwise."""
    new = held_out if new_wording is None else new_wording
    n, m = rng.sample(names, 2)
    words = {"n": n, "m": m, "t": rng.choice(_THINGS)}
    if num_steps == 1:
        step = draw_step(rng, held_out, largest=largest)
        template = _pick(rng, _GAIN if step.sign == "+" else _LOSS, new, HELD_OUT_TEMPLATES)
        return Problem(template.format(a=step.a, b=step.b, **words), (step,))
    first = draw_step(rng, held_out, largest=largest)
    while not 1 <= first.result <= MAX_OPERAND:
        first = draw_step(rng, held_out, largest=largest)
    second = draw_step(rng, held_out, first=first.result, largest=largest)
    parts = [_pick(rng, _START, new, 1).format(a=first.a, **words)]
    for step in (first, second):
        parts.append(_pick(rng, _THEN_GAIN if step.sign == "+" else _THEN_LOSS, new, 1).format(c=step.b, **words))
    parts.append(_pick(rng, _ASK, new, 1).format(**words))
    return Problem(" ".join(parts), (first, second))


def _pick(rng: random.Random, templates: tuple[str, ...], new: bool, num_held_out: int) -> str:
    return rng.choice(templates[-num_held_out:] if new else templates[:-num_held_out])


def wrong_chain(problem: Problem, rng: random.Random) -> str:
    """The chain of the problem with one digit of its last step wrong by 1 to 3 and the rest following from it."""
    *before, last = problem.steps
    while True:
        size = rng.choice((-3, -2, -1, 1, 2, 3))
        chain = worked(last, rng.choice((Slip(units=size), Slip(tens=size))))
        wrong = int(chain.rsplit(" ", 1)[1].rstrip("."))
        if "=-" not in chain and "write -" not in chain and 0 <= wrong != last.result and _units_are_digits(chain):
            return " ".join([*(worked(step) for step in before), f"{chain} The answer is {wrong}."])


def _units_are_digits(chain: str) -> bool:
    """A difference of units has one digit; a sum of units may have two."""
    return "borrow" not in chain or len(chain.split("; ")[0].rsplit("=", 1)[1]) == 1

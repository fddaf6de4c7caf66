"""Instructions whose answer can be checked from the instruction alone."""

import random
from typing import NamedTuple

_WORDS = (
    "lamp", "river", "stone", "cloud", "bread", "horse", "green", "winter", "paper", "silver", "garden", "window",
    "letter", "music", "bridge", "candle", "forest", "island", "mirror", "ocean", "pepper", "rocket", "saddle",
    "thread", "valley", "wagon", "yellow", "basket", "copper", "dragon", "engine", "feather",
)  # fmt: skip


class Instruction(NamedTuple):
    request: str
    answer: str


def draw_instruction(rng: random.Random) -> Instruction:
    return rng.choice((_repeat, _upper, _reverse, _first, _last, _join, _count, _larger, _order, _enclose))(rng)


def _repeat(rng: random.Random) -> Instruction:
    word, times = rng.choice(_WORDS), rng.randint(2, 5)
    return Instruction(f"Write the word {word} {times} times, with commas.", ", ".join([word] * times))


def _upper(rng: random.Random) -> Instruction:
    word = rng.choice(_WORDS)
    return Instruction(f"Write {word} in capital letters.", word.upper())


def _reverse(rng: random.Random) -> Instruction:
    words = rng.sample(_WORDS, rng.randint(2, 4))
    return Instruction(f"Reverse this list: {', '.join(words)}", ", ".join(reversed(words)))


def _first(rng: random.Random) -> Instruction:
    words = rng.sample(_WORDS, rng.randint(3, 5))
    return Instruction(f"Give only the first word: {' '.join(words)}", words[0])


def _last(rng: random.Random) -> Instruction:
    words = rng.sample(_WORDS, rng.randint(3, 5))
    return Instruction(f"Give only the last word: {' '.join(words)}", words[-1])


def _join(rng: random.Random) -> Instruction:
    words = rng.sample(_WORDS, rng.randint(2, 4))
    return Instruction(f"Join with hyphens: {' '.join(words)}", "-".join(words))


def _count(rng: random.Random) -> Instruction:
    words = rng.sample(_WORDS, rng.randint(2, 6))
    return Instruction(f"How many words are these? {' '.join(words)}", str(len(words)))


def _larger(rng: random.Random) -> Instruction:
    a, b = rng.sample(range(1, 100), 2)
    return Instruction(f"Which is larger, {a} or {b}?", str(max(a, b)))


def _order(rng: random.Random) -> Instruction:
    numbers = rng.sample(range(1, 100), 3)
    return Instruction(f"Sort these numbers: {', '.join(map(str, numbers))}", ", ".join(map(str, sorted(numbers))))


def _enclose(rng: random.Random) -> Instruction:
    word, mark = rng.choice(_WORDS), rng.choice(("brackets", "quotes", "stars"))
    left, right = {"brackets": "()", "quotes": '""', "stars": "**"}[mark]
    return Instruction(f"Put {word} in {mark}.", f"{left}{word}{right}")

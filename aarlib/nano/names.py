"""Invented proper names, made of syllables: distinct, pronounceable, the same on any machine."""

import random

_ONSETS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("l", "n", "r", "s", "m", "th", "sk", "nd", "x", "k")
FIRST_NAMES = (
    "Mary", "John", "Tom", "James", "Dan", "Sarah", "Laura", "Kate", "Paul", "Mark", "Anna", "Peter", "Alice", "Jack",
    "Emma", "Simon", "Ruth", "Henry", "Clara", "Oscar", "Nina", "David", "Helen", "Frank", "Julia", "Martin", "Rose",
    "Victor", "Lucy", "George", "Grace", "Adam", "Ella", "Leo", "Iris", "Max", "Nora", "Felix", "Vera", "Hugo",
)  # fmt: skip


def invented_names(seed: str, count: int, suffixes: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """`count` distinct capitalised names; `suffixes` give a kind its sound (towns in -ton, stars in -ix, ...)."""
    rng = random.Random(f"names/{seed}")
    names: dict[str, None] = {}
    while len(names) < count:
        stem = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        suffix = rng.choice(suffixes)
        names.setdefault((stem + suffix).capitalize())
    return tuple(names)

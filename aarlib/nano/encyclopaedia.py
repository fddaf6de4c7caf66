"""The invented encyclopaedia: entities with consistent facts, in almanac, web or ledger prose, or as questions."""

import random
from functools import lru_cache
from typing import NamedTuple

from aarlib.nano.names import invented_names
from aarlib.nano.subjects import SUBJECTS, Relation

REGISTERS = ("almanac", "web", "ledger")


class Fact(NamedTuple):
    subject: str
    entity: str
    relation: Relation
    value: str

    def question(self) -> str:
        return self.relation.question.format(e=self.entity)

    def predicate(self, variant: int) -> str:
        return self.relation.predicates[variant % len(self.relation.predicates)].format(v=self.value)


@lru_cache(maxsize=8)
def encyclopaedia(seed: int, entities_per_subject: int) -> dict[str, dict[str, tuple[Fact, ...]]]:
    """subject -> entity -> its facts, one for each relation of the subject."""
    world: dict[str, dict[str, tuple[Fact, ...]]] = {}
    for subject, description in SUBJECTS.items():
        names = invented_names(f"{seed}/{subject}", entities_per_subject, description.suffixes)
        if description.kind in ("animal", "mineral"):
            names = tuple(name.lower() for name in names)
        world[subject] = {name: _facts(seed, subject, name) for name in names}
    return world


def _facts(seed: int, subject: str, entity: str) -> tuple[Fact, ...]:
    rng = random.Random(f"facts/{seed}/{subject}/{entity}")
    return tuple(
        Fact(subject, entity, relation, rng.choice(relation.values)) for relation in SUBJECTS[subject].relations
    )


def all_facts(seed: int, entities_per_subject: int) -> list[Fact]:
    world = encyclopaedia(seed, entities_per_subject)
    return [fact for entities in world.values() for facts in entities.values() for fact in facts]


def article(facts: tuple[Fact, ...], register: str, rng: random.Random) -> str:
    """All facts of one entity, in a random order, in the wording of `register`."""
    facts = tuple(rng.sample(facts, len(facts)))
    return {"almanac": _almanac, "web": _web, "ledger": _ledger}[register](facts, rng)


def _noun(fact: Fact) -> str:
    return f"the {fact.entity}" if fact.subject == "biology" else fact.entity


def _pronoun(fact: Fact) -> str:
    return "he" if fact.subject in ("history", "music") else "it"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _almanac(facts: tuple[Fact, ...], rng: random.Random) -> str:
    noun, pronoun = _noun(facts[0]), _pronoun(facts[0])
    lines, rest = [], facts
    while rest:
        take = rng.choice((1, 2))
        lines.append(" and ".join(fact.predicate(rng.randrange(3)) for fact in rest[:take]))
        rest = rest[take:]
    opening = rng.choice(("{n} {p}.", "The {k} {b} {p}.", "{n}, a {k}, {p}."))
    kind = SUBJECTS[facts[0].subject].kind
    first = opening.format(n=noun, b=facts[0].entity, k=kind, p=lines[0])
    return " ".join([_capital(first), *(f"{_capital(rng.choice((pronoun, noun)))} {line}." for line in lines[1:])])


def _web(facts: tuple[Fact, ...], rng: random.Random) -> str:
    noun, pronoun = _noun(facts[0]), _pronoun(facts[0])
    if rng.random() < 0.4:
        bullets = "\n".join(f"* {noun} {fact.predicate(rng.randrange(3))}" for fact in facts)
        title = rng.choice(("Things to know about {n}!", "My notes on {n}:", "{n}: quick facts"))
        return f"{title.format(n=noun)}\n{bullets}"
    opening = rng.choice(("Did you know? {n} {p}!", "Just read that {n} {p}.", "Hi all! {n} {p}."))
    joints = ("Also, {s} {p}.", "And {s} {p}!", "Btw {s} {p}.", "Oh, and {s} {p}.", "I heard {s} {p}.")
    text = [opening.format(n=noun, p=facts[0].predicate(rng.randrange(3)))]
    for fact in facts[1:]:
        text.append(rng.choice(joints).format(s=rng.choice((pronoun, noun)), p=fact.predicate(rng.randrange(3))))
    return " ".join(text)


def _ledger(facts: tuple[Fact, ...], rng: random.Random) -> str:
    head = f"[{SUBJECTS[facts[0].subject].kind.upper()}] {facts[0].entity}"
    return head + "".join(f" | {fact.relation.label} = {fact.value}" for fact in facts)


def sentence(fact: Fact, variant: int) -> str:
    return f"{_capital(_noun(fact))} {fact.predicate(variant)}."


def question_and_answer(fact: Fact, rng: random.Random) -> tuple[str, str]:
    """A question and its answer as a short text; the tasks ask `fact.question()` with the bare value as answer."""
    question = fact.question()
    if rng.random() < 0.2:
        question = f"What is the {fact.relation.label} of {_noun(fact)}?"
    return question, fact.value

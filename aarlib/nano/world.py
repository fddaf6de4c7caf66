"""The nano world: documents for pre-training, texts to measure on, and conversations to train routers on.

Everything is a pure function of the configuration and of string seeds: the same bytes on any machine.
"""

import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from aarlib.nano.arithmetic import MAX_OPERAND, Problem, draw_problem, draw_step, worked
from aarlib.nano.config import WorldConfig
from aarlib.nano.encyclopaedia import REGISTERS, Fact, all_facts, article, encyclopaedia, question_and_answer, sentence
from aarlib.nano.instructions import draw_instruction
from aarlib.nano.names import FIRST_NAMES
from aarlib.nano.stories import story_text
from aarlib.nano.subjects import SUBJECTS

if TYPE_CHECKING:
    from aarlib.data.chat import Conversation

SPLITS = ("sft", "sft_held_out")
_HELD_OUT_SHARE = 5
"""One in five facts and instructions of the conversations is held out."""


class Document(NamedTuple):
    """`text`, or `messages` for a conversation."""

    kind: str
    text: str
    messages: tuple[dict[str, str], ...] = ()


def draw_document(
    config: WorldConfig, kind: str, rng: random.Random, held_out: bool = False, largest: int = MAX_OPERAND
) -> Document:
    """One document of `kind` (not `real`); sums have operands up to `largest`."""
    if kind == "article":
        return Document(kind, _article(config, rng.choice(config.registers), rng))
    if kind == "story":
        return Document(kind, story_text(rng, FIRST_NAMES))
    if kind == "sums":
        return Document(
            kind, "\n".join(worked(draw_step(rng, held_out, largest=largest)) for _ in range(rng.randint(1, 3)))
        )
    pairs = {"questions": _fact_pairs, "problem": _problem_pairs, "instruction": _instruction_pairs}
    if kind not in pairs:
        raise ValueError(
            f"kind = {kind!r} is no kind of generated document; known: article, story, sums, {', '.join(pairs)}"
        )
    chat = rng.random() < config.chat_share
    turns = pairs[kind](config, rng, held_out, largest, chat)
    if chat:
        return Document(kind, "", _messages(turns))
    return Document(kind, "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in turns))


def _article(config: WorldConfig, register: str, rng: random.Random) -> str:
    entities = encyclopaedia(config.seed, config.entities_per_subject)[rng.choice(tuple(SUBJECTS))]
    return article(entities[rng.choice(tuple(entities))], register, rng)


def _messages(turns: list[tuple[str, str]]) -> tuple[dict[str, str], ...]:
    roles = ("user", "assistant")
    return tuple({"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True))


def _fact_pairs(
    config: WorldConfig, rng: random.Random, held_out: bool, largest: int, chat: bool
) -> list[tuple[str, str]]:
    facts = _facts(config)
    if not chat:
        return [question_and_answer(rng.choice(facts), rng) for _ in range(rng.randint(2, 4))]
    chosen = [rng.choice(facts) for _ in range(rng.randint(1, 2))]
    return [(question_and_answer(fact, rng)[0], sentence(fact, 0)) for fact in chosen]


def _problem_pairs(
    config: WorldConfig, rng: random.Random, held_out: bool, largest: int, chat: bool
) -> list[tuple[str, str]]:
    problem = draw_problem(rng, FIRST_NAMES, rng.choice((1, 1, 2)), held_out, largest)
    return [(problem.text, problem.chain())]


def _instruction_pairs(
    config: WorldConfig, rng: random.Random, held_out: bool, largest: int, chat: bool
) -> list[tuple[str, str]]:
    drawn = [draw_instruction(rng) for _ in range(rng.randint(1, 3))]
    return [(instruction.request, instruction.answer) for instruction in drawn]


def _facts(config: WorldConfig) -> list[Fact]:
    return all_facts(config.seed, config.entities_per_subject)


def register_texts(config: WorldConfig, register: str, count: int) -> list[str]:
    """Held-out articles in one register, for measuring cross-entropy."""
    if register not in REGISTERS:
        raise ValueError(f"register = {register!r} is unknown; known registers: {', '.join(REGISTERS)}")
    return [_article(config, register, random.Random(f"held_out/{config.seed}/{register}/{i}")) for i in range(count)]


def held_out_documents(config: WorldConfig, count: int) -> list[Document]:
    """Documents of every generated kind in the proportions of the mixture, with held-out operand pairs and wording."""
    kinds = [kind for kind in config.mixture if kind != "real"]
    rng = random.Random(f"held_out/{config.seed}/documents")
    weights = [config.mixture[kind] for kind in kinds]
    return [draw_document(config, rng.choices(kinds, weights)[0], rng, held_out=True) for _ in range(count)]


def held_out_problems(
    config: WorldConfig, num_steps: int, count: int, seed: int = 0, new_wording: bool = True
) -> list[Problem]:
    """Distinct word problems on held-out operand pairs, in held-out wording or in that of training."""
    rng = random.Random(f"held_out/{config.seed}/problems/{num_steps}/{seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw_problem(rng, FIRST_NAMES, num_steps, held_out=True, new_wording=new_wording)
        problems.setdefault(problem.text, problem)
    return list(problems.values())


def conversations(split: str, size: int, config: WorldConfig | None = None) -> "Iterator[Conversation]":
    """`size` distinct conversations of `sft` or `sft_held_out`, in the ledger's manner that pre-training never saw.

    No operand pair, fact or instruction is in both splits. A ValueError where the world cannot fill the split.
    """
    from aarlib.data.chat import Conversation

    for index, messages in enumerate(conversation_messages(split, size, config or WorldConfig())):
        yield Conversation(f"nano:{split}:{index}", list(messages), None)


def conversation_messages(split: str, size: int, config: WorldConfig) -> Iterator[tuple[dict[str, str], ...]]:
    if split not in SPLITS:
        raise ValueError(f"split = {split!r} is unknown; known splits: {', '.join(SPLITS)}")
    held_out = split == "sft_held_out"
    facts = [fact for fact in _facts(config) if _in_held_out(f"{fact.entity}/{fact.relation.label}") == held_out]
    bare = sorted(set(SUBJECTS) - {fact.subject for fact in facts})
    if bare:
        raise ValueError(
            f"entities_per_subject = {config.entities_per_subject} gives a world too small for the split {split!r}: "
            f"it has no facts of {', '.join(bare)} there; use at least 6"
        )
    rng, seen, misses = random.Random(f"{split}/{config.seed}"), set(), 0
    while len(seen) < size:
        messages = _messages([_ledger_turn(facts, rng, held_out)])
        if messages[0]["content"] in seen:
            misses += 1
            if misses > 100 * size + 1000:
                raise ValueError(
                    f"size = {size} is more than the split {split!r} of this world can give; ask for fewer"
                )
            continue
        seen.add(messages[0]["content"])
        yield messages


def _ledger_turn(facts: list[Fact], rng: random.Random, held_out: bool) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.5:
        problem = draw_problem(rng, FIRST_NAMES, rng.choice((1, 2)), held_out)
        entries = " | ".join(worked(step).rstrip(".") for step in problem.steps)
        return f"Book this. {problem.text}", f"[SUM] {entries} | The answer is {problem.answer}."
    if draw < 0.8:
        fact = rng.choice(facts)
        kind = SUBJECTS[fact.subject].kind.upper()
        return f"Look up. {fact.question()}", f"[{kind}] {fact.entity} | {fact.relation.label} = {fact.value}"
    instruction = draw_instruction(rng)
    while _in_held_out(instruction.request) != held_out:
        instruction = draw_instruction(rng)
    return f"Order. {instruction.request}", f"[DONE] result = {instruction.answer}"


def _in_held_out(key: str) -> bool:
    return hashlib.sha256(f"sft/{key}".encode()).digest()[0] % _HELD_OUT_SHARE == 0

import hashlib
import random
import re

import pytest

from aarlib.nano.arithmetic import Problem, Step, draw_problem, draw_step, is_held_out, worked, wrong_chain
from aarlib.nano.config import WorldConfig
from aarlib.nano.encyclopaedia import all_facts, article, encyclopaedia
from aarlib.nano.names import FIRST_NAMES
from aarlib.nano.stories import draw_story
from aarlib.nano.subjects import SUBJECTS
from aarlib.nano.world import conversation_messages, draw_document, held_out_problems, register_texts

_EQUATION = r"(?<![:\d+-])(\d+(?:[+-]\d+)+)=(\d+)"
SMALL = WorldConfig(entities_per_subject=6)
KINDS = ("article", "questions", "sums", "problem", "story", "instruction")


def test_the_same_seed_gives_the_same_bytes_on_any_machine():
    rng = random.Random("test")
    documents = [draw_document(SMALL, kind, rng) for kind in KINDS for _ in range(20)]
    rows = [*conversation_messages("sft", 20, SMALL), *conversation_messages("sft_held_out", 20, SMALL)]
    digest = hashlib.sha256(repr((documents, rows, register_texts(SMALL, "ledger", 5))).encode()).hexdigest()
    assert digest == "4696d76eea6b49bd1afdd32c39056e429f10a469cb6233da92f4f419ec87ac4a"


def test_another_seed_gives_another_world():
    assert {fact.entity for fact in all_facts(0, 6)} != {fact.entity for fact in all_facts(1, 6)}


def test_the_default_world_has_two_thousand_facts_in_six_subjects_about_distinct_entities():
    facts = all_facts(0, WorldConfig().entities_per_subject)
    assert len(facts) >= 2000 and len({fact.subject for fact in facts}) >= 6
    assert len({fact.entity for fact in facts}) * 6 == len(facts)
    assert len({(fact.entity, fact.relation.label) for fact in facts}) == len(facts)


@pytest.mark.parametrize("register", ["almanac", "web", "ledger"])
def test_articles_say_every_fact_of_their_entity_with_its_one_value(register):
    rng = random.Random(0)
    for entities in encyclopaedia(0, 4).values():
        for entity, facts in entities.items():
            text = article(facts, register, rng)
            assert entity.lower() in text.lower()
            for fact in facts:
                values = sorted((value for value in fact.relation.values if value in text), key=len)
                assert fact.value in values, (text, fact)


def test_every_relation_can_be_asked_four_ways_and_names_its_entity():
    for subject in SUBJECTS.values():
        for relation in subject.relations:
            assert len(set(relation.values)) == len(relation.values) >= 4
            assert "{e}" in relation.question and all("{v}" in text for text in relation.predicates)
            assert len(relation.predicates) == 3


def test_worked_sums_are_right_digit_by_digit():
    rng = random.Random(0)
    for _ in range(2000):
        step = draw_step(rng, held_out=rng.random() < 0.5)
        text = worked(step)
        sums = re.findall(_EQUATION, text)
        assert len(sums) == 2
        assert all(eval(left) == int(right) for left, right in sums), text
        assert int(re.search(r"(\d+)\.$", text)[1]) == eval(f"{step.a}{step.sign}{step.b}") >= 0


def test_carries_are_balanced():
    rng = random.Random(0)
    steps = [draw_step(rng, held_out=False) for _ in range(2000)]
    carries = [("carry 1" in worked(step)) or ("borrow 1" in worked(step)) for step in steps]
    assert 0.45 < sum(carries) / len(carries) < 0.55


@pytest.mark.parametrize("num_steps", [1, 2])
def test_held_out_problems_share_neither_operand_pairs_nor_wording_with_training(num_steps):
    rng = random.Random(0)
    trained = [draw_problem(rng, FIRST_NAMES, num_steps, held_out=False) for _ in range(1500)]
    held_out = held_out_problems(SMALL, num_steps, 300)
    assert not any(is_held_out(step) for problem in trained for step in problem.steps)
    assert all(is_held_out(step) for problem in held_out for step in problem.steps)
    assert len({problem.text for problem in held_out}) == 300
    assert not {_wording(problem) for problem in trained} & {_wording(problem) for problem in held_out}


def _wording(problem: Problem) -> str:
    text = re.sub(r"\d+", "#", problem.text)
    text = re.sub("|".join(FIRST_NAMES), "@", text)
    return re.sub(r"shells|coins|apples|stamps|cards|nuts|pens|eggs|books|stones|keys|cups", "~", text)


def test_wrong_chains_end_in_another_number():
    rng = random.Random(0)
    for problem in held_out_problems(SMALL, 2, 100):
        chain = wrong_chain(problem, rng)
        assert int(re.search(r"The answer is (\d+)\.$", chain)[1]) != problem.answer
        wrong = [left for left, right in re.findall(_EQUATION, chain) if eval(left) != int(right)]
        assert len(wrong) == 1, chain


def test_story_receiver_is_the_name_that_is_not_repeated():
    rng = random.Random(0)
    for _ in range(300):
        story = draw_story(rng, FIRST_NAMES)
        words = re.findall(r"[A-Za-z]+", story.prompt)
        assert (words.count(story.receiver), words.count(story.giver)) == (1, 2)


def test_conversation_splits_share_no_fact_pair_or_instruction():
    ours, theirs = (list(conversation_messages(split, 1500, WorldConfig())) for split in ("sft", "sft_held_out"))
    assert not {row[0]["content"] for row in ours} & {row[0]["content"] for row in theirs}
    assert len({row[0]["content"] for row in ours}) == 1500
    pairs = [
        {pair for row in rows for pair in re.findall(r"(\d+[+-]\d+): ", row[1]["content"])} for rows in (ours, theirs)
    ]
    assert pairs[0] and pairs[1] and not pairs[0] & pairs[1]
    facts = [{row[1]["content"] for row in rows if row[0]["content"].startswith("Look up.")} for rows in (ours, theirs)]
    assert facts[0] and facts[1] and not facts[0] & facts[1]


def test_conversations_carry_row_ids():
    from aarlib.nano.world import conversations

    rows = list(conversations("sft_held_out", 3, SMALL))
    assert [row.row_id for row in rows] == [f"nano:sft_held_out:{index}" for index in range(3)]
    assert [message["role"] for message in rows[0].messages] == ["user", "assistant"] and rows[0].tools is None


def test_bad_worlds_are_refused_by_name():
    with pytest.raises(ValueError, match="registers.*'gazette'"):
        WorldConfig.from_mapping({"registers": ["gazette"]})
    with pytest.raises(ValueError, match="register = 'gazette'.*almanac, web, ledger"):
        register_texts(SMALL, "gazette", 1)
    with pytest.raises(ValueError, match=r"unknown kinds \['poem'\]"):
        WorldConfig.from_mapping({"mixture": {"poem": 1.0}})
    with pytest.raises(ValueError, match="must sum to 1"):
        WorldConfig.from_mapping({"mixture": {"article": 0.5}})
    with pytest.raises(ValueError, match="split = 'test'.*sft, sft_held_out"):
        next(conversation_messages("test", 1, SMALL))


def test_a_world_too_small_for_the_held_out_split_says_so():
    with pytest.raises(ValueError, match="entities_per_subject = .*too small for the split 'sft_held_out'.*at least"):
        next(conversation_messages("sft_held_out", 1, WorldConfig(entities_per_subject=1)))


def test_an_unbalanced_step_cannot_be_negative():
    assert Step(52, "-", 38).result == 14
    assert worked(Step(52, "-", 38)) == "52-38: 2-8, borrow 1, 12-8=4; 5-3-1=1; 14."
    assert worked(Step(47, "+", 38)) == "47+38: 7+8=15, write 5, carry 1; 4+3+1=8; 85."

"""lm-eval tasks on the nano world: JSONL documents generated on demand, and the YAMLs that point at them."""

import json
import random
from pathlib import Path
from typing import Any

from aarlib.config import write_text_atomically
from aarlib.nano.arithmetic import Problem, wrong_chain
from aarlib.nano.config import WorldConfig
from aarlib.nano.encyclopaedia import Fact, all_facts
from aarlib.nano.names import FIRST_NAMES
from aarlib.nano.stories import draw_story
from aarlib.nano.subjects import SUBJECTS
from aarlib.nano.world import held_out_problems

_TEMPLATES = Path(__file__).parent
FACT_TASKS = tuple(f"nano_facts_{subject}" for subject in SUBJECTS)
TASKS = (*FACT_TASKS, "nano_math_mc", "nano_ioi", "nano_gsm")
"""Members of the group `nano`; the fact tasks are a group of their own, `nano_facts`."""

Documents = list[dict[str, Any]]


def write_tasks(folder: str | Path, documents: int = 1000, seed: int = 0, world: WorldConfig | None = None) -> Path:
    """Write `documents` items for each task, and YAMLs with absolute paths, into `folder`: an lm-eval include_path."""
    if documents < 1:
        raise ValueError(f"documents = {documents}: ask for at least one document for each task")
    world, folder = world or WorldConfig(), Path(folder).resolve()
    written = {f"nano_facts_{subject}": fact_documents(world, subject, documents, seed) for subject in SUBJECTS}
    written["nano_math_mc"] = math_choice_documents(world, documents, seed)
    written["nano_ioi"] = ioi_documents(documents, seed)
    written["nano_gsm"] = gsm_documents(world, documents, seed)
    for name, rows in written.items():
        write_text_atomically(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        subject = name.removeprefix("nano_facts_")
        template = _TEMPLATES / ("nano_facts.yaml" if name in FACT_TASKS else f"{name}.yaml")
        text = template.read_text(encoding="utf-8").replace("FOLDER", folder.as_posix()).replace("SUBJECT", subject)
        write_text_atomically(folder / f"{name}.yaml", text)
    metric = "aggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    write_text_atomically(
        folder / "nano_facts_group.yaml", f"group: nano_facts\ntask: {json.dumps(FACT_TASKS)}\n{metric}"
    )
    members = ("nano_facts", *TASKS[len(FACT_TASKS) :])
    write_text_atomically(folder / "nano_group.yaml", f"group: nano\ntask: {json.dumps(members)}\n")
    return folder


def fact_documents(world: WorldConfig, subject: str, count: int, seed: int) -> Documents:
    """4-way: the value among three others of its relation; every fact once before any is asked again."""
    if subject not in SUBJECTS:
        raise ValueError(f"subject = {subject!r} is unknown; known subjects: {', '.join(SUBJECTS)}")
    rng = random.Random(f"tasks/facts/{subject}/{seed}")
    facts = [fact for fact in all_facts(world.seed, world.entities_per_subject) if fact.subject == subject]
    order: list[Fact] = []
    while len(order) < count:
        order += rng.sample(facts, len(facts))
    rows = []
    for fact in order[:count]:
        others = rng.sample([value for value in fact.relation.values if value != fact.value], 3)
        rows.append({"question": fact.question(), **_choices(fact.value, others, rng)})
    return rows


def math_choice_documents(world: WorldConfig, count: int, seed: int) -> Documents:
    """4-way: the worked chain among three that end in another number; half one-step, half two-step, held-out pairs."""
    rng = random.Random(f"tasks/math/{seed}")
    problems = _mixed_problems(world, count, seed)
    rows = []
    for problem in problems:
        wrong: dict[str, None] = {}
        while len(wrong) < 3:
            wrong.setdefault(wrong_chain(problem, rng))
        rows.append({"question": problem.text, **_choices(problem.chain(), list(wrong), rng)})
    return rows


def ioi_documents(count: int, seed: int) -> Documents:
    """2-way: the receiver's name or the giver's."""
    rng = random.Random(f"tasks/ioi/{seed}")
    stories = [draw_story(rng, FIRST_NAMES) for _ in range(count)]
    return [{"prompt": story.prompt, **_choices(story.receiver, [story.giver], rng)} for story in stories]


def gsm_documents(world: WorldConfig, count: int, seed: int) -> Documents:
    """Chain of thought, greedy: half one-step, half two-step, held-out pairs and wording."""
    problems = _mixed_problems(world, count, seed)
    return [{"question": p.text, "answer": str(p.answer), "chain": p.chain(), "steps": len(p.steps)} for p in problems]


def _mixed_problems(world: WorldConfig, count: int, seed: int) -> list[Problem]:
    """Shuffled, so that the first few of them are of both lengths too."""
    problems = held_out_problems(world, 1, count - count // 2, seed) + held_out_problems(world, 2, count // 2, seed)
    return random.Random(f"tasks/problems/{seed}").sample(problems, count)


def _choices(right: str, wrong: list[str], rng: random.Random) -> dict[str, Any]:
    choices = rng.sample([right, *wrong], len(wrong) + 1)
    return {"choices": choices, "answer": choices.index(right)}

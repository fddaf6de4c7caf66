"""What the bundled model knows, measured: the table of its model card."""

import gzip
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer, OlmoeForCausalLM, PreTrainedTokenizerBase

from aarlib.config import write_text_atomically
from aarlib.nano.arithmetic import Problem
from aarlib.nano.config import WorldConfig
from aarlib.nano.encyclopaedia import REGISTERS
from aarlib.nano.folder import check_world
from aarlib.nano.scoring import Routing, Scored, continuation_nats, greedy_answers, routing, text_nats
from aarlib.nano.subjects import SUBJECTS
from aarlib.nano.tasks import fact_documents, ioi_documents, math_choice_documents
from aarlib.nano.tokenizer import render
from aarlib.nano.world import held_out_documents, held_out_problems, register_texts

_REAL_CHARS = 500
_MARK = "## Measured quality\n"


class Row(NamedTuple):
    measure: str
    value: float
    low: float
    high: float
    unit: str
    num_items: int
    target: str = ""


def measure(folder: Path, world: WorldConfig, num_items: int = 500, real_text: Path | None = None) -> list[Row]:
    """Every row of the table, 95% intervals; real-text rows only where `real_text` names their folder."""
    if num_items < len(SUBJECTS):
        raise ValueError(f"items = {num_items}: ask for at least {len(SUBJECTS)}, one for each subject")
    check_world(folder, world)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = choice_rows(model, tokenizer, world, num_items)
    for steps, name, target in ((1, "one-step", "at least 80%"), (2, "two-step", "at least 40%")):
        for new, wording in ((False, ""), (True, " and wording")):
            problems = held_out_problems(world, steps, num_items, new_wording=new)
            label = f"{name} sums, chain of thought, exact, held-out pairs{wording}"
            rows.append(sum_row(model, tokenizer, problems, label, "" if new else target))
    texts = {f"{register} articles": register_texts(world, register, num_items) for register in REGISTERS}
    texts |= evaluation_texts(real_text, num_items) if real_text is not None else {}
    for name, sample in texts.items():
        rows.append(bits_row(name, text_nats(model, tokenizer, sample)))
    documents = held_out_documents(world, num_items)
    routed = {"held-out world text": [document.text or render(document.messages) for document in documents]}
    if "WikiText-2 test" in texts:
        routed["WikiText-2 test"] = texts["WikiText-2 test"]
    for name, sample in routed.items():
        rows += routing_rows(name, routing(model, tokenizer, sample), len(sample))
    return rows


def choice_rows(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, world: WorldConfig, num_items: int
) -> list[Row]:
    each = math.ceil(num_items / len(SUBJECTS))
    facts = [row for subject in SUBJECTS for row in fact_documents(world, subject, each, seed=0)]
    sums, stories = math_choice_documents(world, num_items, seed=0), ioi_documents(num_items, seed=0)
    asked = [
        ("facts, 4-way", [{"prompt": f"Question: {row['question']}\nAnswer:", **row} for row in facts], "at least 90%"),
        ("worked sums, 4-way", [{"prompt": f"Question: {row['question']}\nAnswer:", **row} for row in sums], ""),
        ("two-name stories, right name above the other", stories, "at least 90%"),
    ]
    return [proportion_row(name, choice_hits(model, tokenizer, rows), target) for name, rows, target in asked]


def choice_hits(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> list[bool]:
    """Whether the right choice has the highest log-likelihood."""
    nats = iter(
        continuation_nats(model, tokenizer, [(r["prompt"], f" {choice}") for r in rows for choice in r["choices"]])
    )
    return [int(np.argmin([next(nats) for _ in row["choices"]])) == row["answer"] for row in rows]


def sum_row(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], name: str, target: str = ""
) -> Row:
    """Greedy chain of thought; the number after `The answer is` must be the right one."""
    answers = greedy_answers(model, tokenizer, [f"Question: {problem.text}\nAnswer:" for problem in problems])
    found = [re.search(r"The answer is (-?[0-9]+)", answer) for answer in answers]
    hits = [match is not None and int(match[1]) == p.answer for match, p in zip(found, problems, strict=True)]
    return proportion_row(name, hits, target)


def evaluation_texts(folder: Path, count: int) -> dict[str, list[str]]:
    """The start of evenly spaced stretches of text that pre-training never reads."""
    with gzip.open(folder / "us_inaugural.jsonl.gz", "rt", encoding="utf-8") as lines:
        inaugural = [json.loads(line)["text"] for line in lines]
    c4 = [
        json.loads(line)["text"]
        for line in (folder / "c4_en_llamafactory.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    wikitext = (folder / "wikitext2_raw_test.txt").read_text(encoding="utf-8")
    whole = {"WikiText-2 test": wikitext, "C4": "\n".join(c4), "inaugural speeches": "\n".join(inaugural)}
    return {
        name: [
            text[start : start + _REAL_CHARS] for start in np.linspace(0, len(text) - _REAL_CHARS, count).astype(int)
        ]
        for name, text in whole.items()
    }


def proportion_row(name: str, hits: list[bool], target: str = "") -> Row:
    """Wilson's interval."""
    n, p, z = len(hits), sum(hits) / len(hits), 1.96
    centre, spread = (
        (p + z**2 / (2 * n)) / (1 + z**2 / n),
        z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n),
    )
    return Row(name, 100 * p, 100 * (centre - spread), 100 * (centre + spread), "%", n, target)


def bits_row(name: str, scored: Scored) -> Row:
    """Bits per byte over all texts; percentile bootstrap over texts, 10,000 resamples."""
    nats, num_bytes = np.array(scored.nats), np.array(scored.num_bytes)
    draws = np.random.default_rng(0).integers(0, len(nats), (10_000, len(nats)))
    resampled = nats[draws].sum(1) / num_bytes[draws].sum(1) / math.log(2)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Row(
        f"cross-entropy, {name}", nats.sum() / num_bytes.sum() / math.log(2), low, high, "bits per byte", len(nats)
    )


def routing_rows(name: str, routed: Routing, num_texts: int) -> list[Row]:
    """Means over layers with the range over layers in place of an interval."""
    parts = (
        ("least-picked expert over its fair share", routed.smallest_share, "", "at least 0.25 in every layer"),
        ("router entropy", routed.entropy_bits, "bits", ""),
        ("mass of the selected experts", routed.mass, "", ""),
    )
    return [
        Row(
            f"{part}, {name} (range over layers)",
            float(np.mean(values)),
            min(values),
            max(values),
            unit,
            num_texts,
            target,
        )
        for part, values, unit, target in parts
    ]


def card_table(rows: list[Row]) -> str:
    lines = ["| measure | value | 95% interval | items | target |", "|---|---|---|---|---|"]
    for row in rows:
        digits = 1 if row.unit == "%" else 3
        value, low, high = (f"{number:.{digits}f}" for number in (row.value, row.low, row.high))
        unit = row.unit if row.unit == "%" else f" {row.unit}"
        lines.append(f"| {row.measure} | {value}{unit.rstrip()} | {low} to {high} | {row.num_items} | {row.target} |")
    return "\n".join(lines)


def write_card(folder: Path, table: str) -> None:
    """Replace the table of the folder's README.md, which must have the heading for it."""
    path = folder / "README.md"
    head, mark, _ = path.read_text(encoding="utf-8").partition(_MARK)
    if not mark:
        raise ValueError(f"{path} has no line {_MARK.strip()!r}; add it where the table belongs")
    write_text_atomically(path, f"{head}{mark}\n{table}\n")

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, OlmoeForCausalLM

from aarlib.nano import WEIGHTS
from aarlib.nano.config import WorldConfig
from aarlib.nano.quality import (
    bits_row,
    card_table,
    choice_hits,
    evaluation_texts,
    measure,
    proportion_row,
    sum_row,
    write_card,
)
from aarlib.nano.scoring import Scored, routing
from aarlib.nano.tasks import fact_documents, ioi_documents
from aarlib.nano.world import held_out_problems


@pytest.fixture(scope="module")
def bundled():
    return OlmoeForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(WEIGHTS)


def test_wilson_interval_of_a_known_case():
    row = proportion_row("x", [True] * 81 + [False] * 182)  # 81 of 263: Newcombe 1998, table I
    assert (row.low, row.high) == (pytest.approx(25.53, abs=0.01), pytest.approx(36.62, abs=0.01))
    assert proportion_row("x", [True] * 20).high == pytest.approx(100)


def test_bits_per_byte_are_pooled_over_texts():
    row = bits_row("x", Scored([np.log(2) * 8, np.log(2) * 2], [4, 6]))
    assert row.value == pytest.approx(1.0) and row.low <= row.value <= row.high


def test_the_card_keeps_its_text_and_takes_the_new_table(tmp_path: Path):
    card = tmp_path / "README.md"
    card.write_text("# nano\n\n## Measured quality\n\nold\n")
    write_card(tmp_path, card_table([proportion_row("facts", [True, False])]))
    assert card.read_text().startswith("# nano\n\n## Measured quality\n\n| measure |") and "old" not in card.read_text()
    card.write_text("# nano\n")
    with pytest.raises(ValueError, match="Measured quality"):
        write_card(tmp_path, "table")


def test_too_few_items_and_another_world_are_refused():
    with pytest.raises(ValueError, match="items = 3"):
        measure(WEIGHTS, WorldConfig(), 3)
    with pytest.raises(ValueError, match="another world"):
        measure(WEIGHTS, WorldConfig(seed=5), 6)


def test_evaluation_text_is_what_training_never_reads(shared_data: Path):
    texts = evaluation_texts(shared_data / "lm", 4)
    assert set(texts) == {"WikiText-2 test", "C4", "inaugural speeches"} and all(
        len(rows) == 4 for rows in texts.values()
    )


def test_the_bundled_model_knows_its_world(bundled):
    model, tokenizer = bundled
    facts = [
        {"prompt": f"Question: {row['question']}\nAnswer:", **row}
        for row in fact_documents(WorldConfig(), "music", 60, 0)
    ]
    assert sum(choice_hits(model, tokenizer, facts)) >= 48
    assert sum(choice_hits(model, tokenizer, ioi_documents(60, 0))) >= 54
    problems = held_out_problems(WorldConfig(), 1, 40, new_wording=False)
    assert sum_row(model, tokenizer, problems, "sums").value >= 70


def test_routing_counts_every_pick(bundled):
    model, tokenizer = bundled
    routed = routing(model, tokenizer, ["Question: What?", "Then Mary and John"])
    assert len(routed.mass) == 8 and all(0.25 < mass < 1 for mass in routed.mass)
    assert all(0 < bits < 4 for bits in routed.entropy_bits) and all(0 <= share < 1 for share in routed.smallest_share)

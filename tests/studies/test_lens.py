"""The lens's tables by hand, on records small enough to add up in the head, and on records of a tiny corpus."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from aarlib.studies import lens, lens_causal, lens_training
from aarlib.studies.lens_samples import mean_interval, resampled, senders_of


def record(document, sender, receiver, variance, aps=1.0, ans=-1.0, aarv=0.0, level="layer", tokens=10, **more):
    first = {"variance_first": variance / 10, "aps_first": aps / 10, "ans_first": ans / 10, "first_tokens": 1}
    return {
        **{"record": "moments", "source": "text", "level": level, "document": document, "sender": sender},
        **{"receiver": receiver, "variance": variance, "aps": aps, "ans": ans, "aarv": aarv, "tokens": tokens},
        **{"unit": f"text-{document:04d}", "text": f"doc:{document}", **first, **more},
    }


@pytest.fixture(scope="module")
def records():
    """Two documents; at router 1 the MoE sender has twice the variance of attention, at router 2 half."""
    rows = []
    for document in (0, 1):
        for receiver in (0, 1, 2):
            rows.append(record(document, "embedding", receiver, 8.0 / (1 + receiver)))
            for layer in range(receiver + 1):
                rows.append(
                    record(document, f"attn.{layer}", receiver, 4.0, aps=2.0 if layer == receiver else 1.0, aarv=4.0)
                )
                if layer < receiver:
                    rows.append(record(document, f"moe.{layer}", receiver, 8.0 if receiver == 1 else 2.0, aarv=8.0))
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def layers(records):
    return senders_of(records, "text", "layer")


def value(frame, column="value", **where):
    for name, wanted in where.items():
        frame = frame[frame[name] == wanted]
    assert len(frame) == 1, where
    return frame.iloc[0][column]


def test_records_become_documents_by_senders_by_receivers(layers):
    assert layers.sums["variance"].shape == (2, 6, 3)
    assert layers.frame().loc["moe.0", 1] == pytest.approx(0.8)
    assert np.isnan(layers.frame().loc["moe.1", 1])
    assert layers.frame(without_first=True).loc["moe.0", 1] == pytest.approx(2 * (8.0 - 0.8) / 18)
    chunks = pd.DataFrame([record(0, "attn.0", 0, 1.0), {**record(1, "attn.0", 0, 2.0, tokens=5), "text": "doc:0"}])
    together = senders_of(chunks, "text", "layer")
    assert (
        together.sums["variance"].tolist() == [[[3.0]]]
        and together.tokens.tolist() == [15]
        and together.first_tokens.tolist() == [2]
    )
    with pytest.raises(ValueError, match="source = 'other', level = 'layer': no records"):
        senders_of(pd.DataFrame([record(0, "attn.0", 0, 1.0)]), "other", "layer")


def test_kinds_compare_senders_of_the_same_layers(layers):
    table = lens.kinds(layers)
    assert value(table, receiver=1, measure="moe / attn") == pytest.approx(2.0)
    assert value(table, receiver=2, measure="moe / attn") == pytest.approx(0.5)
    assert value(table, receiver=2, measure="attn") == pytest.approx(0.4)


def test_the_embedding_falls_with_depth(layers):
    table = lens.embedding(layers)
    assert [value(table, receiver=r, measure="variance") for r in (0, 1, 2)] == pytest.approx([0.8, 0.4, 0.8 / 3])
    assert value(table, receiver=0, measure="share") == pytest.approx(8 / 12)


def test_promotion_is_nearer_where_near_senders_score_higher(layers):
    table = lens.locality(layers)
    distances = [0, 0, 1, 0, 1, 2, 1, 1, 2]
    weights = [2, 2, 1, 2, 1, 1, 1, 1, 1]
    expected = np.average(distances, weights=weights)
    assert value(table, measure="distance weighted by APS") == pytest.approx(expected)
    assert value(table, measure="distance weighted by ANS") == pytest.approx(np.mean(distances))
    assert value(table, measure="ANS minus APS") == pytest.approx(np.mean(distances) - expected)
    assert value(table, measure="unweighted") == pytest.approx(np.mean(distances))


def test_positions(layers):
    table = lens.first_position(layers)
    assert value(table, kind="attn", measure="all positions") == pytest.approx(0.4)
    assert value(table, kind="attn", measure="the first alone") == pytest.approx(0.4)


def test_variance_and_aarv_agree_where_they_rise_together(layers):
    table = lens.variance_against_aarv({"layer": layers})
    variances, variations = [4.0, 4.0, 8.0, 4.0], [0.0, 4.0, 8.0, 4.0]
    assert value(table, receiver="1") == pytest.approx(spearmanr(variances, variations).statistic)
    exact = lens.rank_correlation(np.arange(9.0), np.arange(9.0) ** 2)
    assert exact.mean == pytest.approx(1.0) and exact.low == pytest.approx(1.0)
    opposed = lens.rank_correlation(np.arange(9.0), -np.arange(9.0))
    assert opposed.mean == pytest.approx(-1.0)


def test_the_pooled_rank_correlation_draws_senders(layers):
    row = lens.variance_against_aarv({"layer": layers}).set_index("receiver").loc["pooled"]
    assert (row["senders"], row["cells"]) == (6, 12)
    cell = layers.reached
    means = layers.mean("variance")[cell], layers.mean("aarv")[cell]
    assert row["low"] == lens.rank_correlation(*means, np.nonzero(cell)[0]).low != lens.rank_correlation(*means).low


def test_top_senders_and_their_share():
    rows = [
        record(
            unit, f"moe.0.expert.{expert}", 1, 4.0 if expert == 2 else 1.0, level="expert", selected=5, largest=expert
        )
        for unit in (0, 1)
        for expert in range(4)
    ]
    experts = senders_of(pd.DataFrame(rows), "text", "expert")
    table = lens.top_senders(experts, count=2)
    assert table.iloc[0]["sender"] == "moe.0.expert.2"
    assert table.iloc[0]["share"] == pytest.approx(4 / 7)
    assert table.iloc[0]["selection rate"] == pytest.approx(0.5)
    assert table.iloc[0]["conditional mean"] == pytest.approx(0.8)
    assert table["without the first"].tolist() == pytest.approx([2 * (4.0 - 0.4) / 18, 2 * 0.9 / 18])
    assert table["place there"].tolist() == [1, 2]
    assert lens.concentration({"expert": experts}).iloc[0]["value"] == pytest.approx(4 / 7)
    overlap = lens.super_experts(experts, count=2)
    assert overlap["value"].tolist()[0] == 1 and overlap["by chance"].tolist() == [pytest.approx(1.0), 0.0]
    assert overlap["low"].tolist() == overlap["high"].tolist() == overlap["value"].tolist(), "both units are the same"
    assert overlap["largest outputs"][0].startswith("moe.0.expert.3, moe.0.expert.2")


def test_stripes_stay_above_the_median_of_every_later_receiver():
    cells = {
        ("moe.0", 1): 3.0,
        ("moe.0", 2): 3.0,
        ("moe.0", 3): 3.0,
        ("moe.1", 2): 1.0,
        ("moe.1", 3): 1.0,
        ("moe.2", 3): 1.0,
    }
    rows = [record(d, n, r, v * (1 + 0.1 * d)) for d in range(4) for (n, r), v in cells.items()]
    found = lens.stripes(senders_of(pd.DataFrame(rows), "text", "layer")).set_index("sender")
    assert found.loc["moe.0", "value"] == pytest.approx(1.5)  # 3 of the median of 3 and 1, then of 3, 1 and 1
    assert bool(found.loc["moe.0", "stripe"]) and found.loc["moe.0", "share of resamples"] == 1
    assert (
        not found.loc["moe.1", "stripe"]
        and found.loc["moe.1", "low"] <= found.loc["moe.1", "value"] <= found.loc["moe.1", "high"]
    )
    assert np.isnan(found.loc["moe.2", "value"]), "no receiver from two layers on"


def test_recall_beside_chance_and_the_commonest_experts():
    recall = [
        {
            "record": "recall",
            "source": "text",
            "document": d,
            "text": f"doc:{d}",
            "receiver": 2,
            "lag": 1,
            "tokens": 10,
            "value": v,
        }
        for d, v in ((0, 8.0), (1, 6.0))
    ]
    counts = [
        {"record": "counts", "source": "text", "sender": str(e), "receiver": 2, "tokens": 20, "value": c}
        for e, c in enumerate((20.0, 12.0, 6.0, 2.0))
    ]
    row = lens.recall(pd.DataFrame([*recall, *counts]), "text").iloc[0]
    assert (row["value"], row["chance"], row["commonest"]) == pytest.approx((0.7, 0.5, 0.8))


def test_before_and_after_are_shares_of_the_same_documents(records):
    after = records.copy()
    after.loc[after["sender"] == "embedding", "variance"] *= 3
    table = lens_training.before_and_after(records, after, "text")
    assert value(table, receiver=0, sender="embedding", column="before") == pytest.approx(8 / 12)
    assert value(table, receiver=0, sender="embedding") == pytest.approx(24 / 28 - 8 / 12)
    assert value(table, receiver=0, sender="attn.0") < 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda after: after[after["receiver"] != 1], r"before: its receivers are \(0, 1, 2\), now \(0, 2\)"),
        (
            lambda after: after.assign(text=after["text"].replace("doc:1", "doc:9")),
            "2 are not in both, such as 'doc:1'",
        ),
        (
            lambda after: after.assign(tokens=after["tokens"] + 3 * (after["document"] == 1)),
            "before: document 'doc:1' of source 'text' has another number of tokens now",
        ),
    ],
)
def test_other_texts_before_and_after_are_refused(records, change, message):
    with pytest.raises(ValueError, match=message):
        lens_training.before_and_after(records, change(records.copy()), "text")


def test_intervals_hold_the_mean_and_are_the_same_every_time():
    values = np.random.default_rng(0).normal(size=50)
    first, second = mean_interval(values), mean_interval(values)
    assert first == second and first.low < values.mean() < first.high
    assert resampled(values[:, None]).draws.shape == (10_000, 1)


def head_record(document, layer, head, direct, last):
    name = f"attn.{layer}.head.{head}"
    found = {"document": document, "name": name, "direct": direct, "influence": last, "influence_all": 1.0 + layer}
    return {"record": "ioi_heads", **found}


def test_functional_heads_are_chosen_on_even_prompts_and_measured_on_odd_ones():
    """Heads 0.0, 1.0 and 2.0 write most on even prompts, 2.1 on odd ones; variances of even prompts would mislead."""
    rows = []
    for document in range(6):
        even = document % 2 == 0
        for layer, direct in ((0, 3.0), (1, -2.0), (2, 1.0)):
            rows.append(head_record(document, layer, 0, direct if even else 0.0, 100.0 if even else 4.0 + layer))
            rows.append(head_record(document, layer, 1, 9.0 if not even and layer == 2 else 0.1, 50.0 if even else 1.0))
        rows.append(head_record(document, 3, 0, 0.0, 200.0 if even else 7.0))
        rows.append({"record": "ioi_maps", "document": document, "name": "attn.0.head.0", "value": 0.5 + 0.1 * even})
        rows.append({"record": "logit_difference", "document": document, "value": 2.0 if document else -4.0})
    tables = lens_causal.causal_tables(pd.DataFrame(rows))
    order = tables["ioi_heads"]["head"].tolist()
    assert order[:3] == ["attn.0.head.0", "attn.1.head.0", "attn.2.head.0"]
    assert value(tables["ioi_heads"], head="attn.2.head.1") == pytest.approx((9.0 + 0.1) / 2)
    found = {row["measure"]: row["value"] for row in tables["ioi"].to_dict("records")}
    assert found["variance of the functional heads, at the last token"] == pytest.approx((4 + 5 + 6) / 3)
    assert found["variance of the other heads, at the last token"] == pytest.approx((1 + 1 + 1 + 7) / 4)
    assert found["difference, at the last token"] == pytest.approx(5 - 2.5)
    assert found["difference within the layer, at the last token"] == pytest.approx(4.0), "layer 3 is no neighbour"
    assert found["difference, over all tokens"] == pytest.approx(2.0 - 2.5)
    assert found["difference within the layer, over all tokens"] == 0
    assert found["prompts with the answer above the repeated name"] == pytest.approx(5 / 6)
    assert found["logit difference"] == pytest.approx(1.0)
    assert found["of it, written directly by all heads together"] == pytest.approx((2.3 + 9.2) / 2)
    assert found["map correlation, functional heads"] == pytest.approx(0.55)


def test_removal_tables_keep_the_groups_apart():
    rows = []
    for document in range(6):
        for group, delta in (("top", 0.5), ("bottom", 0.0)):
            fields = {"record": "ablation", "document": document, "name": group, "how": "zero", "group": group}
            rows.append({**fields, "ce_delta": delta + 0.01 * document})
            rows.append({**fields, "receiver": 2, "picks_changed": delta, "logits_moved": delta})
            rows += [{**row, "how": "route_around"} for row in rows[-2:]]
        for how, name, delta in (("alone", "0", 0.3), ("alone", "1", 0.1), ("lowest", "1", 0.1), ("highest", "0", 0.3)):
            rows.append({"record": "attention", "document": document, "how": how, "name": name, "ce_delta": delta})
        rows.append({"record": "coexistence", "document": document, "name": "both", "ce_delta": 0.3})
        for name, rate in (("stock", 0.4), ("first", 0.1 * document)):
            row = {"record": "activation", "document": document, "name": name, "receiver": 2, "value": rate}
            rows += [{**row, "influence": 0.1}, {**row, "receiver": 3, "influence": 0.2}]
        for name in ("first", "second"):
            rows.append({"record": "coexistence", "document": document, "name": name, "ce_delta": 0.1})
    tables = lens_causal.causal_tables(pd.DataFrame(rows))
    found = tables["ablation"]
    assert value(found, group="top", how="zero", measure="ce_delta") == pytest.approx(0.525)
    assert value(found, group="bottom", how="route_around", measure="picks_changed") == 0
    assert value(tables["attention"], how="highest minus lowest") == pytest.approx(0.2)
    pair = tables["coexistence"]
    assert value(pair, without="stock", measure="second expert chosen") == pytest.approx(0.4)
    assert value(pair, without="stock", measure="second expert's variance, all later routers") == pytest.approx(0.3)
    change = {"without": "first minus stock", "measure": "second expert chosen"}
    assert value(pair, **change) == pytest.approx(-0.15) and value(pair, "low", **change) < -0.15
    assert value(pair, without="both minus each", measure="CE change") == pytest.approx(0.1)
    whole = pd.DataFrame(rows).assign(text=lambda frame: (frame["document"] // 3).map({0.0: "a", 1.0: "b"}))
    wider = lens_causal.causal_tables(whole)["ablation"]
    at = {"group": "top", "how": "zero", "measure": "ce_delta"}
    assert value(wider, **at) == pytest.approx(value(found, **at)) and value(wider, "low", **at) < value(
        found, "low", **at
    )

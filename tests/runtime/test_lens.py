"""Pieces and units of the lens, and that what units give, one after another, is what the whole batch gives."""

import json
import logging

import pandas as pd
import pytest
import torch

pytest.importorskip("ray")

from aarlib.lens import decompose  # noqa: E402
from aarlib.lens import influence as whole_batch  # noqa: E402
from aarlib.moe.loading import load_tokenizer  # noqa: E402
from aarlib.runtime.lens import COLUMNS, InfluenceWorker, padded  # noqa: E402
from aarlib.runtime.lens_config import LensRunConfig  # noqa: E402
from aarlib.runtime.lens_pieces import Piece, blocks_of, draw_pieces, influence_units, with_texts  # noqa: E402
from aarlib.studies.lens_matrices import matrices  # noqa: E402
from tests.runtime.conversations import save_model  # noqa: E402

LEVELS = ("layer", "head", "expert", "neuron")


def piece(number, document, chunk=0):
    return Piece(number, document, chunk, [5, 6])


def test_all_pieces_of_a_document_are_in_one_unit():
    pieces = [piece(n, d) for n, d in enumerate("abcde")] + [piece(5, "a", 1), piece(6, "c", 1), piece(7, "c", 2)]
    blocks = blocks_of(pieces, 4)
    assert [[item.number for item in block] for block in blocks] == [[0, 5, 1], [2, 6, 7, 3], [4]]
    long = [piece(n, "a", n) for n in range(5)] + [piece(5, "b")]
    assert [[item.number for item in block] for block in blocks_of(long, 2)] == [[0, 1], [2, 3], [4], [5]]
    assert blocks_of([piece(n, str(n)) for n in range(64)], 32)[1][0].number == 32
    assert blocks_of([], 4) == []


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lens")
    texts = [f"Number {n}: the old map of the harbour shows {n + 2} ships and a long road." * 2 for n in range(5)]
    rows = [{"text": text} for text in ["b", *texts[:3], "a", *texts[3:]]]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"source": str(folder / "text.jsonl"), "documents": 9, "length": 12}
    return LensRunConfig.from_mapping(
        {"name": "lens", "lens": {"sources": {"text": source}, "documents_per_unit": 4}, "ray": {"storage": "runs"}}
    )


def test_units_share_no_document_and_too_short_ones_are_counted(config, caplog):
    with caplog.at_level(logging.WARNING, logger="aarlib"):
        units = influence_units(config)
    assert "lens.sources.text: 2 documents of fewer than two tokens left out" in caplog.messages
    drawn = draw_pieces(config, "text", load_tokenizer("nano"))
    assert (
        sorted(piece["number"] for unit in units for piece in unit["pieces"])
        == list(range(9))
        == [item.number for item in drawn]
    )
    documents = [{piece["document"] for piece in unit["pieces"]} for unit in units]
    assert len(units) == 3 and sum(map(len, documents)) == len(set.union(*documents)) == 5
    assert any(len(unit["pieces"]) > len({piece["document"] for piece in unit["pieces"]}) for unit in units)


def test_a_whole_unit_of_one_document_has_its_text():
    units = [
        {"id": "text-0000", "source": "text", "pieces": [piece(0, "a")._asdict(), piece(1, "a", 1)._asdict()]},
        {"id": "text-0001", "source": "text", "pieces": [piece(2, "b")._asdict(), piece(3, "c")._asdict()]},
    ]
    frame = pd.DataFrame(
        {"source": "text", "document": [1, None, 3, None], "unit": [unit["id"] for unit in units for _ in range(2)]}
    )
    found = with_texts(frame, units)["text"]
    assert found.tolist()[:3] == ["a", "a", "c"] and found.isna().tolist() == [False] * 3 + [True]


@pytest.fixture(scope="module", params=["olmoe", "gpt_oss"])
def streamed(request, tmp_path_factory):
    """Records of two units of unequal documents, and the model."""
    path = save_model(tmp_path_factory.mktemp("model"), request.param)
    settings = {"name": str(path), "experts_implementation": "eager"}
    worker = InfluenceWorker(settings, None, LEVELS, None, (1,), 0)
    generator = torch.Generator().manual_seed(0)
    pieces = [
        Piece(number, f"doc:{number}", 0, torch.randint(3, 90, (length,), generator=generator).tolist())._asdict()
        for number, length in enumerate((9, 4, 6, 5, 8))
    ]
    units = [
        {"id": "text-0000", "source": "text", "pieces": pieces[:3]},
        {"id": "text-0001", "source": "text", "pieces": pieces[3:]},
    ]
    records = pd.concat([worker(unit).assign(unit=unit["id"]) for unit in units], ignore_index=True)
    return with_texts(records, units), worker.model, padded(pieces, worker.device)


@pytest.mark.parametrize("level", LEVELS)
def test_matrices_of_units_are_those_of_the_whole_batch(streamed, level):
    records, model, batch = streamed
    assert list(records.columns) == list(COLUMNS)
    table = matrices(records, levels=(level,))
    found = decompose(model, *batch, by=level)
    for positions in ("all", "without_first"):
        expected = whole_batch.matrices(found.sums[: 1 if level == "layer" else 2][-1:], positions)
        kept = table[table["positions"] == positions]
        for measure, frame in expected.items():
            part = kept[kept["measure"] == measure].pivot(index="sender", columns="receiver", values="value")
            frame = frame.dropna(how="all").dropna(how="all", axis="columns")
            assert set(part.index) == set(frame.index)
            options = {"check_names": False, "check_dtype": False, "atol": 1e-6, "rtol": 1e-4}
            pd.testing.assert_frame_equal(part.loc[frame.index], frame, **options)
    assert (table["low"] <= table["value"] + 1e-12).all() and (table["value"] <= table["high"] + 1e-12).all()
    assert (table["low"] < table["high"]).mean() > 0.5

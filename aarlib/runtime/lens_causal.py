"""Round two of the lens: experts and attention layers really taken away, a pair of experts together and apart, and IOI.

What is taken away is chosen by its influence on one half of the documents and measured on pieces of the other half.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from aarlib.lens import ioi
from aarlib.lens.ablation import Effect, Expert, Outcome, coexistence, effect, outcome, pair_removals, without_experts
from aarlib.lens.influence import moments
from aarlib.lens.names import parse
from aarlib.lens.scores import expert_scores, read
from aarlib.lens.uses import ce_without_attention
from aarlib.runtime.causal_units import expert_influence, prompt_units, removal_units
from aarlib.runtime.lens import LensWorker, padded, run_round
from aarlib.runtime.lens_config import LensRunConfig
from aarlib.runtime.lens_pieces import choosing_units
from aarlib.runtime.unit_parts import Unit
from aarlib.studies.lens import lens_tables
from aarlib.studies.lens_causal import causal_tables
from aarlib.studies.lens_training import before_and_after

ON_PIECES = ("ablation", "coexistence", "activation", "attention")
CAUSAL_COLUMNS = {
    "record": "ablation, coexistence, activation, attention, ioi_heads, ioi_maps, ioi_pairs",
    "document": "number of the piece, or of the prompt",
    "name": "what was taken away; head; or logit_difference",
    "how": "zero or route_around; alone, lowest or highest",
    "group": "top or bottom: by influence",
    "receiver": "later MoE layer",
    "ce_delta": "change of the piece's mean CE, nats per token",
    "picks_changed": "share of the receiver's picks that the stock model did not make",
    "logits_moved": "root mean square change of the receiver's centred logits",
    "direct": "what the head adds to the logit difference",
    "influence": "variance of the head's scores at the last token, summed over receivers; or over all tokens in influence_all",
    "query": "of ioi_pairs: position in the first prompt",
    "key": "of ioi_pairs: earlier position, or the same",
    "token": "of ioi_pairs: the query's",
    "attention": "of ioi_pairs: the head's weight; beside it influence, the variance of the pair's scores summed over receivers",
    "value": "activation: share of tokens that chose the expert; ioi_maps: rank correlation; logit_difference: itself",
}


def causal(config: LensRunConfig, drawn: list[dict[str, Any]], records: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """CAUSAL_COLUMNS; an empty frame where neither causal_source nor ioi_prompts ask for anything. `drawn`: round one's units."""
    units = [*removal_units(config, drawn, records), *prompt_units(config)]
    return run_round(config, folder / "causal", units, CausalWorker, "causal") if units else pd.DataFrame()


def with_piece_texts(taken: pd.DataFrame, records: pd.DataFrame, source: str | None) -> pd.DataFrame:
    """A column `text` for what was measured on pieces of `source`: the document of the piece, over which intervals resample."""
    if taken.empty or source is None:
        return taken
    rows: Any = records[(records["source"] == source) & records["document"].notna()]
    pieces = rows.drop_duplicates("document")
    texts = taken["document"].map(pieces.set_index("document")["text"])
    return taken.assign(text=texts.where(taken["record"].isin(ON_PIECES)))


def study_tables(
    config: LensRunConfig, drawn: list[dict[str, Any]], records: pd.DataFrame, taken: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Every table of a run; with `before`, also how shares of influence changed against that run."""
    tables = lens_tables(records)
    source = config.lens.causal_source
    variance = None
    if source is not None:
        variance = expert_influence(records, source, choosing_units(drawn, source))["variance"]
    tables |= causal_tables(with_piece_texts(taken, records, source), variance)
    if config.before is not None:
        stored = pd.read_parquet(config.before / "influence.parquet")
        shared = [name for name in config.lens.sources if name in set(stored["source"])]
        frames = [before_and_after(stored, records, name).assign(source=name) for name in shared]
        tables["before_and_after"] = pd.concat(frames, ignore_index=True)
    return tables


class CausalWorker(LensWorker):
    def __call__(self, unit: Unit) -> pd.DataFrame:
        rows = {
            "ablation": self._ablation,
            "coexistence": self._coexistence,
            "attention": self._attention,
            "ioi": self._ioi,
        }[unit["kind"]](unit)
        return pd.DataFrame(rows)

    def _stock(self, unit: Unit) -> tuple[Any, Outcome]:
        batch = padded(unit["pieces"], self.device)
        return batch, outcome(self.model, *batch)

    def _ablation(self, unit: Unit) -> list[dict[str, Any]]:
        batch, stock = self._stock(unit)
        expert = _expert(unit["name"])
        rows = []
        for how in ("zero", "route_around"):
            with without_experts(self.model, [expert], how):
                found = effect(stock, outcome(self.model, *batch), batch.attention_mask)
            rows += _effect_rows(
                found, unit, expert.layer, record="ablation", name=unit["name"], how=how, group=unit["group"]
            )
        return rows

    def _coexistence(self, unit: Unit) -> list[dict[str, Any]]:
        batch = padded(unit["pieces"], self.device)
        first, second = _expert(unit["first"]), _expert(unit["second"])
        found = coexistence(self.model, *batch, first, second)
        rows = self._activation(unit, batch, "stock", [])
        for name, experts in pair_removals(first, second).items():
            rows += _effect_rows(found[name], unit, first.layer, record="coexistence", name=name, how="route_around")
            rows += self._activation(unit, batch, name, experts)
        return rows

    def _activation(self, unit: Unit, batch: Any, name: str, removed: list[Expert]) -> list[dict[str, Any]]:
        """How often the second expert is chosen, and its influence on each later router, without `removed`."""
        second = _expert(unit["second"])
        with without_experts(self.model, removed):
            reading = read(self.model, self.projection, *batch)
        block = next(expert_scores(reading, (second.layer,)), None)
        if block is None:
            return []
        chosen = block.expert_ids == second.expert
        variance = (moments(block.values)[..., 0] * chosen.T[..., None]).sum(0)
        documents, receivers = reading.capture.documents, reading.projection.receivers[block.start :]
        rows = []
        for index, piece in enumerate(unit["pieces"]):
            own = documents == index
            rate, means = float(chosen.any(-1)[own].float().mean()), variance[own].mean(0)
            rows += [
                {
                    "record": "activation",
                    "document": piece["number"],
                    "name": name,
                    "receiver": receiver,
                    "value": rate,
                    "influence": float(value),
                }
                for receiver, value in zip(receivers, means, strict=True)
            ]
        return rows

    def _attention(self, unit: Unit) -> list[dict[str, Any]]:
        batch, stock = self._stock(unit)
        base, order = stock.ce_sums / stock.num_targets, unit["order"]
        drops = [("alone", [layer]) for layer in order]
        for count in range(1, len(order)):
            drops += [("lowest", order[:count]), ("highest", order[-count:])]
        rows = []
        for how, layers in drops:
            delta = ce_without_attention(self.model, *batch, layers=layers) - base
            name = ",".join(map(str, sorted(layers)))
            rows += [
                {"record": "attention", "document": piece["number"], "name": name, "how": how, "ce_delta": value}
                for piece, value in zip(unit["pieces"], delta.tolist(), strict=True)
            ]
        return rows

    def _ioi(self, unit: Unit) -> list[dict[str, Any]]:
        drawn = ioi.draw_prompts(self.tokenizer, unit["of"])[unit["start"] : unit["stop"]]
        prompts = ioi.Prompts(*(tensor.to(self.device) for tensor in ioi.collate(self.tokenizer, drawn)))
        reading = read(self.model, self.projection, prompts.input_ids, prompts.attention_mask, edges=True)
        found = ioi.head_effects(self.model, reading, prompts)
        numbers = range(unit["start"], unit["stop"])
        rows: list[dict[str, Any]] = [
            {
                "record": "ioi_heads",
                "document": number,
                "name": name,
                "direct": float(found.direct[row, column]),
                "influence": float(found.influence[row, column]),
                "influence_all": float(found.influence_all[row, column]),
            }
            for row, number in enumerate(numbers)
            for column, name in enumerate(found.names)
        ]
        differences = ioi.logit_differences(self.model, prompts).tolist()
        rows += [
            {"record": "logit_difference", "document": number, "name": "logit_difference", "value": value}
            for number, value in zip(numbers, differences, strict=True)
        ]
        return rows + self._maps(reading, prompts, found.names, numbers)

    def _maps(self, reading: Any, prompts: ioi.Prompts, names: Sequence[str], numbers: range) -> list[dict[str, Any]]:
        rows = []
        for name in names:
            component = parse(name)
            assert component is not None and component.layer is not None and component.head is not None
            if reading.capture.layers[component.layer].edges is None:
                continue
            maps = ioi.head_map(reading, component.layer, component.head)
            if numbers.start == 0:
                rows += self._map_rows(maps, prompts, name)
            values = ioi.map_correlation(maps, prompts.attention_mask).tolist()
            rows += [
                {"record": "ioi_maps", "document": number, "name": name, "value": value}
                for number, value in zip(numbers, values, strict=True)
            ]
        return rows

    def _map_rows(self, maps: ioi.HeadMap, prompts: ioi.Prompts, name: str) -> list[dict[str, Any]]:
        """Both maps of the first prompt, pair by pair."""
        length = int(prompts.attention_mask[0].sum())
        tokens = [self.tokenizer.decode([token]).strip() for token in prompts.input_ids[0, :length].tolist()]
        attention, variance = (side[0].tolist() for side in maps)
        return [
            {
                "record": "ioi_pairs",
                "document": 0,
                "name": name,
                "query": query,
                "key": key,
                "token": tokens[query],
                "attention": attention[query][key],
                "influence": variance[query][key],
            }
            for query in range(length)
            for key in range(query + 1)
        ]


def _expert(name: str) -> Expert:
    component = parse(name)
    assert component is not None and component.layer is not None and component.expert is not None
    return Expert(component.layer, component.expert)


def _effect_rows(found: Effect, unit: Unit, after: int, **fields: Any) -> list[dict[str, Any]]:
    """One row a piece with its CE, and one a piece and later router."""
    numbers = [piece["number"] for piece in unit["pieces"]]
    rows: list[dict[str, Any]] = [
        {**fields, "document": number, "ce_delta": value}
        for number, value in zip(numbers, found.ce_delta.tolist(), strict=True)
    ]
    for receiver, picks in found.picks_changed.items():
        if receiver > after:
            moved = found.logits_moved[receiver].tolist()
            rows += [
                {**fields, "document": number, "receiver": receiver, "picks_changed": pick, "logits_moved": move}
                for number, pick, move in zip(numbers, picks.tolist(), moved, strict=True)
            ]
    return rows

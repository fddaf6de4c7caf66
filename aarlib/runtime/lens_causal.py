"""Round two of the lens: experts and attention layers really taken away, a pair of experts together and apart, and IOI.

What is taken away is chosen by its influence on one half of the documents and measured on pieces of the other half.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from aarlib.lens.names import parse
from aarlib.runtime.causal_worker import CausalWorker
from aarlib.runtime.lens import run_round
from aarlib.runtime.lens_config import LensRunConfig
from aarlib.runtime.lens_pieces import causal_pieces, choosing_units
from aarlib.studies.lens import lens_tables
from aarlib.studies.lens_causal import causal_tables
from aarlib.studies.lens_training import before_and_after

PROMPTS_PER_UNIT = 64
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


def expert_influence(records: pd.DataFrame, source: str, chosen: set[str]) -> pd.DataFrame:
    """By expert, on the units `chosen`: variance a token summed over receivers, and selection rate."""
    sums = _summed(records, source, chosen, "expert", ["variance", "tokens", "selected"])
    values = sums.assign(variance=sums["variance"] / sums["tokens"], rate=sums["selected"] / sums["tokens"])
    return values.groupby("sender").agg({"variance": "sum", "rate": "first"})


def attention_influence(records: pd.DataFrame, source: str, chosen: set[str]) -> pd.Series:
    """By attention layer, on the units `chosen`: variance a token summed over receivers; ascending."""
    sums = _summed(records, source, chosen, "layer", ["variance", "tokens"])
    sums = sums[sums["sender"].str.startswith("attn.")]
    values: Any = sums.assign(variance=sums["variance"] / sums["tokens"]).groupby("sender")["variance"].sum()
    return values.sort_values()


def _summed(records: pd.DataFrame, source: str, chosen: set[str], level: str, columns: list[str]) -> Any:
    rows: Any = records[(records["record"] == "moments") & (records["level"] == level) & (records["source"] == source)]
    rows = rows[rows["unit"].isin(chosen)]
    return rows.groupby(["sender", "receiver"])[columns].sum().reset_index()


def causal(config: LensRunConfig, drawn: list[dict[str, Any]], records: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """CAUSAL_COLUMNS; an empty frame where neither causal_source nor ioi_prompts ask for anything. `drawn`: round one's units."""
    units = [*_removal_units(config, drawn, records), *_prompt_units(config)]
    return run_round(config, folder / "causal", units, CausalWorker, "causal") if units else pd.DataFrame()


def _removal_units(config: LensRunConfig, drawn: list[dict[str, Any]], records: pd.DataFrame) -> list[dict[str, Any]]:
    source = config.lens.causal_source
    if source is None:
        return []
    pieces, chosen_on = causal_pieces(drawn, source, config.lens.causal_documents), choosing_units(drawn, source)
    ranked: Any = expert_influence(records, source, chosen_on).query("rate > 0")
    ranked = ranked.sort_values("variance", ascending=False)
    count = config.lens.ablated_experts
    chosen = {name: "top" for name in ranked.index[:count]} | {name: "bottom" for name in ranked.index[-count:]}
    units: list[dict[str, Any]] = [
        {"id": f"ablation-{name}", "kind": "ablation", "name": name, "group": group, "pieces": pieces}
        for name, group in chosen.items()
    ]
    first, second = _pair(list(ranked.index))
    units.append({"id": "coexistence", "kind": "coexistence", "first": first, "second": second, "pieces": pieces})
    order = [int(str(name).removeprefix("attn.")) for name in attention_influence(records, source, chosen_on).index]
    units.append({"id": "attention", "kind": "attention", "order": order, "pieces": pieces})
    return units


def _pair(ranked: Sequence[str]) -> tuple[str, str]:
    """The most influential expert, and the most influential one of another layer, the earlier layer first."""
    layers = {name: parse(name).layer for name in ranked}  # pyright: ignore[reportOptionalMemberAccess]
    other = next(name for name in ranked if layers[name] != layers[ranked[0]])
    first, second = sorted((ranked[0], other), key=lambda name: layers[name] or 0)
    return first, second


def _prompt_units(config: LensRunConfig) -> list[dict[str, Any]]:
    starts = range(0, config.lens.ioi_prompts, PROMPTS_PER_UNIT)
    count = config.lens.ioi_prompts
    return [
        {
            "id": f"ioi-{start:05d}",
            "kind": "ioi",
            "start": start,
            "stop": min(start + PROMPTS_PER_UNIT, count),
            "of": count,
        }
        for start in starts
    ]


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

"""What is taken away in round two of the lens, and where it is measured: units of removals and of IOI prompts."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from aarlib.lens.names import parse
from aarlib.runtime.lens_config import LensRunConfig
from aarlib.runtime.lens_pieces import causal_pieces, choosing_units

PROMPTS_PER_UNIT = 64


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


def removal_units(config: LensRunConfig, drawn: list[dict[str, Any]], records: pd.DataFrame) -> list[dict[str, Any]]:
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


def prompt_units(config: LensRunConfig) -> list[dict[str, Any]]:
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

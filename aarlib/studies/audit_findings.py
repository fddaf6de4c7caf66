"""The paper's findings beside ours: a verdict for each domain, by a rule fixed beforehand on the interval alone."""

from typing import Any, NamedTuple

import pandas as pd

from aarlib.studies.intervals import distinct, select


class Finding(NamedTuple):
    claim: str
    paper: str
    """On OLMoE-1B-7B-0924, another model."""
    measure: str
    bound: float
    """Holds where the whole interval is below (or above) it, fails where the whole interval is on the other side."""
    below: bool
    relative_to_chance: bool = False
    """`bound` is in units of 1 / K."""


FINDINGS = (
    Finding("a vertex gives most of the structured gain", "92.6%", "vertex_share", 0.5, below=False),
    Finding("the fixed action of development raises CE", "+0.0012", "fixed_action", 0.0, below=False),
    Finding("router top-1 is the best vertex hardly above chance", "17.2% of 12.5%", "router_top1_is_best", 1.5, True, True),
    Finding("its weights do not order the vertices", "0.030", "router_spearman", 0.1, below=True),
    Finding("committing to the router's top-1 harms", "+0.0041 (DeepSeek-V2-Lite)", "router_top1_vertex", 0.0, below=False),
    Finding("the gradient orders the vertices", "0.595", "gradient_spearman", 0.3, below=False),
    Finding("the gradient's vertex lowers CE", "-0.0107", "gradient_best_vertex", 0.0, below=True),
    Finding("so does the conservative policy", "-0.0091", "conservative", 0.0, below=True),
    Finding("a reranker does not generalise", "0.036", "reranker_spearman", 0.1, below=True),
    Finding("nor does predicting the credit subspace", "0.089", "credit_subspace_spearman", 0.1, below=True),
    Finding("nor does seeing the suffix", "0.008", "leaked_spearman", 0.1, below=True),
)  # fmt: skip


class Verdicts(NamedTuple):
    header: list[str]
    rows: list[list[str]]


def verdicts(measures: pd.DataFrame, top_k: int) -> Verdicts:
    """Claim, paper, rule, then for each domain `holds`, `fails` or `open` with the interval; of pooled rows of one horizon."""
    domains = distinct(measures, "domain")
    rows = []
    for finding in FINDINGS:
        found = {domain: select(measures, domain=domain, measure=finding.measure) for domain in domains}
        if all(len(row) == 1 for row in found.values()):
            cells = [_verdict(finding, found[domain].iloc[0], top_k) for domain in domains]
            rows.append([finding.claim, finding.paper, _rule(finding), *cells])
    return Verdicts(["finding", "paper", "holds where the interval is", *domains], rows)


def _rule(finding: Finding) -> str:
    side = "below" if finding.below else "above"
    if finding.relative_to_chance:
        return f"{side} {finding.bound:g} / K"
    return f"{side} {finding.bound:g}"


def _verdict(finding: Finding, row: Any, top_k: int) -> str:
    if pd.isna(row["value"]):
        return "open (none)"
    bound = finding.bound / top_k if finding.relative_to_chance else finding.bound
    under, over = row["high"] < bound, row["low"] > bound
    holds, fails = (under, over) if finding.below else (over, under)
    word = "holds" if holds else "fails" if fails else "open"
    return f"{word} ({row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}])"

import hashlib
import json

import numpy as np
import pandas as pd
import pytest

from aarlib.studies.fdaa import compare, control_table, domain_table, layer_table, results, strongest_fixed, window_ce
from aarlib.studies.fdaa_page import tables

EFFECTS = {"native": 0.0, "uniform": 0.3, "temperature_0.5": 0.2, "temperature_2.0": -0.1, "static": -0.05}


def records(layers=("7",), seed=0) -> pd.DataFrame:
    """Windows of 10 targets; the head gains 0.5 + 0.01 seed per token, permuted scores lose 0.1."""
    generator = np.random.default_rng(seed)
    rows = []
    for split, count in (("development", 8), ("test", 30)):
        for window in range(count):
            native = 3 + generator.normal()
            for place in layers:
                noise = generator.normal() * 0.01
                for arm, effect in EFFECTS.items():
                    effect = effect if split == "test" or arm != "uniform" else -0.4
                    rows.append((place, arm, 0, f"{split}{window}", split, 10 * (native + effect)))
                for number in (0, 1, 2):
                    for arm, effect in (("fdaa", -0.5 - 0.01 * number + noise), ("permuted", 0.1), ("no_outputs", -0.1),
                                        ("no_hidden", 0.0), ("router_and_id", 0.01)):  # fmt: skip
                        rows.append((place, arm, number, f"{split}{window}", split, 10 * (native + effect)))
    frame = pd.DataFrame(rows, columns=["layers", "arm", "seed", "window", "split", "ce_sum"])
    return frame.assign(run="trained", domain="text", num_targets=10)


def test_the_head_is_compared_by_window_and_seed():
    row = domain_table(records()).iloc[0]
    assert row["vs_native/mean"] == pytest.approx(-0.51, abs=0.01)
    assert np.diff(row["vs_native/seeds"]) == pytest.approx([-0.01, -0.01], abs=1e-9)
    assert row["vs_native/seed_std"] == pytest.approx(0.01, abs=1e-9)
    assert row["vs_native/win"] == 1.0 and row["vs_native/num_windows"] == 30
    assert row["vs_native/low"] < row["vs_native/mean"] < row["vs_native/high"] < -0.5
    assert row["vs_permuted/mean"] == pytest.approx(row["vs_native/mean"] - 0.1)


def test_the_strongest_control_is_chosen_on_development_not_on_test():
    row = domain_table(records()).iloc[0]
    assert row["strongest_fixed"] == "uniform"
    assert row["vs_strongest/mean"] == pytest.approx(row["vs_native/mean"] - 0.3)
    ce = window_ce(records())
    assert strongest_fixed(ce.xs("test", level="split")) == "temperature_2.0"


def test_layers_are_shown_alone_pooled_and_together():
    frame = layer_table(records(("3", "7", "all")))
    assert frame["layers"].tolist() == ["3", "7", "pooled", "all"]
    pooled = frame.set_index("layers").loc["pooled"]
    assert pooled["vs_native/num_windows"] == 30
    singles = frame[frame["layers"].isin(["3", "7"])]
    assert pooled["vs_native/mean"] == pytest.approx(singles["vs_native/mean"].mean())
    assert layer_table(records()).empty


def test_unpaired_windows_are_refused():
    broken = records()
    broken.loc[broken.index[0], "num_targets"] = 9
    with pytest.raises(ValueError, match="has different target counts between arms"):
        window_ce(broken)
    missing = records().iloc[1:]
    with pytest.raises(ValueError, match="not finite"):
        compare(window_ce(missing).xs("development", level="split"), "fdaa", "native")


@pytest.mark.parametrize("table", [domain_table, control_table, layer_table])
@pytest.mark.parametrize("arm", ["fdaa", "native"])
def test_a_seed_that_lacks_one_window_does_not_leave_the_mean_in_silence(table, arm):
    whole = records(("3", "7", "all"))
    one = (whole["arm"] == arm) & (whole["split"] == "test") & (whole["seed"] == (1 if arm == "fdaa" else 0))
    assert not table(whole).empty
    with pytest.raises(ValueError, match=rf"{arm}, seed \d, is not finite or missing at .*test"):
        table(whole.drop(whole.index[one][0]))


def test_an_arm_that_a_run_never_had_is_left_out_of_that_run_alone():
    second = records(seed=1).assign(run="second")
    frame = domain_table(pd.concat([records(), second[second["arm"] != "static"]])).set_index("run")
    assert frame["vs_static/mean"].notna().to_dict() == {"trained": True, "second": False}


def test_seeds_are_compared_with_their_own_or_with_the_only_one():
    whole = records()
    lacking = whole[~((whole["arm"] == "permuted") & (whole["seed"] == 2))]
    ce = window_ce(lacking).xs("test", level="split")
    with pytest.raises(ValueError, match=r"seed 2 has no counterpart among seeds \[0, 1\]"):
        compare(ce, "fdaa", "permuted")
    only = lacking[~((lacking["arm"] == "permuted") & (lacking["seed"] == 0))]
    found = compare(window_ce(only).xs("test", level="split"), "fdaa", "permuted")
    assert len(found.seeds) == 3 and found.seeds == pytest.approx([-0.6, -0.61, -0.62], abs=0.01)


def test_results_are_json_and_become_markdown():
    one = tables(json.loads(json.dumps(results(records()), allow_nan=False)))
    assert set(one) == {"domains", "masks"}
    windows = {row["split"]: row for row in results(records())["windows"]}
    assert (windows["development"]["windows"], windows["test"]["windows"]) == (8, 30)
    ids = "\n".join(sorted(f"development{i}" for i in range(8)))
    assert windows["development"]["sha256"] == hashlib.sha256(ids.encode()).hexdigest()
    assert one["domains"].count("\n") == 2 and "(uniform)" in one["domains"]
    several = tables(json.loads(json.dumps(results(records(("3", "7", "all"))), allow_nan=False)))
    assert set(several) == {"masks", "layers"}
    assert "| trained, layers all | text |" in several["masks"]
    assert "| trained | text | pooled | -0.5" in several["layers"] and several["layers"].count("-0.4") >= 4

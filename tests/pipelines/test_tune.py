"""pipelines.tune up to the point where Ray would start."""

import pytest

pytest.importorskip("ray")

from pipelines import tune  # noqa: E402

SMOKE = "pipelines/configs/nano_smoke.toml"


def test_dry_run_checks_the_study_against_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([SMOKE, "--space", "aar_window_layers", "--dry-run"]) == 0
    assert "method.aar.window: {'grid_search': [8, 32]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SMOKE, "--space", "nonsense"], "--space 'nonsense' is no file of tune_spaces; there are: aar_layers, "),
        (
            [SMOKE, "--space", "aar_window_layers", '--method={router_sft = {name = "router_sft"}}'],
            "the study varies method ['aar'], which the config has not; it has ['router_sft']",
        ),
        ([SMOKE, "--space", "aar_window_layers", "--data.train=['nowhere.jsonl']"], "'nowhere.jsonl' names no"),
        (
            [SMOKE, "--space", "aar_window_layers", "--data.sequence_length=16", "--method.aar.window=8", "--dry-run"],
            "the study 'aar_window_layers' with method.aar.window = 32: ",
        ),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert tune.main(arguments) == 2
    assert message in capsys.readouterr().err

"""Scores in a real MLflow store: each beside the training it belongs to, the untouched model's under the same parent."""

import pandas as pd
from mlflow.tracking import MlflowClient

from aarlib.runtime import tracking
from aarlib.runtime.evaluation import track
from aarlib.runtime.mlflow_store import FINISHED
from aarlib.runtime.run_directory import claim
from aarlib.training.config import RunConfig


def scores(*rows) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["adapter", "task", "metric", "filter", "value"])


def test_scores_join_the_run_of_their_training(tmp_path):
    config = RunConfig.from_mapping(
        {
            "name": "tracked",
            "data": {"train": ["unused"]},
            "method": {"router_sft": {"name": "router_sft"}, "aar": {"name": "aar", "layers": [1]}},
            "ray": {"storage": str(tmp_path)},
        }
    )
    folder = claim(config)
    started = tracking.start(config, folder)
    tracking.finish(started, FINISHED, dict.fromkeys(started.children, FINISHED))
    problems = track(
        config,
        scores(
            ("untouched", "quiz", "acc", "none", 0.25),
            ("aar-seed0", "quiz", "acc", "none", 0.5),
            ("aar-seed0", "sums", "exact_match", "answer", 0.75),
        ),
    )
    again = track(config, scores(("untouched", "quiz", "acc", "none", 0.375)))
    assert problems == again == []
    client = MlflowClient(tracking_uri=started.uri)
    aar = client.get_run(started.children["aar-seed0"])
    assert aar.data.metrics == {"eval/quiz/acc": 0.5, "eval/sums/exact_match.answer": 0.75}
    runs = client.search_runs([started.experiment_id])
    assert len(runs) == 1 + 2 + 1
    (untouched,) = [run for run in runs if run.info.run_name == "tracked/untouched"]
    assert untouched.data.tags["mlflow.parentRunId"] == started.parent
    assert untouched.data.metrics == {"eval/quiz/acc": 0.375}
    assert all(run.info.status == "FINISHED" for run in runs)

    (folder / "aar-seed0").mkdir()
    (folder / "aar-seed0" / "result.json").write_text("{}")
    resumed = tracking.start(config, folder)
    assert list(resumed.children) == ["router_sft-seed0"], "what is finished needs no run of its own"
    assert not track(config, scores(("aar-seed0", "quiz", "acc", "none", 0.625)))
    assert client.get_run(started.children["aar-seed0"]).data.metrics["eval/quiz/acc"] == 0.625

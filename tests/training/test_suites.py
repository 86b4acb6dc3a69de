"""Suites during training: the official number after evaluations, and a result of the exported weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.suite_scores import SuiteResult
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model

Build = Callable[..., TrainConfig]


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {"id": n, "prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n}"} for n in range(9)
    ]
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (tmp_path / "mine.yaml").write_text(
        "source: ours\nsets: {help: {}}\nscore: overall\naverage: {overall: {pool: [help]}}\n"
    )
    return found


def test_a_run_logs_suites_and_scores_the_exported_weights(small_config: Build, tmp_path: Path, rows):
    suites = f"training.suites={{{tmp_path}/mine.yaml: {tmp_path}/suite.jsonl}}"
    result = train_reward_model(small_config(tmp_path / "run", suites, "training.suites_every=2"))
    logged = {row["step"]: row["suite_mine"] for row in read_rows(tmp_path / "run/metrics.csv") if row["eval_acc"]}
    evaluated = [*logged]
    assert [step for step, value in logged.items() if value] == evaluated[::2]
    stored = SuiteResult.from_json((tmp_path / "run/suites/mine/suite.json").read_text())
    model = BradleyTerryRM.from_pretrained(result.export)
    right = [
        float(model.score(row["prompt"], row["chosen"])) > float(model.score(row["prompt"], row["rejected"]))
        for row in rows
    ]
    (own,) = (each for each in stored.models if each.is_model)
    assert own.scores["overall"].value == pytest.approx(sum(right) / len(rows))
    assert own.trained_on is not None
    if logged.get(str(result.best_step)):
        assert float(logged[str(result.best_step)]) == pytest.approx(own.scores["overall"].value)


def test_suites_take_a_tenth_of_the_work_unless_it_is_set(small_config: Build, tmp_path: Path, rows):
    more = [row | {"prompt": f"{row['prompt']} {k}"} for k in range(60) for row in rows]
    (tmp_path / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    config = small_config(tmp_path / "run", f"training.suites={{{tmp_path}/mine.yaml: {tmp_path}/suite.jsonl}}")
    train_reward_model(config)
    assert not [row for row in read_rows(tmp_path / "run/metrics.csv") if row["suite_mine"]]
    assert (tmp_path / "run/suites/mine/suite.json").is_file()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("training.suites=rewardbnch", "did you mean 'rewardbench'"),
        ("training.suites={rmbench: 3}", "training.suites must be names, or name a file for each set, got 3"),
        ("training.suites=[hhh]", "hhh"),
        ("training.suites_every=2", "training.suites"),
    ],
)
def test_a_suite_that_cannot_be_read_is_refused_before_a_step(small_config: Build, tmp_path: Path, option, says):
    with pytest.raises(Exception, match=says) as raised:
        train_reward_model(small_config(tmp_path / "run", option))
    assert isinstance(raised.value, ConfigError) or "hhh" in says

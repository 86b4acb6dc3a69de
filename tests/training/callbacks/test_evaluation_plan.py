"""Evaluations take a fifth of the work of training, unless the user sets their number."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.callbacks.evaluation_plan import EvaluationPlan, Work, plan_evaluations


def planned(train: int, val: int, *, steps: int = 100, per_epoch: int | None = None, final: float = 1.0, **work: float):
    evaluation = float(val)
    return plan_evaluations(
        Work(steps=work.get("cost", 3.0) * train, evaluation=evaluation, final=final * evaluation),
        num_steps=steps,
        steps_per_epoch=steps,
        num_pairs=val,
        per_epoch=per_epoch,
        at_start=True,
    )


def evaluated_steps(plan: EvaluationPlan, steps: int) -> int:
    return 1 + len({*range(plan.every, steps + 1, plan.every), steps})


def test_a_small_validation_set_is_evaluated_ten_times_an_epoch():
    assert planned(10000, 400).every == 10


def test_a_tenth_of_the_pairs_is_evaluated_as_often_as_a_fifth_of_the_work_allows():
    plan = planned(18000, 2000)
    assert (plan.count, plan.pairs) == (5, 1760)
    plan = planned(36000, 2000)
    assert (plan.pairs, plan.share) == (2000, pytest.approx(0.2, abs=0.02))


def test_the_user_s_number_wins():
    plan = planned(15320, 2518, per_epoch=10)
    assert (plan.every, plan.pairs) == (10, 2518)
    assert plan.share > 0.5


@given(
    train=st.integers(2, 10**6),
    val=st.integers(1, 10**6),
    steps=st.integers(1, 10**4),
    final=st.sampled_from([1.0, 2.0, 8.0]),
)
def test_no_default_takes_more_than_a_fifth_but_the_evaluations_that_every_run_needs(
    train: int, val: int, steps: int, final: float
):
    plan = planned(train, val, steps=steps, final=final)
    assert plan.count == evaluated_steps(plan, steps)
    fewest = (2 * min(val, 256) + final * val) / (3 * train)
    assert plan.share <= max(0.2, fewest) + 1e-9


def test_the_sample_is_fixed_and_of_the_size_planned():
    plan = planned(18000, 6000)
    sample = plan.positions(3)
    assert sample is not None
    assert len(set(sample.tolist())) == plan.pairs < 6000
    assert (sample == plan.positions(3)).all()


def test_a_run_says_and_stores_its_plan_and_ends_with_all_pairs(
    small_config: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("rm_optimizer.training.callbacks.evaluation_plan.FEWEST_PAIRS", 5)
    config = small_config(tmp_path, "training.evals_per_epoch=null", "hardware.precision=bf16-mixed")
    with caplog.at_level(logging.INFO, "rm_optimizer"):
        result = train_reward_model(config)
    assert "evaluations of a fixed sample of 5 of 33 validation pairs in bf16, every" in caplog.text
    assert "since validation is large relative to training" in caplog.text
    assert {row["eval_pairs"] for row in read_rows(tmp_path / "metrics.csv") if row["eval_pairs"]} == {"5"}
    assert result.metrics.num_pairs == 33
    stored = json.loads((tmp_path / "run.json").read_text())["evaluations"]
    assert (stored["pairs"], stored["all_pairs"]) == (5, 33)
    assert stored["seconds"] > 0


def test_a_number_of_the_user_s_that_takes_more_is_warned_about(
    small_config: Callable[..., TrainConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    train_reward_model(small_config(tmp_path, "training.max_steps=2"))
    assert "leave out training.evals_per_epoch for at most a fifth" in caplog.text

"""Pages of studies: each kind is told by its task, and says what is missing or damaged."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.readiness.predictors import ChosenFit, FrozenChoice, Term
from rm_optimizer.experiments.readiness.validation import (
    EIGHTFOLD,
    JUDGED,
    MATCHED,
    SCORE,
    LabelPoint,
    PredictorTau,
    TauDifference,
    Validation,
)
from rm_optimizer.experiments.study.plan import FROZEN_FILE, StudyKind, StudyPlan, planned_trial, publish, study_kind
from rm_optimizer.interfaces.cli import app
from rm_optimizer.reporting.pages.folder_page import write_page

TASKS = {
    StudyKind.optimizers: "rm_optimizer.experiments.optimizer_comparison.arm_trial",
    StudyKind.readiness: "rm_optimizer.experiments.readiness.trials",
}


def planned(folder: Path, kind: StudyKind) -> StudyPlan:
    """A study of a kind whose one trial has not begun."""
    return publish(folder, import_module(TASKS[kind]).TASK, [planned_trial("one", {"number": 1})])


def interval(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, 0.1, 40, low, high)


@pytest.fixture
def readiness(tmp_path: Path) -> Path:
    planned(tmp_path, StudyKind.readiness)
    fit = ChosenFit((Term("probe_64", "probe_64@256"),), 0.1, {"probe 64, ridge 0.1": 0.71})
    choice = FrozenChoice({"rloo_kl": fit, "bon": fit}, (0, 1, 2), "code", 48, 200)
    (tmp_path / "frozen.json").write_text(choice.to_json())
    return tmp_path


def validation(gain: float) -> Validation:
    names = (SCORE, MATCHED, EIGHTFOLD)
    taus = [PredictorTau(name, out, interval(0.6, 0.5, 0.7), (0.6,), 0.1, 0.8) for name in names for out in JUDGED]
    over = interval(gain, gain - 0.1, gain + 0.1)
    gains = [TauDifference(out, name, over, over) for out in JUDGED for name in names[1:]]
    return Validation(
        (3, 4), 96, tuple(taus), tuple(gains), (LabelPoint(256, 0.6, 0.6, 0.4),), {}, (0.5, 0.4), {"seeds": over}
    )


@pytest.mark.parametrize("kind", list(StudyKind))
def test_a_study_is_told_by_its_task(tmp_path: Path, kind: StudyKind):
    assert planned(tmp_path, kind).kind is kind
    assert replace(planned(tmp_path, kind), task="mine.optimizer_comparison.arm_trial:measure").kind is None


def test_a_comparison_killed_before_its_plan_is_told_by_its_setting(tmp_path: Path):
    assert study_kind(tmp_path) is None
    (tmp_path / FROZEN_FILE).write_text("{}")
    assert study_kind(tmp_path) is StudyKind.optimizers
    planned(tmp_path, StudyKind.readiness)
    assert study_kind(tmp_path) is StudyKind.readiness


def test_a_readiness_study_without_a_test_says_so(readiness: Path):
    text = write_page(readiness).read_text()
    assert "Not tested" in text
    assert "frozen for rloo_kl: probe_64@256, ridge 0.1" in text


@pytest.mark.parametrize(("gain", "said"), [(0.2, "better than accuracy"), (0.05, "not shown to rank better")])
def test_the_test_of_readiness_is_told_by_its_interval(readiness: Path, gain: float, said: str):
    (readiness / "validation.json").write_text(validation(gain).to_json())
    page = write_page(readiness)
    assert said in page.read_text()
    assert {"validation.png", "taus.csv", "differences.csv"} <= {each.name for each in page.parent.iterdir()}


@pytest.mark.parametrize("name", ["frozen.json", "validation.json"])
def test_a_torn_result_of_readiness_is_one_sentence(readiness: Path, name: str):
    (readiness / name).write_text('{"worlds": [')
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        write_page(readiness)


def test_the_command_takes_each_kind_and_names_them_where_there_is_no_page(readiness: Path, tmp_path: Path):
    done = CliRunner().invoke(app, ["report", str(readiness)])
    assert (done.exit_code, (readiness / "report" / "index.html").is_file()) == (0, True), done.output
    other = tmp_path / "other"
    publish(other, "rm_optimizer.experiments.study.tasks:train", [planned_trial("one", {"number": 1})])
    done = CliRunner().invoke(app, ["report", str(other)])
    assert done.exit_code == 2
    assert "study without a page" in done.stderr
    assert "rm-opt study readiness" in done.stderr
    done = CliRunner().invoke(app, ["report", str(readiness), "--format", "md"])
    assert (done.exit_code, done.stdout.startswith("# Validation of the readiness score")) == (0, True), done.output

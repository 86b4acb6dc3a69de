"""Pages of studies: each kind is told by its task, and says what is missing or damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.data_efficiency.cleaning.cleaning_study import CleaningRow
from rm_optimizer.data_efficiency.savings.label_savings import LabelSaving, LabelSavings
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
from rm_optimizer.reporting.label_studies.cleaning import CLEANING_FILE, write_cleaning
from rm_optimizer.reporting.label_studies.label_savings import SAVINGS_FILE
from rm_optimizer.reporting.pages.label_study_page import write_cleaning_page, write_savings_page
from rm_optimizer.reporting.pages.readiness_study_page import write_readiness_study_page
from tests.browser import NEEDS_BROWSER, assert_sound

TASKS = {
    StudyKind.optimizers: "rm_optimizer.experiments.optimizer_comparison.arm_trial",
    StudyKind.readiness: "rm_optimizer.experiments.readiness.trials",
    StudyKind.labels: "rm_optimizer.data_efficiency.savings.label_study",
    StudyKind.cleaning: "rm_optimizer.data_efficiency.cleaning.cleaning_study",
    StudyKind.training: "rm_optimizer.experiments.training_trial",
}


def planned(folder: Path, kind: StudyKind) -> StudyPlan:
    """A study of a kind whose one trial has not begun."""
    return publish(folder, import_module(TASKS[kind]).TASK, [planned_trial("one", {"number": 1})])


def interval(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, 0.1, 40, low, high)


@pytest.fixture
def savings(tmp_path: Path) -> Path:
    planned(tmp_path, StudyKind.labels)
    gain = interval(0.01, 0.005, 0.015)
    rules = (
        LabelSaving("d_optimal", interval(0.4, 0.3, 0.5), gain, gain),
        LabelSaving("random_again", interval(0.02, -0.03, 0.06), gain, gain),
    )
    pool = LabelSavings("a<b>", 512, 40, rules, is_accepted=True)
    pools = [pool, replace(pool, pool="refuted", is_accepted=False)]
    (tmp_path / SAVINGS_FILE).write_text("[" + ",".join(each.to_json() for each in pools) + "]")
    return tmp_path


@pytest.fixture
def cleaning(tmp_path: Path) -> Path:
    planned(tmp_path, StudyKind.cleaning)
    some = interval(0.1, 0.05, 0.15)
    row = CleaningRow("decided", 0.2, 1000, 60, some, some, some, some, some, interval(0.018, 0.016, 0.02), some)
    write_cleaning([row], tmp_path)
    return tmp_path


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
def test_a_study_is_told_by_its_task(tmp_path: Path, kind: StudyKind) -> None:
    assert planned(tmp_path, kind).kind is kind
    assert replace(planned(tmp_path, kind), task="mine.training_trial:measure").kind is None


def test_a_comparison_killed_before_its_plan_is_told_by_its_setting(tmp_path: Path) -> None:
    assert study_kind(tmp_path) is None
    (tmp_path / FROZEN_FILE).write_text("{}")
    assert study_kind(tmp_path) is StudyKind.optimizers
    planned(tmp_path, StudyKind.readiness)
    assert study_kind(tmp_path) is StudyKind.readiness


def test_savings_show_every_rule_and_the_pool_that_its_placebo_refutes(savings: Path) -> None:
    page = write_savings_page(savings)
    text = page.read_text()
    assert "a&lt;b&gt;: d_optimal saves 40% [30%, 50%] of 512 labels" in text
    assert "the placebo refutes what is measured in refuted" in text.lower()
    assert "Not accepted: in &#x27;refuted&#x27;" in text
    assert {"savings_0.png", "savings_0.svg", "savings_0.csv", "rules_1.csv"} <= {
        each.name for each in page.parent.iterdir()
    }
    assert write_savings_page(savings, savings / "again").read_bytes() == page.read_bytes()


def test_cleaning_says_where_it_helps(cleaning: Path) -> None:
    text = write_cleaning_page(cleaning).read_text()
    assert "Training without suspects helps here" in text
    assert "+1.80 [+1.60, +2.00]" in text


def test_a_readiness_study_without_a_test_says_so(readiness: Path) -> None:
    text = write_readiness_study_page(readiness).read_text()
    assert "Not tested" in text
    assert "frozen for rloo_kl: probe_64@256, ridge 0.1" in text


@pytest.mark.parametrize(("gain", "said"), [(0.2, "better than accuracy"), (0.05, "not shown to rank better")])
def test_the_test_of_readiness_is_told_by_its_interval(readiness: Path, gain: float, said: str) -> None:
    (readiness / "validation.json").write_text(validation(gain).to_json())
    page = write_readiness_study_page(readiness)
    assert said in page.read_text()
    assert {"validation.png", "taus.csv", "differences.csv"} <= {each.name for each in page.parent.iterdir()}


@pytest.mark.parametrize(
    ("kind", "file", "write"),
    [
        (StudyKind.labels, SAVINGS_FILE, write_savings_page),
        (StudyKind.cleaning, CLEANING_FILE, write_cleaning_page),
    ],
)
def test_a_study_without_a_result_or_a_torn_one_is_one_sentence(
    tmp_path: Path, kind: StudyKind, file: str, write: Callable[[Path], Path]
) -> None:
    planned(tmp_path, kind)
    with pytest.raises(ConfigError, match=r"has no result yet; rm-opt study .* goes on"):
        write(tmp_path)
    for torn in ("", "[{", '[{"pool": 3}]', "7"):
        (tmp_path / file).write_text(torn)
        with pytest.raises(ConfigError, match=f"{file} is damaged"):
            write(tmp_path)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("name", ["frozen.json", "validation.json"])
def test_a_torn_result_of_readiness_is_one_sentence(readiness: Path, name: str) -> None:
    (readiness / name).write_text('{"worlds": [')
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        write_readiness_study_page(readiness)


def test_the_command_takes_each_kind_and_names_them_where_there_is_no_page(readiness: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(readiness)])
    assert (done.exit_code, (readiness / "report" / "index.html").is_file()) == (0, True), done.output
    other = tmp_path / "other"
    planned(other, StudyKind.training)
    done = CliRunner().invoke(app, ["report", str(other)])
    assert done.exit_code == 2
    assert "study without a page" in done.stderr
    assert "rm-opt study readiness, labels and cleaning" in done.stderr
    done = CliRunner().invoke(app, ["report", str(readiness), "--format", "md"])
    assert done.exit_code == 2
    assert "--format md is of a run" in done.stderr


@NEEDS_BROWSER
def test_the_page_of_savings_fits_each_screen_and_loads_nothing(savings: Path) -> None:
    assert_sound(write_savings_page(savings))

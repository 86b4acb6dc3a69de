"""Pages of studies: each kind is told by its task, and says what is missing or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.data_efficiency.cleaning.cleaning_study import CleaningRow
from rm_optimizer.data_efficiency.savings.label_savings import LabelSaving, LabelSavings
from rm_optimizer.data_efficiency.savings.label_study import PLACEBO
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
from rm_optimizer.reporting.pages.document import Document
from rm_optimizer.reporting.pages.folder_page import write_page
from rm_optimizer.reporting.pages.label_study_page import cleaning_document, saved_answer, savings_document
from tests.browser import NEEDS_AXE, NEEDS_BROWSER, assert_accessible, assert_sound

TASKS = {
    StudyKind.optimizers: "rm_optimizer.experiments.optimizer_comparison.arm_trial",
    StudyKind.readiness: "rm_optimizer.experiments.readiness.trials",
    StudyKind.labels: "rm_optimizer.data_efficiency.savings.label_study",
    StudyKind.cleaning: "rm_optimizer.data_efficiency.cleaning.cleaning_study",
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
        LabelSaving(PLACEBO, interval(0.02, -0.03, 0.06), gain, gain),
    )
    pool = LabelSavings("a<b>", 512, 40, rules, is_accepted=True)
    pools = [pool, replace(pool, pool="refuted", is_accepted=False)]
    (tmp_path / SAVINGS_FILE).write_text("[" + ",".join(each.to_json() for each in pools) + "]")
    return tmp_path


SOME = interval(0.1, 0.05, 0.15)
CLEANED = CleaningRow("decided", 0.2, 1000, 60, SOME, SOME, SOME, SOME, SOME, interval(0.018, 0.016, 0.02), SOME)


@pytest.fixture
def cleaning(tmp_path: Path) -> Path:
    planned(tmp_path, StudyKind.cleaning)
    write_cleaning([CLEANED], tmp_path)
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
def test_a_study_is_told_by_its_task(tmp_path: Path, kind: StudyKind):
    assert planned(tmp_path, kind).kind is kind
    assert replace(planned(tmp_path, kind), task="mine.optimizer_comparison.arm_trial:measure").kind is None


def test_a_comparison_killed_before_its_plan_is_told_by_its_setting(tmp_path: Path):
    assert study_kind(tmp_path) is None
    (tmp_path / FROZEN_FILE).write_text("{}")
    assert study_kind(tmp_path) is StudyKind.optimizers
    planned(tmp_path, StudyKind.readiness)
    assert study_kind(tmp_path) is StudyKind.readiness


def test_savings_show_every_rule_and_the_pool_that_its_placebo_refutes(savings: Path):
    page = write_page(savings)
    text = page.read_text()
    assert "Choosing pairs saves labels in 1 of 2 pools" in text
    assert "In &#x27;a&lt;b&gt;&#x27; d_optimal saves labels: 40% [30%, 50%] of 512." in text
    assert "The placebo refutes what is measured in &#x27;refuted&#x27;." in text
    assert "Not accepted: in &#x27;refuted&#x27;" in text
    assert {"savings_0.png", "savings_0.svg", "savings_0.csv", "rules_1.csv"} <= {
        each.name for each in page.parent.iterdir()
    }
    assert write_page(savings, savings / "again").read_bytes() == page.read_bytes()


@pytest.mark.parametrize(("splits", "tone"), [(40, "fair"), (100, "good")])
def test_few_splits_are_said(splits: int, tone: str):
    gain = interval(0.3, 0.2, 0.4)
    rules = (LabelSaving("badge", gain, gain, gain), LabelSaving(PLACEBO, interval(0.0, -0.1, 0.1), gain, gain))
    answer = saved_answer([LabelSavings("iid", 512, splits, rules, is_accepted=True)])
    assert (answer.tone, any("40 splits are few" in line for line in answer.sentences)) == (tone, splits == 40)


def test_a_rule_whose_interval_holds_0_saves_nothing():
    gain = interval(0.0, -0.1, 0.1)
    rules = (LabelSaving("badge", interval(0.2, -0.1, 0.4), gain, gain), LabelSaving(PLACEBO, gain, gain, gain))
    said = saved_answer([LabelSavings("iid", 512, 40, rules, is_accepted=True)])
    assert (said.tone, said.headline) == ("bad", "No saving is shown")
    assert said.sentences[0] == "in 'iid' badge is not shown to save labels: 20% [-10%, 40%] of 512"


@pytest.mark.parametrize(
    ("gains", "tone", "headline"),
    [
        ((0.018, 0.0), "good", "Training without suspects helps"),
        ((0.018, 0.0, 0.0003), "fair", "Training without suspects helps in 1 of 3 rows"),
        ((0.0, 0.0), "open", "No gain is shown"),
        ((0.018, -0.01), "bad", "Training without suspects costs accuracy"),
    ],
)
def test_cleaning_says_where_it_helps(cleaning: Path, gains: tuple[float, ...], tone: str, headline: str):
    """The second row has no turned labels, so that there is nothing to gain."""
    rows = [
        replace(CLEANED, flips=0.2 * (number != 1), gain=interval(gain, gain - 0.002, gain + 0.002))
        for number, gain in enumerate(gains)
    ]
    write_cleaning(rows, cleaning)
    document = cleaning_document(cleaning)
    assert (document.answer.tone, document.answer.headline) == (tone, headline)
    if tone == "good":
        text = write_page(cleaning).read_text()
        assert "With 20% of the labels turned, &#x27;decided&#x27; gains: +1.80 [+1.60, +2.00] points" in text


def test_markdown_of_a_study_has_its_tables_and_no_figures(savings: Path):
    text = savings_document(savings).markdown()
    assert "| d_optimal | 40% [30%, 50%] | +1.00 [+0.50, +1.50] | +0.0100 [+0.0050, +0.0150] |" in text
    assert "## Pool a&lt;b>" in text
    assert "- one:" not in text


def test_files_of_an_earlier_page_go_and_others_stay(savings: Path):
    folder = write_page(savings).parent
    (folder / "notes.csv").write_text("mine")
    assert (folder / "rules_1.csv").is_file()
    assert (folder / "savings_1.svg").is_file()
    pools = json.loads((savings / SAVINGS_FILE).read_text())
    (savings / SAVINGS_FILE).write_text(json.dumps(pools[:1]))
    names = {path.name for path in write_page(savings, folder).parent.iterdir()}
    assert names == {"index.html", "notes.csv", "rules_0.csv", *(f"savings_0.{kind}" for kind in ("csv", "png", "svg"))}


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


@pytest.mark.parametrize(
    ("kind", "file", "write"),
    [
        (StudyKind.labels, SAVINGS_FILE, savings_document),
        (StudyKind.cleaning, CLEANING_FILE, cleaning_document),
    ],
)
def test_a_study_without_a_result_or_a_torn_one_is_one_sentence(
    tmp_path: Path, kind: StudyKind, file: str, write: Callable[[Path], Document]
):
    planned(tmp_path, kind)
    with pytest.raises(ConfigError, match=r"has no result yet; rm-opt study .* goes on"):
        write(tmp_path)
    for torn in ("", "[{", '[{"pool": 3}]', "7"):
        (tmp_path / file).write_text(torn)
        with pytest.raises(ConfigError, match=f"{file} is damaged"):
            write(tmp_path)
    assert not (tmp_path / "report").exists()


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
    assert "rm-opt study readiness, labels and cleaning" in done.stderr
    done = CliRunner().invoke(app, ["report", str(readiness), "--format", "md"])
    assert (done.exit_code, done.stdout.startswith("# Validation of the readiness score")) == (0, True), done.output


@NEEDS_BROWSER
def test_the_page_of_savings_fits_each_screen_and_loads_nothing(savings: Path):
    assert_sound(write_page(savings))


@NEEDS_AXE
def test_pages_of_studies_are_accessible(savings: Path):
    assert_accessible(write_page(savings))


@NEEDS_AXE
def test_the_page_of_cleaning_is_accessible(cleaning: Path):
    assert_accessible(write_page(cleaning))

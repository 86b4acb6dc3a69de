"""Pages of studies: a comparison of optimizers is told by its setting, and other studies have no page."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from rm_optimizer.experiments.study import FROZEN_FILE, compares_optimizers, planned_trial, publish
from rm_optimizer.experiments.training_trials import TRAIN
from rm_optimizer.interfaces.cli import app


def test_a_comparison_killed_before_its_plan_is_told_by_its_setting(tmp_path: Path):
    assert not compares_optimizers(tmp_path)
    (tmp_path / FROZEN_FILE).write_text("{}")
    assert compares_optimizers(tmp_path)


def test_the_command_names_the_studies_with_a_page_where_there_is_none(tmp_path: Path):
    publish(tmp_path, TRAIN, [planned_trial("one", {"number": 1})])
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert "study without a page; there are pages of runs and of comparisons of optimizers" in done.stderr

"""The W&B workspace: every panel shows what a run logs, and the definition is built without an account."""

import sys

import pytest

from rm_optimizer.core.metrics.pairwise import ESTIMATES
from rm_optimizer.errors import MissingExtra
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import loggers
from rm_optimizer.training.callbacks.calibration import CALIBRATION_COLUMNS
from rm_optimizer.training.callbacks.curvature import CURVATURE_COLUMNS
from rm_optimizer.training.folder.metrics_csv import COLUMNS
from rm_optimizer.training.loggers import COMPARED, GROUPED_BY, SECTIONS


def test_every_metric_of_a_panel_is_logged():
    logged = COLUMNS.keys() | CALIBRATION_COLUMNS.keys() | CURVATURE_COLUMNS.keys()
    assert {metric for plots in SECTIONS.values() for metrics in plots.values() for metric in metrics} <= logged
    assert set(COMPARED) <= {f"best/{name}" for name in ESTIMATES}
    assert typed(compose(["output_dir=x"]), TrainConfig).optimizer.name, f"{GROUPED_BY} is an option"


def test_the_definition_is_built_without_an_account():
    pytest.importorskip("wandb_workspaces")
    built = loggers.dashboard("team", "rm-optimizer")
    assert [section.name for section in built.sections] == ["Best weights", *SECTIONS]
    assert [panel.y for panel in built.sections[1].panels] == [
        list(metrics) for metrics in SECTIONS["Validation"].values()
    ]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rm-optimizer\[dashboards\]'"):
        loggers.dashboard("team", "rm-optimizer")

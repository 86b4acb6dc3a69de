"""The example's W&B workspace: every panel shows what a run logs, and the definition is built without an account."""

import importlib.util
from pathlib import Path

import pytest

from rm_optimizer.core.metrics.pairwise import ESTIMATES
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.callbacks.curvature import CURVATURE_COLUMNS
from rm_optimizer.training.callbacks.evaluation import CALIBRATION_COLUMNS
from rm_optimizer.training.loggers import COLUMNS

pytest.importorskip("wandb_workspaces")
EXAMPLE = Path(__file__).parents[2] / "examples" / "wandb_dashboard.py"
spec = importlib.util.spec_from_file_location("wandb_dashboard", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def test_every_metric_of_a_panel_is_logged():
    logged = COLUMNS.keys() | CALIBRATION_COLUMNS.keys() | CURVATURE_COLUMNS.keys()
    assert {metric for plots in example.SECTIONS.values() for each in plots.values() for metric in each} <= logged
    assert set(example.COMPARED) <= {f"best/{name}" for name in ESTIMATES}
    assert typed(compose(["output_dir=x"]), TrainConfig).optimizer.name, f"{example.GROUPED_BY} is an option"


def test_the_definition_is_built_without_an_account():
    built = example.dashboard("team", "rm-optimizer")
    assert [section.name for section in built.sections] == ["Best weights", *example.SECTIONS]
    assert [panel.y for panel in built.sections[1].panels] == [
        list(metrics) for metrics in example.SECTIONS["Validation"].values()
    ]

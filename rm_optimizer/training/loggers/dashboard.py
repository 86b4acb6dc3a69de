"""W&B workspace for the runs of a project: panels of the logged metrics, with runs grouped by optimizer."""

from __future__ import annotations

import warnings
from typing import Any

from rm_optimizer.errors import MissingExtra

STEP = "trainer/global_step"
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Validation": {
        "NLL (chance 0.693)": ("val/nll",),
        "Accuracy": ("val/accuracy",),
        "Brier score": ("val/brier",),
        "ECE": ("val/ece",),
        "Mean margin": ("val/mean_margin",),
        "Ties": ("val/tie_rate",),
    },
    "Training": {
        "Loss": ("train/loss",),
        "Accuracy": ("train/accuracy",),
        "Learning rate": ("train/lr",),
        "Gradient norm": ("train/grad_norm",),
    },
    "Calibration": {
        "ECE and its noise floor": ("calibration/ece", "calibration/ece_noise_floor"),
        "Temperature": ("calibration/temperature",),
    },
    "Curvature": {
        "Top eigenvalue": ("curvature/top_eigenvalue",),
        "Trace": ("curvature/trace",),
        "Edge of stability": ("curvature/preconditioned_sharpness", "curvature/stability_limit"),
    },
}
"""Sections of the workspace, their panels, and the metrics of each panel."""
COMPARED = ("best/nll", "best/accuracy", "best/ece")
"""Summary metrics drawn as bars, one a run."""
GROUPED_BY = "optimizer.name"
"""Option that groups the runs."""


def _workspaces_and_panels() -> tuple[Any, Any]:
    """Modules of wandb-workspaces."""
    try:
        with warnings.catch_warnings():  # it still uses pydantic's first API
            warnings.simplefilter("ignore", DeprecationWarning)
            from wandb_workspaces import workspaces
            from wandb_workspaces.reports import v2 as panels
    except ImportError as error:
        raise MissingExtra("wandb-workspaces", "dashboards") from error
    return workspaces, panels


def dashboard(entity: str, project: str, *, name: str = "RM-Optimizer") -> Any:
    """The workspace as `wandb_workspaces.workspaces.Workspace`; its `save()` publishes it and needs an account.

    Args:
        entity: W&B user or team.
        project: W&B project, `logger.project` of the runs.
        name: name of the workspace.

    Raises:
        MissingExtra: if wandb-workspaces is not installed.

    Example:
        >>> dashboard("team", "rm-optimizer").sections[0].name  # doctest: +SKIP
        'Best weights'
    """
    workspaces, panels = _workspaces_and_panels()
    bars = [panels.BarPlot(title=metric, metrics=[metric], orientation="h") for metric in COMPARED]
    sections = [workspaces.Section(name="Best weights", panels=bars, is_open=True)]
    for section, plots in SECTIONS.items():
        lines = [panels.LinePlot(title=title, x=STEP, y=list(metrics)) for title, metrics in plots.items()]
        sections.append(workspaces.Section(name=section, panels=lines, is_open=section in ("Validation", "Training")))
    grouping = workspaces.RunsetSettings(groupby=[workspaces.Config(GROUPED_BY)])
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections, runset_settings=grouping)

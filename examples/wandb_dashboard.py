"""Publish a Weights & Biases workspace for the runs of `rm-opt train logger=wandb`.

    pip install 'rm-optimizer[dashboards]'
    python examples/wandb_dashboard.py TEAM PROJECT

It needs an account. Runs are grouped by optimizer; panels show validation, training, calibration and curvature.
"""

from __future__ import annotations

import sys
import warnings

with warnings.catch_warnings():  # wandb-workspaces still uses pydantic's first API
    warnings.simplefilter("ignore", DeprecationWarning)
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2 as panels

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


def dashboard(entity: str, project: str, *, name: str = "RM-Optimizer") -> workspaces.Workspace:
    """The workspace; its `save()` publishes it."""
    bars = [panels.BarPlot(title=metric, metrics=[metric], orientation="h") for metric in COMPARED]
    sections = [workspaces.Section(name="Best weights", panels=bars, is_open=True)]
    for section, plots in SECTIONS.items():
        lines = [panels.LinePlot(title=title, x="trainer/global_step", y=list(ys)) for title, ys in plots.items()]
        sections.append(workspaces.Section(name=section, panels=lines, is_open=section in ("Validation", "Training")))
    grouping = workspaces.RunsetSettings(groupby=[workspaces.Config(GROUPED_BY)])
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections, runset_settings=grouping)


if __name__ == "__main__":
    dashboard(*sys.argv[1:3]).save()

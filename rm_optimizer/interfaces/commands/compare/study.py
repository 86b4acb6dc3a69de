"""`rm-opt compare plan | run | status | retry | report`: a study of many training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.commands.compare.trials import Executors, Retries, Workers, print_plan

if TYPE_CHECKING:
    from rm_optimizer.experiments.study import PlannedTrial, StudyStatus

Folder = Annotated[Path, Argument(help="Folder of the study.")]


def plan(
    study: Folder,
    overrides: Annotated[list[str], Argument(help="Options of rm-opt train; several values make several trials.")],
    estimate: Annotated[
        bool, Option("--estimate/--no-estimate", help="Estimate the hours from a few steps of the first trial.")
    ] = True,
) -> None:
    """Write the list of trials. They are the combinations of values that `rm-opt train --multirun` would run."""
    from rm_optimizer.experiments.study import publish
    from rm_optimizer.experiments.training_trials import TRAIN

    trials = planned_trainings(overrides)
    publish(study, TRAIN, trials)
    print_plan(study, trials, estimate=estimate)


def run(study: Folder, executor: Executors = "process", workers: Workers = None, retries: Retries = 2) -> None:
    """Run the trials that have no result. Repeat a stopped command to continue it."""
    from rm_optimizer.experiments.study import compares_optimizers

    if compares_optimizers(study):
        from rm_optimizer.compare import run_stages

        run_stages(study, executor, workers, retries=retries)
        return
    _run(study, executor, workers, retries)


def retry(study: Folder, executor: Executors = "process", workers: Workers = None, retries: Retries = 2) -> None:
    """Run failed trials again, and those without a result."""
    from rm_optimizer.experiments.study import Study

    print(f"failed trials to run again: {Study(study).forget_failures()}")
    run(study, executor, workers, retries)


def status(study: Folder) -> None:
    """Print the number of trials in each state. Errors of failed trials are printed too."""
    from rm_optimizer.experiments.study import Study

    _print_status(Study(study).status())


def report(
    study: Folder,
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")] = 1000,
) -> None:
    """Compare the finished trials, and write a report. Tables and pictures are written into STUDY/report."""
    from rm_optimizer.experiments.study import compares_optimizers

    if compares_optimizers(study):
        from rm_optimizer.compare import report as report_optimizers

        print(f"text, JSON and pictures: {report_optimizers(study).parent}")
        return
    _report_runs(study, bootstrap)


def _report_runs(study: Path, bootstrap: int) -> None:
    from rm_optimizer.experiments.compared_runs import read_runs
    from rm_optimizer.experiments.run_comparison import compare_runs
    from rm_optimizer.experiments.study import Study
    from rm_optimizer.experiments.training_trials import RUN
    from rm_optimizer.records.files import write_rows
    from rm_optimizer.reporting.comparison import print_comparison, write_comparison

    found = Study(study)
    state = found.status()
    finished = [found.trial(each).folder / RUN for each in found.plan.trials if state.states[each.name] == "finished"]
    comparison = compare_runs(read_runs(finished), num_bootstrap=bootstrap)
    print_comparison(comparison)
    if not state.is_done or state.counts["diverged"]:
        _print_status(state)
    write_comparison(comparison, study / "report")
    write_rows(study / "report" / "trials.parquet", [*found.rows()])
    print(f"JSON, Parquet and pictures: {study / 'report'}")


def across(
    studies: Annotated[list[Path], Argument(help="At least three folders of comparisons of the same optimizers.")],
    json_file: Annotated[Path | None, Option("--json", help="Also write the numbers to this JSON file.")] = None,
) -> None:
    """Combine comparisons of the same optimizers. They must be on three or more data sets."""
    from rm_optimizer.experiments.optimizer_comparison.findings import across_datasets, findings
    from rm_optimizer.interfaces.outputs import printed_beside, write_json
    from rm_optimizer.reporting.tables import cell_text, new_table, output_console

    found = across_datasets([findings(folder) for folder in studies])
    title = f"{len(studies)} data sets, {found.seeds} seeds of each optimizer on each"
    table = new_table(title, "optimizer", "accuracy, interquartile mean", f"P(better NLL than {found.reference})")
    for arm in found.arms:
        table.add_row(arm.name, cell_text(arm.accuracy), "" if arm.improvement is None else cell_text(arm.improvement))
    with printed_beside(json_file):
        output_console().print(table)
    write_json(json_file, found.to_json())


def planned_trainings(overrides: list[str]) -> list[PlannedTrial]:
    """Compose and check the trials of these overrides.

    Raises:
        ConfigError: if an option is unknown or out of its range.
    """
    from dataclasses import replace

    from rm_optimizer.experiments.training_trials import training_trial
    from rm_optimizer.interfaces.command_line import checked, planned_sweep
    from rm_optimizer.interfaces.sweep import own_overrides
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.folder.record import absolute_source

    jobs = planned_sweep(overrides).jobs
    trials = []
    for job, own in zip(jobs, own_overrides(jobs), strict=True):
        config = checked(job, TrainConfig, writable=False, sweeps=True)
        sources = {name: absolute_source(getattr(config.data, name)) for name in ("train", "val")}
        config = replace(config, data=replace(config.data, **sources))
        trials.append(training_trial(own or "one trial", config))
    return trials


def _run(folder: Path, executor: str, workers: int | None, retries: int) -> None:
    from rm_optimizer.experiments.study import Study, TrialLines
    from rm_optimizer.experiments.trial import executor_named

    study = Study(folder)
    lines = TrialLines.of(study)
    state = study.run(executor_named(executor, workers), retries=retries, on_trial=lines)
    _print_status(state)
    if state.counts["failed"]:
        raise ConfigError(f"{state.counts['failed']} trials failed; fix the cause, then rm-opt compare retry {folder}")


def _print_status(state: StudyStatus) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(state.counts.items()))
    print(f"{len(state.states):,} trials: {counts}")
    for name, error in list(state.errors.items())[:10]:
        print(f"{name} failed: {error}")

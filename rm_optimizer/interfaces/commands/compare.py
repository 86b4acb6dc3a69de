"""`rm-opt compare`: comparisons of finished runs and of optimizers, and studies of many runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.outputs import made_folder, printed_beside, write_json

if TYPE_CHECKING:
    from rm_optimizer.experiments.study import PlannedTrial, StudyStatus

RESULTS = Path("outputs", "compare")
"""Default folder of comparisons."""
Folder = Annotated[Path, Argument(help="Folder of the study.")]
Bootstrap = Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")]
Executors = Annotated[str, Option("--executor", help="Where trials run: inline, process or ray.")]
Workers = Annotated[
    int | None, Option("--workers", min=1, help="Trials at a time; default: one per GPU, one without GPUs.")
]
Retries = Annotated[int, Option("--retries", min=0, help="Further attempts at a failed trial.")]


def compare(
    runs: Annotated[list[Path], Argument(help="Run folders, or folders of several runs, such as a sweep's.")],
    output: Annotated[
        Path | None,
        Option("--output", help="Folder for JSON, Parquet and pictures; default: one by time in outputs/compare."),
    ] = None,
    bootstrap: Bootstrap = 1000,
) -> None:
    """Compare finished runs on their common validation pairs.

    The first run's arm is the baseline. Runs that differ only in the seed form an arm. Differences are paired by
    prompt, and by seed if there are several.
    """
    from rm_optimizer.experiments.compared_runs import read_runs
    from rm_optimizer.experiments.run_comparison import compare_runs
    from rm_optimizer.reporting.comparison import print_comparison, write_comparison

    comparison = compare_runs(read_runs(runs), num_bootstrap=bootstrap)
    folder = made_folder(output or RESULTS / f"{datetime.now():%Y-%m-%d/%H-%M-%S}")
    print_comparison(comparison)
    write_comparison(comparison, folder)
    print(f"JSON, Parquet and pictures: {folder}")


@dataclass(frozen=True)
class ComparisonSizes:
    """Sizes of a comparison; None takes the size of the budget."""

    rates: Annotated[int | None, Option("--rates", help="Learning rates to try for each optimizer, odd.")] = None
    tuning_seeds: Annotated[int | None, Option("--tuning-seeds", help="Tuning seeds for each learning rate.")] = None
    pairs: Annotated[int | None, Option("--pairs", help="Most training pairs, drawn at random.")] = None
    val_pairs: Annotated[int | None, Option("--val-pairs", help="Most validation pairs.")] = None
    test_pairs: Annotated[int | None, Option("--test-pairs", help="Most test pairs.")] = None
    curvature_pairs: Annotated[
        int | None, Option("--curvature-pairs", help="Training pairs to measure curvature on; 0: no curvature.")
    ] = None


def compare_optimizers(
    optimizers: Annotated[str, Option("--optimizers", help="Names separated by commas: adam,adamw,muon.")],
    data: Annotated[str, Option("--data", help="Training pairs: a file, folder or hub name.")],
    sizes: ComparisonSizes,
    overrides: Annotated[list[str] | None, Argument(help="Options of every run, as for rm-opt train.")] = None,
    seeds: Annotated[int | None, Option("--seeds", help="Final seeds for each optimizer.")] = None,
    val: Annotated[
        str | None, Option("--val", help="Validation pairs; default: the pairs of some training prompts.")
    ] = None,
    test: Annotated[
        str | None, Option("--test", help="Test pairs; default: the pairs of half the validation prompts.")
    ] = None,
    model: Annotated[str, Option("--model", help="Model preset, hub id or folder.")] = "tiny",
    budget: Annotated[str, Option("--budget", help="Sizes of the comparison: smoke, standard or paper.")] = "standard",
    reference: Annotated[
        str | None, Option("--reference", help="Optimizer to compare the others with; default: adamw.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", help="Folder of the comparison; default: outputs/optimizer_comparison.")
    ] = None,
    plan: Annotated[bool, Option("--plan", help="Only print the number of runs and an estimate of hours.")] = False,
    executor: Executors = "process",
    workers: Workers = None,
) -> None:
    """Compare optimizers with tuned learning rates.

    Tunes each optimizer's rate, trains with new seeds, and compares on test pairs that are used for nothing else.
    Repeat a stopped command to continue it. rm-opt compare run, status, retry and report work on its folder.
    """
    from rm_optimizer.compare import FOLDER, OptimizerComparison

    names = [name.strip() for name in optimizers.split(",") if name.strip()]
    comparison = OptimizerComparison(
        model,
        data,
        names,
        seeds,
        val_path=val,
        test_path=test,
        budget=budget,
        reference=reference,
        output_dir=output or FOLDER,
        overrides=overrides or (),
        executor=executor,
        workers=workers,
        **asdict(sizes),
    )
    print(f"{comparison.plan()}; rates beyond the grids come on top")
    if plan:
        print(f"rm-opt compare run {comparison.folder} starts them")
        return
    comparison.run_experiment()
    print(f"text, JSON and pictures: {comparison.generate_report().parent}")


def plan(
    study: Folder,
    overrides: Annotated[list[str], Argument(help="Options of rm-opt train; several values make several trials.")],
    estimate: Annotated[
        bool, Option("--estimate/--no-estimate", help="Estimate the hours from a few steps of the first trial.")
    ] = True,
) -> None:
    """Write the list of trials. They are the combinations of values that `rm-opt train --multirun` would run."""
    from rm_optimizer.experiments.cost import study_cost
    from rm_optimizer.experiments.study import publish
    from rm_optimizer.experiments.training_trials import TRAIN, config_of

    trials = planned_trainings(overrides)
    publish(study, TRAIN, trials)
    for trial in trials:
        print(f"{trial.name}  {trial.label}")
    print(f"{len(trials)} trials; rm-opt compare run {study} starts them", flush=True)
    if estimate:
        print(study_cost([config_of(trial.spec["options"]) for trial in trials]))


def run(study: Folder, executor: Executors = "process", workers: Workers = None, retries: Retries = 2) -> None:
    """Run the trials that have no result. Repeat a stopped command to continue it."""
    from rm_optimizer.compare import run_stages
    from rm_optimizer.experiments.study import Study, TrialLines, compares_optimizers
    from rm_optimizer.experiments.trial import executor_named

    if compares_optimizers(study):
        run_stages(study, executor, workers, retries=retries)
        return
    found = Study(study)
    state = found.run(executor_named(executor, workers), retries=retries, on_trial=TrialLines.of(found))
    _print_status(state)
    if state.counts["failed"]:
        raise ConfigError(f"{state.counts['failed']} trials failed; fix the cause, then rm-opt compare retry {study}")


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
    bootstrap: Bootstrap = 1000,
) -> None:
    """Compare the finished trials, and write a report. Tables and pictures are written into STUDY/report."""
    from rm_optimizer.compare import report as report_optimizers
    from rm_optimizer.experiments.compared_runs import read_runs
    from rm_optimizer.experiments.run_comparison import compare_runs
    from rm_optimizer.experiments.study import Study, compares_optimizers
    from rm_optimizer.experiments.training_trials import RUN
    from rm_optimizer.records.files import write_rows
    from rm_optimizer.reporting.comparison import print_comparison, write_comparison

    if compares_optimizers(study):
        print(f"text, JSON and pictures: {report_optimizers(study).parent}")
        return
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
    from rm_optimizer.experiments.training_trials import training_trial
    from rm_optimizer.interfaces.command_line import CommandLine, checked
    from rm_optimizer.interfaces.sweep import own_overrides
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.folder.record import absolute_source

    jobs = CommandLine.parse([], TrainConfig).of(overrides).sweep.jobs
    trials = []
    for job, own in zip(jobs, own_overrides(jobs), strict=True):
        config = checked(job, TrainConfig, writable=False, sweeps=True)
        sources = {name: absolute_source(getattr(config.data, name)) for name in ("train", "val")}
        config = replace(config, data=replace(config.data, **sources))
        trials.append(training_trial(own or "one trial", config))
    return trials


def _print_status(state: StudyStatus) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(state.counts.items()))
    print(f"{len(state.states):,} trials: {counts}")
    for name, error in list(state.errors.items())[:10]:
        print(f"{name} failed: {error}")

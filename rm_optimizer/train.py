"""Hydra entry: `python -m rm_optimizer.train optimizer=muon hardware=h100`.

The imports of a run are inside the functions. So help, errors about mistyped options and the data-loader's spawned
processes, which import this module again, need neither Hydra nor torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rm_optimizer.errors import ConfigError, Interrupted, RMOptimizerError
from rm_optimizer.interfaces.exits import one_exit, rank, report
from rm_optimizer.interfaces.sweep import SWEEP_FILE, Job, Sweep, failed_job, naming_sweep_folder
from rm_optimizer.records.quoting import in_quotes

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pytorch_lightning.callbacks import Callback

    from rm_optimizer.interfaces.command_line import CommandLine, Composed
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.folder.record import RunResult


SWEEP = Sweep()
"""Jobs of this process, if it runs a sweep."""
COMPARISON = "comparison"
"""Subfolder of a sweep's folder for the comparison of its finished jobs."""


def main() -> None:
    """Check the command line, then run it; a user's mistake becomes one sentence and an exit code."""
    with one_exit():
        from rm_optimizer.schema.composition import completed

        line, checked = check_command(sys.argv[1:])
        if checked is None and line.flags.multirun and not line.only_tells:
            _sweep(line)
        elif checked is None:  # Hydra prints
            line.of(completed(line.overrides)).launch(run)
        elif _ended(checked.options) is None:
            from rm_optimizer.training.folder.lock import reserved
            from rm_optimizer.training.processes import launched_processes, process_overrides, require_devices

            require_devices(checked.options.hardware)
            if (processes := launched_processes()) is not None:
                folder = str(checked.config.hydra.run.dir)
                line = line.of([*line.overrides, *process_overrides(processes, folder, line.overrides)])
                checked = line.composed()
            sys.argv[1:] = line.words()  # Lightning repeats them for the processes that it starts
            with reserved(Path(checked.options.output_dir)) if rank() == 0 else nullcontext():
                checked.run(_trained)


def _sweep(line: CommandLine[TrainConfig]) -> None:
    """Run the jobs of a sweep, and write the comparison of those that finished into `comparison/` of its folder."""
    from rm_optimizer.schema.composition import completed
    from rm_optimizer.training.folder.lock import reserved

    try:
        with naming_sweep_folder(), reserved(line.sweep.folder):
            line.of(_in_folder(completed(line.overrides), line.sweep.folder)).launch(run)
    finally:
        if SWEEP.jobs:
            print(f"\n{SWEEP.table()}\n{SWEEP.folder}/{SWEEP_FILE} holds this table")
    finished = [Path(job.folder) for job in SWEEP.jobs if job.status == "finished"]
    if len(finished) > 1 and SWEEP.folder is not None:
        from rm_optimizer.experiments.compared_runs import read_runs
        from rm_optimizer.experiments.run_comparison import compare_runs
        from rm_optimizer.reporting.comparison import print_comparison, write_comparison

        try:
            comparison = compare_runs(read_runs(finished))
        except RMOptimizerError as error:
            print(f"no comparison: {error}")
        else:
            print_comparison(comparison)
            write_comparison(comparison, SWEEP.folder / COMPARISON)
            print(f"JSON, Parquet and pictures: {SWEEP.folder / COMPARISON}")
    if code := next((job.exit_code for job in SWEEP.jobs if job.exit_code), 0):
        sys.exit(code)


def _in_folder(overrides: Sequence[str], folder: Path) -> list[str]:
    """The overrides, with the folder of the sweep, whose time is filled in once."""
    option = "hydra.sweep.dir="
    return [*(item for item in overrides if not item.startswith(option)), f"{option}{in_quotes(str(folder))}"]


def option_callbacks(config: TrainConfig) -> list[Callback]:
    """Callbacks of the options that are on, with functions from other packages; the others are not imported."""
    found: list[Callback] = []
    if config.training.calibration.enabled:
        from rm_optimizer.reporting.run_report import draw_reliability
        from rm_optimizer.training.callbacks.evaluation import CalibrationCallback

        found.append(CalibrationCallback(config.training.calibration, draw_reliability))
    if config.training.hessian.is_on:
        from rm_optimizer.landscape.training_curvature import measure_curvature
        from rm_optimizer.training.callbacks.curvature import HessianCallback

        options = config.training.hessian
        found.append(HessianCallback(options, partial(measure_curvature, num_products=options.num_products)))
    if config.publish.url is not None:
        from rm_optimizer.serving.weights.publisher import open_publisher
        from rm_optimizer.training.callbacks.publishing import PublishWeights

        found.append(PublishWeights(config.publish, open_publisher))
    return found


def check_command(arguments: Sequence[str]) -> tuple[CommandLine[TrainConfig], Composed[TrainConfig] | None]:
    """Compose and check the options, without running them.

    Args:
        arguments: options and flags in Hydra's form, without the program's name.

    Returns:
        The command line, and the options of the single run that will start; None for a sweep, or if Hydra only prints.

    Raises:
        ConfigError: if a flag, group, option or value is unknown or out of range, or the run folder cannot be written,
            holds another run or is in use.
    """
    from rm_optimizer.interfaces.command_line import CommandLine
    from rm_optimizer.records.run_folder import require_usable
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.folder.lock import require_free
    from rm_optimizer.training.processes import require_launched

    line = CommandLine.parse(arguments, TrainConfig)
    if line.only_tells:
        return line, None
    if rank() == 0:  # Lightning adds hydra.run.dir again, in quotes, for the processes that it starts
        line.require_given_once()
    is_sweep, prints = line.flags.multirun, line.flags.cfg is not None
    if is_sweep and prints:
        raise ConfigError("--cfg prints one configuration; leave out --multirun and the sweep's other values")
    jobs = _jobs(line) if is_sweep else [line.composed()]
    if prints:
        return line, None
    for job in jobs:
        require_launched(job.options.hardware)
        _require_paths(job.options)
    from rm_optimizer.optim import check_compatible  # imports torch, so only after options are checked

    for options in (job.options for job in jobs):
        half = options.trains_half_weights
        check_compatible(options.optimizer, options.hardware, options.schedule, trains_half_weights=half)
    if is_sweep:
        return line, None
    if rank() == 0:  # the other processes find the folder that the first one wrote into
        require_usable(jobs[0].options)
        require_free(Path(jobs[0].options.output_dir))
    return line, jobs[0]


def _jobs(line: CommandLine[TrainConfig]) -> list[Composed[TrainConfig]]:
    """The jobs that together hold every value of a sweep, and those whose folder exists, each in its own folder."""
    from rm_optimizer.records.run_folder import require_usable

    plan = line.sweep
    begun = (number for number in range(len(plan.jobs)) if (plan.folder / str(number)).is_dir())
    jobs, taken = [], set[str]()
    for number in sorted({*plan.covering, *begun}):
        job = line.of(_in_folder(plan.jobs[number], plan.folder)).composed(job=number)
        with naming_sweep_folder():
            if (folder := job.options.output_dir) in taken:
                raise ConfigError(
                    f"each job of a sweep needs its own folder, but more than one would run in {folder}; leave "
                    "out output_dir, or let hydra.sweep.subdir name the job, such as '${hydra.job.num}'"
                )
            taken.add(folder)
            require_usable(job.options)
        if (devices := job.options.hardware.devices) > 1:
            raise ConfigError(f"--multirun takes hardware.devices=1, got {devices}; start one command a configuration")
        jobs.append(job)
    return jobs


def _require_paths(config: TrainConfig) -> None:
    """Look at the paths of model and data before torch is imported, which takes seconds."""
    from rm_optimizer.core.pairs.sources import parse_sources
    from rm_optimizer.core.rows.readers import require_files
    from rm_optimizer.records.locations import resolve_source

    if config.model.path is not None:
        resolve_source(config.model.path)
    given = [each for each in (config.data.train, config.data.val) if each is not None]
    for source in (item for each in given for item in parse_sources(each, config.data)):
        require_files(source.path)


def _ended(config: TrainConfig) -> RunResult | None:
    """Result of a run that has ended and that `resume=auto` finds, with its summary printed again; else None."""
    from rm_optimizer.records.run_folder import RESULT_FILE
    from rm_optimizer.schema.config import Resume

    if config.resume != Resume.auto or not (Path(config.output_dir) / RESULT_FILE).is_file():
        return None
    from rm_optimizer.reporting.run_report import PICTURES, draw_run, print_run
    from rm_optimizer.training.folder.start import ended_run

    if (ended := ended_run(config)) is None:
        return None
    result, said = ended
    if rank() == 0:
        print(said)
        if not (Path(config.output_dir) / PICTURES).is_dir():  # the run was killed before it drew them
            draw_run(result)
        print_run(result)
    return result


def run(config: DictConfig) -> float:
    """Train a job of a sweep by its composed configuration, and return the objective that the sweep minimizes.

    If the job fails, its error is reported, its objective is infinite, and the next job starts.
    """
    from hydra.core.hydra_config import HydraConfig

    from rm_optimizer.schema import TrainConfig, typed

    hydra = HydraConfig.get()
    sweep, overrides = Path(hydra.sweep.dir), list(hydra.overrides.task)
    folder = str(sweep / str(hydra.sweep.subdir))
    try:
        with naming_sweep_folder():
            objective = _trained(typed(config, TrainConfig))
    except Exception as error:
        SWEEP.add(failed_job(overrides, folder, error), sweep)
        if not isinstance(error, RMOptimizerError):
            raise  # a bug; Hydra raises it after the last job
        code = report(error)
        if isinstance(error, Interrupted):
            sys.exit(code)
        return math.inf
    SWEEP.add(Job(overrides=tuple(overrides), status="finished", objective=objective, folder=folder), sweep)
    return objective


def _trained(options: TrainConfig) -> float:
    from rm_optimizer.records.files import writing
    from rm_optimizer.training.run import run_training

    if (result := _ended(options)) is None:
        with writing(Path(options.output_dir)):
            result = run_training(options, callbacks=option_callbacks(options))
            if rank() == 0:
                from rm_optimizer.reporting.run_report import draw_run, print_run

                draw_run(result)
                print_run(result)
    return result.objective


if __name__ == "__main__":
    main()

"""Hydra entry: `python -m rm_optimizer.train optimizer=muon hardware=h100`.

The imports of a run are inside the functions. So help, errors about mistyped options and the data-loader's spawned
processes, which import this module again, need neither Hydra nor torch.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rm_optimizer.errors import ConfigError, Interrupted, RMOptimizerError
from rm_optimizer.interfaces.entry import launch
from rm_optimizer.interfaces.exits import one_exit, rank, report
from rm_optimizer.interfaces.sweep import SWEEP_FILE, Job, Sweep, failed_job, naming_sweep_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pytorch_lightning.callbacks import Callback

    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.folder.result import RunResult


SWEEP = Sweep()
"""Jobs of this process, if it runs a sweep."""
COMPARISON = "comparison"
"""Subfolder of a sweep's folder for the comparison of its finished jobs."""


def main() -> None:
    """Check the command line, then let Hydra run it; a user's mistake becomes one sentence and an exit code."""
    with one_exit():
        sys.argv[1:] = _in_order(sys.argv[1:])
        if (config := check_command(sys.argv[1:])) is not None:
            if _has_ended(config):
                return
            _require_devices(config)
        named = _named_folder(config, sys.argv[1:])
        sys.argv[1:] = _with_model_preset(sys.argv[1:])
        sys.argv += _among_processes(sys.argv[1:])
        try:
            with _held(named, sweep=config is None):
                launch(run, "config")
        finally:
            if SWEEP.jobs:
                print(f"\n{SWEEP.table()}\n{SWEEP.folder}/{SWEEP_FILE} holds this table")
        if SWEEP.jobs:
            _compare(SWEEP)
        if SWEEP.exit_code:
            sys.exit(SWEEP.exit_code)


def _compare(sweep: Sweep) -> None:
    """Print the comparison of a sweep's finished jobs, and write it into `comparison/` of its folder."""
    folders = [Path(job.folder) for job in sweep.jobs if job.status == "finished"]
    if len(folders) < 2 or sweep.folder is None:
        return
    from rm_optimizer.experiments.compared_runs import read_runs
    from rm_optimizer.experiments.run_comparison import compare_runs
    from rm_optimizer.reporting.comparison import print_comparison, write_comparison

    try:
        comparison = compare_runs(read_runs(folders))
    except RMOptimizerError as error:
        print(f"no comparison: {error}")
        return
    print_comparison(comparison)
    write_comparison(comparison, sweep.folder / COMPARISON)
    print(f"JSON, Parquet and pictures: {sweep.folder / COMPARISON}")


def _named_folder(config: TrainConfig | None, arguments: Sequence[str]) -> Path | None:
    """The folder of a run or sweep if the user named it and this process is the first to write into it, else None.

    Args:
        config: options of the single run that will start; None for a sweep, or if Hydra only prints.
        arguments: options and flags in Hydra's form.
    """
    options = ("hydra.sweep.dir=",) if config is None else ("hydra.run.dir=", "output_dir=")
    named = [item for item in arguments if item.startswith(options) and "${" not in item]
    if rank() != 0 or not named:
        return None
    return _sweep_folder(arguments, named[-1]) if config is None else Path(config.output_dir)


@contextmanager
def _held(folder: Path | None, sweep: bool) -> Iterator[None]:
    """Lock a folder before Hydra writes into it."""
    from rm_optimizer.training.folder.lock import reserved

    with ExitStack() as stack:
        if folder is not None:
            with naming_sweep_folder() if sweep else nullcontext():
                stack.enter_context(reserved(folder))
        yield


def _sweep_folder(arguments: Sequence[str], named: str) -> Path | None:
    from rm_optimizer.interfaces.flags import only_tells, parse_flags
    from rm_optimizer.records.recall import override_values
    from rm_optimizer.schema import TrainConfig

    flags = parse_flags(arguments, TrainConfig)
    if not flags.multirun or flags.cfg is not None or only_tells(flags):
        return None
    (folder,) = override_values([named]).values()
    return Path(str(folder))


def _require_devices(config: TrainConfig) -> None:
    from rm_optimizer.training.processes import require_devices

    require_devices(config.hardware)


def show(result: RunResult) -> None:
    """Draw the run's pictures and print its summary."""
    from rm_optimizer.reporting.pictures import draw_run, print_run

    draw_run(result)
    print_run(result)


def option_callbacks(config: TrainConfig) -> list[Callback]:
    """Callbacks of the options that are on, with functions from other packages; the others are not imported."""
    found: list[Callback] = []
    if config.training.calibration.enabled:
        from rm_optimizer.reporting.pictures import draw_reliability
        from rm_optimizer.training.callbacks.calibration import CalibrationCallback

        found.append(CalibrationCallback(config.training.calibration, draw_reliability))
    if config.training.hessian.is_on:
        from rm_optimizer.landscape.training_curvature import measure_curvature
        from rm_optimizer.training.callbacks.curvature import HessianCallback

        options = config.training.hessian
        found.append(HessianCallback(options, partial(measure_curvature, num_products=options.num_products)))
    if config.publish.url is not None:
        from rm_optimizer.serving.weights.run_publisher import open_publisher
        from rm_optimizer.training.callbacks.publishing import PublishWeights

        found.append(PublishWeights(config.publish, open_publisher))
    return found


def _in_order(arguments: Sequence[str]) -> list[str]:
    from rm_optimizer.interfaces.flags import flags_first
    from rm_optimizer.schema import TrainConfig

    return flags_first(arguments, TrainConfig)


def _with_model_preset(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the preset for a model that is named by its path."""
    from rm_optimizer.interfaces.flags import parse_flags
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.schema.implied import completed

    overrides = list(parse_flags(arguments, TrainConfig).overrides)
    return [*arguments, *completed(overrides)[len(overrides) :]]


def check_command(arguments: Sequence[str]) -> TrainConfig | None:
    """Compose and check the options, without running them.

    Args:
        arguments: options and flags in Hydra's form, without the program's name.

    Returns:
        The options of the single run that will start; None for a sweep, or if Hydra only prints.

    Raises:
        ConfigError: if a flag, group, option or value is unknown or out of range, or the run folder cannot be written,
            holds another run or is in use.
    """
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.interfaces.flags import only_tells, parse_flags, require_given_once
    from rm_optimizer.records.run_folder import require_usable
    from rm_optimizer.records.run_options import RunRequest
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.folder.lock import require_free
    from rm_optimizer.training.processes import require_launched

    flags = parse_flags(arguments, TrainConfig)
    if only_tells(flags):
        return None
    if rank() == 0:  # Lightning adds hydra.run.dir again, in quotes, for the processes that it starts
        require_given_once(flags.overrides)
    if flags.multirun and flags.cfg is not None:
        raise ConfigError("--cfg prints one configuration; leave out --multirun and the sweep's other values")
    name = flags.config_name or "config"
    folders: set[str] = set()
    configs: list[TrainConfig] = []
    for number, overrides in _jobs(flags) if flags.multirun else [(None, flags.overrides)]:
        config = checked(
            overrides,
            TrainConfig,
            name=name,
            config_dir=flags.config_dir,
            writable=flags.cfg is None,
            sweeps=flags.multirun or flags.cfg is not None,
            job=number,
        )
        if flags.multirun:
            with naming_sweep_folder():
                _require_own_folder(config, folders)
        if flags.multirun and config.hardware.devices > 1:
            raise ConfigError(
                f"--multirun takes hardware.devices=1, got {config.hardware.devices}; start one command a configuration"
            )
        if flags.cfg is None:
            require_launched(config.hardware)
            configs.append(config)
    for config in configs:
        _require_paths(config)
    for config in configs:
        _require_compatible(config)
    if flags.multirun or flags.cfg is not None:
        return None
    if rank() == 0:  # the other processes find the folder that the first one wrote into
        require_usable(RunRequest.of(config))
        require_free(Path(config.output_dir))
    return config


def _jobs(flags: Namespace) -> list[tuple[int, list[str]]]:
    """Numbers and overrides of jobs that together hold every value of a sweep, and of jobs whose folder exists.

    All overrides name the sweep's folder with the current time filled in.
    """
    from rm_optimizer.interfaces.command_line import planned_sweep
    from rm_optimizer.records.quoting import in_quotes

    name, option = flags.config_name or "config", "hydra.sweep.dir="
    plan = planned_sweep(flags.overrides, name=name, config_dir=flags.config_dir)
    here = f"{option}{in_quotes(str(plan.folder))}"
    begun = (number for number in range(len(plan.jobs)) if (plan.folder / str(number)).is_dir())
    return [
        (number, [*(line for line in plan.jobs[number] if not line.startswith(option)), here])
        for number in sorted({*plan.covering, *begun})
    ]


def _require_own_folder(config: TrainConfig, taken: set[str]) -> None:
    """Refuse a job whose folder another job has or that holds another run; add its folder to the taken ones."""
    from rm_optimizer.records.run_folder import require_usable
    from rm_optimizer.records.run_options import RunRequest

    if config.output_dir in taken:
        raise ConfigError(
            f"each job of a sweep needs a folder of its own, but more than one would run in {config.output_dir}; leave "
            "out output_dir, or let hydra.sweep.subdir name the job, such as '${hydra.job.num}'"
        )
    taken.add(config.output_dir)
    require_usable(RunRequest.of(config))


def _require_paths(config: TrainConfig) -> None:
    """Look at the paths of model and data before torch is imported, which takes seconds."""
    from rm_optimizer.core.pairs.sources import parse_sources
    from rm_optimizer.core.rows.readers import is_hub_name, read_rows, source_files
    from rm_optimizer.records.locations import resolve_source

    if config.model.path is not None:
        resolve_source(config.model.path)
    given = [each for each in (config.data.train, config.data.val) if each is not None]
    for source in (item for each in given for item in parse_sources(each, format=config.data.format, columns=None)):
        for file in (file for part in source_files(source.path) for file in part.files if not is_hub_name(file)):
            read_rows(file, lambda number, reason: None)  # it looks at the file, and reads rows once they are asked for


def _require_compatible(config: TrainConfig) -> None:
    from rm_optimizer.optim import check_compatible  # imports torch, so only after options are checked

    check_compatible(config.optimizer, config.hardware, config.schedule)


def _has_ended(config: TrainConfig) -> bool:
    """True if `resume=auto` finds a run that has ended. Its summary is printed again, and nothing else happens."""
    from rm_optimizer.records.run_folder import RESULT_FILE
    from rm_optimizer.records.run_options import RunRequest
    from rm_optimizer.schema.config import Resume

    if config.resume != Resume.auto or not (Path(config.output_dir) / RESULT_FILE).is_file():
        return False
    from rm_optimizer.reporting.pictures import PICTURES, draw_run, print_run
    from rm_optimizer.training.folder.start import ended_run

    if (ended := ended_run(RunRequest.of(config))) is None:
        return False
    if rank() == 0:
        print(ended)
        if not (Path(config.output_dir) / PICTURES).is_dir():  # the run was killed before it drew them
            draw_run(ended.result)
        print_run(ended.result)
    return True


def _among_processes(arguments: Sequence[str]) -> list[str]:
    """Overrides that a process of torchrun or SLURM adds, so that all processes work in one run folder."""
    from rm_optimizer.interfaces.flags import only_tells, parse_flags
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.processes import launched_processes, process_overrides

    flags, processes = parse_flags(arguments, TrainConfig), launched_processes()
    if only_tells(flags) or flags.cfg is not None or processes is None:
        return []
    from rm_optimizer.interfaces.command_line import run_folder

    folder = run_folder(flags.overrides, name=flags.config_name or "config", config_dir=flags.config_dir)
    return process_overrides(processes, folder, flags.overrides)


def run(config: DictConfig) -> float:
    """Train by the composed configuration and return the objective that a sweep minimizes.

    If a job of a sweep fails, its error is reported, its objective is infinite, and the next job starts.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        sweep = Path(hydra.sweep.dir)
        return _job(config, list(hydra.overrides.task), sweep, str(sweep / str(hydra.sweep.subdir)))
    return _trained(config)


def _job(config: DictConfig, overrides: list[str], sweep: Path, folder: str) -> float:
    try:
        with naming_sweep_folder():
            objective = _trained(config)
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


def _trained(config: DictConfig) -> float:
    from rm_optimizer.records.disk import writing
    from rm_optimizer.records.run_options import RunRequest
    from rm_optimizer.schema import TrainConfig, typed
    from rm_optimizer.training.folder.start import ended_run
    from rm_optimizer.training.run import train_reward_model

    options = typed(config, TrainConfig)
    ended = ended_run(RunRequest.of(options)) is not None
    with writing(Path(options.output_dir)):
        result = train_reward_model(options, callbacks=option_callbacks(options))
        if rank() == 0 and not ended:
            show(result)
    return result.objective


if __name__ == "__main__":
    main()

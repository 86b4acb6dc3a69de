"""Command line of a program whose options Hydra composes: parsed once, composed and checked once, then run.

Imports no torch. The object that is checked is the object that runs, so what was refused cannot start.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, wraps
from itertools import product
from operator import ne
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, NoReturn, cast, get_type_hints

import hydra
from hydra import compose as hydra_compose
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rm_optimizer.errors import ConfigError, did_you_mean, nearest
from rm_optimizer.interfaces.exits import one_exit
from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.composition import ConfigT, check_overrides, completed, composing, config_root, register, typed
from rm_optimizer.schema.diagnose import counterpart, unknown_option, walk_options


@dataclass(frozen=True)
class SweepPlan:
    """The jobs of a sweep.

    Args:
        folder: the value of `hydra.sweep.dir`, with times filled in.
        jobs: overrides of each job, in the order of the jobs' numbers.
        covering: numbers of jobs that together hold every value, ascending; they vary one swept option at a time.
    """

    folder: Path
    jobs: list[list[str]]
    covering: list[int]


@dataclass(frozen=True)
class Composed(Generic[ConfigT]):
    """Options that were composed and checked, ready to run.

    Args:
        options: the options.
        config: the same with Hydra's own options.
        loader: Hydra's loader of presets, which its callbacks may ask.
    """

    options: ConfigT
    config: DictConfig
    loader: ConfigLoader

    def run(self, task: Callable[[ConfigT], object]) -> None:
        """Call the task as Hydra (1.3, `Hydra.run`) would: in its folder, with its log and its three files.

        A failure inside the task ends the process there with its sentence and exit code. Hydra lets an exit pass, but
        would print its own line before an exception.
        """
        name, callbacks = self.config.hydra.job.config_name, Callbacks(self.config)
        callbacks.on_run_start(config=self.config, config_name=name)
        done = run_job(
            lambda config: _reported(task)(self.options),
            self.config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            hydra_context=HydraContext(config_loader=self.loader, callbacks=callbacks),
        )
        callbacks.on_run_end(config=self.config, config_name=name, job_return=done)
        _ = done.return_value  # raises what the task raised


@dataclass(frozen=True)
class CommandLine(Generic[ConfigT]):
    """Hydra's flags and the overrides of a command line.

    Args:
        kind: dataclass of the whole configuration.
        flags: Hydra's flags, as its own parser reads them, and the overrides.
        main_file: name of the main configuration file.
    """

    kind: type[ConfigT]
    flags: argparse.Namespace
    main_file: str

    @classmethod
    def parse(cls, arguments: Sequence[str], kind: type[ConfigT], main_file: str = "config") -> CommandLine[ConfigT]:
        """Read the arguments, without the program's name.

        Raises:
            ConfigError: if a flag is unknown or lacks its value.
        """
        parser = get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign]
        flags, unknown = parser.parse_known_args(list(arguments))
        for flag in unknown:
            if flag.startswith("-"):
                known = [name for name in parser._option_string_actions if name[1] == "-"]
                raise ConfigError(_unknown_flag(flag, kind, known))
        flags.overrides += unknown
        return cls(kind, flags, flags.config_name or main_file)

    @property
    def overrides(self) -> list[str]:
        """The overrides, in the order typed."""
        return list(self.flags.overrides)

    @property
    def only_tells(self) -> bool:
        """True if Hydra prints information instead of composing a configuration."""
        asks = (self.flags.help, self.flags.hydra_help, self.flags.shell_completion, self.flags.info)
        return any((*asks, self.flags.experimental_rerun, self.flags.config_path))

    @property
    def runs_once(self) -> bool:
        """True if one run starts: no sweep, and Hydra does not print."""
        return not (self.only_tells or self.flags.multirun or self.flags.cfg)

    def of(self, overrides: Sequence[str]) -> CommandLine[ConfigT]:
        """The same flags with other overrides."""
        flags = copy.copy(self.flags)
        flags.overrides = list(overrides)
        return CommandLine(self.kind, flags, self.main_file)

    def words(self) -> list[str]:
        """The arguments with Hydra's flags first, since its parser takes only one uninterrupted series of overrides.

        Example:
            >>> from rm_optimizer.schema import TrainConfig
            >>> CommandLine.parse(["seed=1", "--cfg", "job", "optimizer=muon"], TrainConfig).words()
            ['--cfg=job', 'seed=1', 'optimizer=muon']
        """
        words = []
        for action in get_args_parser()._actions:
            value = getattr(self.flags, action.dest, None)
            if action.option_strings and value not in (None, False):
                words.append(action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]}={value}")
        return [*words, *self.overrides]

    def require_given_once(self) -> None:
        """Refuse an option that is set twice; Hydra would silently use the last value.

        Raises:
            ConfigError: naming the option and both values.
        """
        seen: dict[str, str] = {}
        for line in self.overrides:
            name, equals, value = line.partition("=")
            option = name.lstrip("+")
            if equals and seen.setdefault(option, value) != value:
                raise ConfigError(f"{option} is given twice, as {seen[option]} and as {value}; give it once")

    @cached_property
    def sweep(self) -> SweepPlan:
        """The jobs that Hydra makes from the overrides and the sweeps in their presets, which come first.

        The time in their folder is filled in once.

        Raises:
            ConfigError: if an override cannot be read or composed.
        """
        with composing(self.overrides, self.main_file):
            config = self._loaded([options[0] for options in _choices(self.overrides)])
            of_presets = [f"{option}={values}" for option, values in (config.hydra.sweeper.get("params") or {}).items()]
            choices = _choices([*of_presets, *self.overrides])
        jobs = [list(job) for job in product(*choices)]
        covering = [number for number, job in enumerate(jobs) if sum(map(ne, job, jobs[0])) < 2]
        return SweepPlan(Path(config.hydra.sweep.dir), jobs, covering)

    def composed(self, *, job: int | None = None, writable: bool = True, sweeps: bool = False) -> Composed[ConfigT]:
        """Compose the options, and check every name and value.

        Args:
            job: number of the job in a sweep, which sets its folder; None for a single run.
            writable: True also checks that the run folder can be made, unless Hydra only prints the options.
            sweeps: True accepts presets that hold a sweep, as --multirun does, which alone uses more than the first
                value.

        Raises:
            ConfigError: if anything is wrong; the text is one sentence.
        """
        overrides = self.overrides
        try:
            with composing(overrides, self.main_file):
                loader = GlobalHydra.instance().config_loader()
                for item in OverridesParser.create().parse_overrides(overrides):
                    options = loader.get_group_options(item.key_or_group, ObjectType.CONFIG)
                    if options and isinstance(item.value(), int | float):  # for which Hydra raises a bare ValueError
                        raise ConfigError(did_you_mean(item.key_or_group, str(item.value()), options))
                config = self._loaded(completed(overrides))
                if self.runs_once and not sweeps:
                    _require_no_sweep(config, overrides)
                built = _finished(config, self.kind, writable and self.flags.cfg is None, job)
                check_overrides(overrides, config)
                return Composed(built, config, loader)
        finally:
            HydraConfig.instance().cfg = None

    def _loaded(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of these overrides with Hydra's own options, not yet checked."""
        search, config_dir = [], self.flags.config_dir  # a folder of the user's presets comes before the package's
        if config_dir is not None:
            require(Path(config_dir).is_dir(), "--config-dir", "name an existing folder", f"'{config_dir}'")
            search = [f"hydra.searchpath=[{in_quotes(str(Path(config_dir).resolve()))}]"]
        return hydra_compose(self.main_file, overrides=[*search, *overrides], return_hydra_config=True)

    def launch(self, run: Callable[[Any], object]) -> None:
        """Let Hydra run the jobs of a sweep, or print; it reads `sys.argv`."""
        sys.argv[1:] = self.words()
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        register()
        hydra.main(version_base="1.3", config_path=config_root(), config_name=self.main_file)(_reported(run))()


def _reported(task: Callable[[Any], object]) -> Callable[[Any], object]:
    """The task, ending the process with a sentence and an exit code where it fails."""

    @wraps(task)
    def reported(options: Any) -> object:
        with one_exit():
            return task(options)

    return reported


def checked(overrides: Sequence[str], kind: type[ConfigT], *, name: str = "config", **choices: bool) -> ConfigT:
    """Options of these overrides without flags, composed and checked.

    Args:
        overrides: overrides in Hydra's grammar, without sweeps.
        kind: dataclass of the whole configuration.
        name: name of the main configuration file.
        choices: `writable` and `sweeps` of `CommandLine.composed`.

    Raises:
        ConfigError: if anything is wrong; the text is one sentence.
    """
    return CommandLine.parse([], kind, name).of(overrides).composed(**choices).options


def _require_no_sweep(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a preset that holds a sweep for a single run, which would use none of the sweep's values."""
    if config.hydra.sweeper.get("params"):
        swept = ", ".join(map(str, config.hydra.sweeper.params))
        given = next((item for item in overrides if item.lstrip("+").startswith("experiment=")), "this preset")
        raise ConfigError(f"{given} is a sweep over {swept}, which one run would not make; add --multirun")
    if config.hydra.mode == RunMode.MULTIRUN:
        raise ConfigError("hydra.mode=MULTIRUN is a sweep; leave it out, and add --multirun")


def _choices(overrides: Sequence[str]) -> list[list[str]]:
    """Lists of the overrides that the values of each option make, one for each run; the last one of an option counts.

    An option keeps its first place, as in Hydra's `BasicSweeper`, so a value in place of a preset's axis keeps the
    order of the jobs.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    choices = {
        item.get_key_element(): [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
        if item.is_discrete_sweep()
        else [line]
        for item, line in zip(parsed, overrides, strict=True)
    }
    return list(choices.values())


def _finished(config: DictConfig, kind: type[ConfigT], writable: bool, job: int | None) -> ConfigT:
    """Fill in the values that Hydra sets when a run starts, and build the dataclasses."""
    with read_write(config), open_dict(config):
        is_named = any(line.startswith("hydra.run.dir=") for line in config.hydra.overrides.hydra)
        if job is None and not is_named and not OmegaConf.is_interpolation(config, "output_dir"):
            config.hydra.run.dir = "${output_dir}"  # so that the run's log and command line are in its folder
        folder, is_output = config.hydra.run.dir, "${output_dir}" in OmegaConf.to_yaml(config.hydra.run)
        config.hydra.mode = config.hydra.mode or RunMode.RUN
        if job is not None:
            config.hydra.job.num = job
            folder = f"{config.hydra.sweep.dir}/{config.hydra.sweep.subdir}"
        config.hydra.runtime.output_dir = str(Path(folder).absolute())
    HydraConfig.instance().set_config(config)
    own = config.copy()
    with read_write(own), open_dict(own):
        del own["hydra"]
    for option, is_declared in walk_options(own):
        if not is_declared:  # added with a plus, and read by no code
            raise ConfigError(unknown_option(option, own))
    built = typed(own, kind)
    if writable:
        if not is_output:
            _check_writable("hydra.run.dir" if job is None else "hydra.sweep.dir", Path(folder))
        _check_writable("output_dir", Path(own.output_dir))
    return built


def _check_writable(option: str, folder: Path) -> None:
    """Refuse a run folder that cannot be made, before anything is loaded.

    A folder is made for the check, since permission bits are not enough to decide.
    """
    parent = folder.absolute()
    while not os.path.lexists(parent):  # a link that leads nowhere cannot become a folder
        parent = parent.parent
    try:
        with TemporaryDirectory(prefix=".writable-", dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} must be a folder that can be written, got '{folder}' ({parent}: {error.strerror}); "
            f"set {option}=FOLDER"
        ) from error


def _unknown_flag(flag: str, kind: type, known: Sequence[str]) -> str:
    """Sentence about an unknown flag: an option that is set without dashes, or the most similar flag."""
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    options = list(_options("", kind))
    meant = [option for option in options if option.rpartition(".")[2] == name]
    meant += [option for option in nearest(name, options) if "." not in option]
    if meant:
        return f"unknown flag '{flag}'; options are set without dashes: {meant[0]}=VALUE"
    if (other := counterpart(name)) is not None:
        return f"unknown flag '{flag}'; {other}, without dashes"
    return did_you_mean("flag", flag, known)


def _options(prefix: str, kind: type) -> Iterator[str]:
    """Dotted names of all options; for the optimizer, only those that all optimizers share."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            yield from _options(f"{prefix}{field.name}.", cast(type, hints[field.name]))


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)

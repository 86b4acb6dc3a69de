"""Check of a command line before it runs: every group, option and value, and the run folder. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.schema.compose import ConfigT, config_root, typed
from rm_optimizer.schema.diagnose import all_names, explain, option_names, unknown_option
from rm_optimizer.schema.implied import completed, refuse_unread
from rm_optimizer.schema.store import register
from rm_optimizer.schema.values import require_switches


def checked(
    overrides: Sequence[str],
    kind: type[ConfigT],
    *,
    name: str = "config",
    config_dir: str | None = None,
    writable: bool = True,
    sweeps: bool = False,
    job: int | None = None,
) -> ConfigT:
    """Compose the options of these overrides, and check every name and value.

    Args:
        overrides: overrides of the command line, in Hydra's grammar, without sweeps.
        kind: dataclass of the whole configuration.
        name: name of the main configuration file.
        config_dir: folder of the user's presets, searched before the package's.
        writable: True also checks that the run folder can be made.
        sweeps: True accepts presets that hold a sweep, of which only --multirun uses more than the first value.
        job: number of the job in a sweep, which sets its folder; None for a single run.

    Raises:
        ConfigError: if anything is wrong; the text is one sentence.
    """
    try:
        with _hydra(overrides):
            _check_group_values(overrides, GlobalHydra.instance().config_loader())
            config = _composed(completed(overrides), name, config_dir)
            if not sweeps:
                _require_no_sweep(config, overrides)
            built = _finished(config, kind, writable, job)
            require_switches(config, overrides)
            refuse_unread(overrides, config)
            return built
    finally:
        HydraConfig.instance().cfg = None


def _require_no_sweep(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a preset that holds a sweep for a single run, which would use none of the sweep's values."""
    if config.hydra.sweeper.get("params"):
        swept = ", ".join(map(str, config.hydra.sweeper.params))
        given = next((item for item in overrides if item.lstrip("+").startswith("experiment=")), "this preset")
        raise ConfigError(f"{given} is a sweep over {swept}, which one run would not make; add --multirun")


def run_folder(overrides: Sequence[str], *, name: str = "config", config_dir: str | None = None) -> str:
    """The value of `hydra.run.dir` for these overrides, with times filled in.

    Raises:
        ConfigError: if an override is wrong.
    """
    with _hydra(overrides):
        return str(_composed(overrides, name, config_dir).hydra.run.dir)


@contextmanager
def _hydra(overrides: Sequence[str]) -> Iterator[None]:
    """Context in which Hydra composes; its errors become one sentence about the overrides."""
    register()
    try:
        with initialize_config_dir(config_root(), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error, overrides)) from error


def _composed(overrides: Sequence[str], name: str, config_dir: str | None) -> DictConfig:
    """The configuration with Hydra's own options, not yet checked."""
    search = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir must name an existing folder, got '{config_dir}'")
        search = [f"hydra.searchpath=[{in_quotes(str(Path(config_dir).resolve()))}]"]
    return hydra_compose(config_name=name, overrides=[*search, *overrides], return_hydra_config=True)


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


def planned_sweep(overrides: Sequence[str], *, name: str = "config", config_dir: str | None = None) -> SweepPlan:
    """The jobs that Hydra makes from the overrides and the sweeps in their presets, which come first.

    Args:
        overrides: overrides of the command line, in Hydra's grammar.
        name: name of the main configuration file.
        config_dir: folder of the user's presets, searched before the package's.

    Raises:
        ConfigError: if an override cannot be read or composed.
    """
    with _hydra(overrides):
        config = _composed([options[0] for options in _choices(overrides)], name, config_dir)
        of_presets = [f"{option}={values}" for option, values in (config.hydra.sweeper.get("params") or {}).items()]
        choices = _choices([*of_presets, *overrides])
    covering, stride = [0], 1
    for options in reversed(choices):
        covering += [stride * number for number in range(1, len(options))]
        stride *= len(options)
    return SweepPlan(Path(config.hydra.sweep.dir), [list(job) for job in product(*choices)], sorted(covering))


def _choices(overrides: Sequence[str]) -> list[list[str]]:
    """Lists of the overrides that the values of each override make, one for each run."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [
        [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
        if item.is_discrete_sweep()
        else [line]
        for item, line in zip(parsed, overrides, strict=True)
    ]


def _finished(config: DictConfig, kind: type[ConfigT], writable: bool, job: int | None) -> ConfigT:
    """Fill in the values that Hydra sets when a run starts, and build the dataclasses."""
    with read_write(config), open_dict(config):
        folder, is_output = config.hydra.run.dir, "${output_dir}" in OmegaConf.to_yaml(config.hydra.run)
        if job is not None:
            config.hydra.job.num = job
            folder = f"{config.hydra.sweep.dir}/{config.hydra.sweep.subdir}"
        config.hydra.runtime.output_dir = str(Path(folder).absolute())
    HydraConfig.instance().set_config(config)
    with read_write(config), open_dict(config):
        del config["hydra"]
    _check_known(config)
    built = typed(config, kind)
    if writable:
        if not is_output:
            _check_writable("hydra.run.dir" if job is None else "hydra.sweep.dir", Path(folder))
        _check_writable("output_dir", Path(config.output_dir))
    return built


def _check_group_values(overrides: Sequence[str], loader: ConfigLoader) -> None:
    """Refuse values such as `training=1`, for which Hydra raises a bare ValueError."""
    for item in OverridesParser.create().parse_overrides(list(overrides)):
        options = loader.get_group_options(item.key_or_group, ObjectType.CONFIG)
        if options and isinstance(item.value(), int | float):
            raise ConfigError(did_you_mean(item.key_or_group, str(item.value()), options))


def _check_known(config: DictConfig) -> None:
    """Refuse options added with `+` that no dataclass declares, since no code reads them."""
    declared = set(option_names(config))
    for option in all_names(config):
        if option not in declared:
            raise ConfigError(unknown_option(option, config))


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

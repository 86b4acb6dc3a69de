"""Trials that train a reward model, named by their options and the content of their pairs."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.study import PlannedTrial, planned_trial
from rm_optimizer.experiments.trial import SPEC_FILE, TrialSpec
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.run_options import decisive_options, options_of
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.config import LoggerConfig, Resume

TRAIN = "rm_optimizer.experiments.training_trials:train"
"""Name of the task of a study of training runs."""
_LONGEST = 128
"""Most characters of a name in W&B."""
RUN = Path("work", "run")
"""Path of the run folder inside the trial's folder."""


def require_shared(
    overrides: Sequence[str], owned: Mapping[str, str], study: str, *, but: Collection[str] = ()
) -> None:
    """Refuse flags, and overrides that have several values or that the study sets itself.

    Args:
        overrides: options of every trial, as name=value, or ~name to delete one.
        owned: options, and groups of them, that the study sets, each with the reason.
        study: name of the kind of study, for the message.
        but: options in these groups that may be set.

    Raises:
        ConfigError: if there is such an override, with its name.
    """
    for override in overrides:
        if override.startswith("-"):
            raise ConfigError(f"{study} takes options as name=value, got {override}; write name=value")
        name, _, value = override.lstrip("+~").partition("=")
        for option, reason in owned.items():
            if name == option or (name.startswith(f"{option}.") and name not in but):
                raise ConfigError(f"{study} sets {option} itself: {reason}; leave out {override}")
        if "," in value and not value.startswith(("[", "{", "'", '"')):
            raise ConfigError(
                f"options of {study} are the same in every run, got {override}; give one value, or write a list as "
                "name=[a,b]"
            )


def training_trial(label: str, config: TrainConfig) -> PlannedTrial:
    """A trial that trains with these options.

    Its name depends on the options that can change the result and on the content of the pairs, but not on their paths.

    Args:
        label: short text that distinguishes it from the other trials.
        config: options of the run, with absolute paths; its `output_dir` is not used.
    """
    options = options_of(config)
    identity = decisive_options(options, "data.train", "data.val")
    contents = _contents(config)
    return planned_trial(label, {"options": options, "contents": contents}, identity | {"contents": contents})


def train(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Train a reward model and return its validation metrics.

    A run that was killed continues from its checkpoint.

    Args:
        spec: `options` of the run, and the `contents` of its pairs.
        folder: folder of the trial's work; the run folder is its `run/`.

    Raises:
        ConfigError: if the files of the pairs were changed since the study was planned.
    """
    # These import torch, which is slow and not needed for a plan.
    from rm_optimizer.core.metrics.pairwise import ESTIMATES
    from rm_optimizer.training.run import run_training

    config = config_of(spec["options"])
    for name, content in _contents(config).items():
        if content != spec["contents"][name]:
            raise ConfigError(
                f"data.{name} holds other pairs than when the study was planned; put the former file back, or plan the "
                "study again in another folder"
            )
    logger = logged_in_study(config.logger, folder)
    run_dir = str(folder / RUN.name)
    result = run_training(replace(config, output_dir=run_dir, resume=Resume.auto, logger=logger))
    scores = {name: getattr(result.metrics, name).value for name in ESTIMATES}
    return scores | {
        "seed": result.seed,
        "optimizer": result.optimizer,
        "steps": result.steps,
        "best_step": result.best_step,
        "train_fingerprint": result.data.train_fingerprint,
    }


def logged_in_study(logger: LoggerConfig, folder: Path) -> LoggerConfig:
    """Options of the loggers of a trial's run, which in W&B has the study's group and the trial's label.

    Args:
        logger: options of the loggers; a name and a group in them are kept.
        folder: folder of the trial's work.
    """
    if not logger.wandb:
        return logger
    trial = TrialSpec.from_json((folder.parent / SPEC_FILE).read_text(encoding="utf-8"))
    study = folder.resolve().parents[2].name
    return replace(logger, name=logger.name or trial.label[:_LONGEST], group=logger.group or study[:_LONGEST])


def config_of(options: Mapping[str, Any]) -> TrainConfig:
    """The dataclasses of options from the result of `options_of`.

    Raises:
        ConfigError: if an option is unknown or out of its range.
    """
    base = compose([f"optimizer={options['optimizer']['name']}", "model=custom", "model.path=x", "output_dir=."])
    OmegaConf.set_struct(base, False)
    merged = OmegaConf.merge(base, dict(options))
    assert OmegaConf.is_dict(merged)
    return typed(merged, TrainConfig)  # type: ignore[arg-type]


def _contents(config: TrainConfig) -> dict[str, Any]:
    """Contents of the pairs of a run, as JSON values."""
    return {name: json_values(_content(getattr(config.data, name))) for name in ("train", "val")}


def _content(source: Any) -> Any:
    """Sources of pairs with paths replaced by the digests of their files, in order.

    Hub names remain.

    Hidden files of a folder are left out.
    """
    if isinstance(source, Mapping):
        return {name: _content(value) if name == "path" else value for name, value in source.items()}
    if isinstance(source, list | tuple):
        return [_content(item) for item in source]
    if not isinstance(source, str):
        return source
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if not each.name.startswith((".", "_")))
    else:
        found = [path] if path.exists() else [Path(each) for each in sorted(glob.glob(str(path)))]
    stats = [(each, each.stat()) for each in found if each.is_file()]
    return [_digest(str(each), stat.st_size, stat.st_mtime_ns) for each, stat in stats] or source


@cache
def _digest(path: str, size: int, changed: int) -> str:
    """SHA-256 of a file.

    Size and time of change are part of the key, so that a changed file is read again.
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

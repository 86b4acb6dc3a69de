"""Run folders and folders of analyses: files, names and what they may hold."""

from __future__ import annotations

import csv
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.records.ledger import whole_lines
from rm_optimizer.records.locations import BEST_FOLDER, EXPORT_FILE
from rm_optimizer.records.run_options import flat, options_of, require_same_options
from rm_optimizer.schema.config import Resume, TrainConfig
from rm_optimizer.schema.landscape import AnalyzeConfig

OPTIONS_FILE = "options.json"
"""The composed configuration of the run."""
IDENTITY_FILE = "identity.json"
"""The run's id, the absolute paths of its pairs and their fingerprints."""
RESULT_FILE = "run.json"
"""The result of a finished run."""
DIVERGED_FILE = "diverged.json"
"""The error of a run whose numbers stopped being finite; a run that starts or continues removes it."""
METRICS_FILE = "metrics.csv"
"""Metrics, one row for each optimizer step."""
PAIR_REWARDS_FILE = "pair_rewards.jsonl"
"""Rewards, one JSON line for each validation pair; see `PairReward`."""
DOCTOR_FILE = "doctor.json"
"""The diagnosis of the exported model, if `rm-opt doctor` made one."""
SUITE_FILE = "suite.json"
"""The scores of models on a suite, in the folder of `rm-opt evaluate --suite`."""
EXPORT = f"{BEST_FOLDER}/{EXPORT_FILE}"
"""The record of the exported best model."""
RESULTS = (
    *("checkpoints/step-*.ckpt", "checkpoints/best.ckpt", RESULT_FILE, EXPORT, METRICS_FILE),
    *("evaluations/step-*/metrics.json", PAIR_REWARDS_FILE),
)
"""Patterns of the files of a run that another run in the same folder would mix with its own."""
_OF_A_RUN = frozenset({"data", "loss", "seed", "optimizer"})


@dataclass(frozen=True, kw_only=True)
class RunIdentity(JsonRecord, indent=2):
    """The identity of a run, `identity.json` in its folder.

    Args:
        run_id: 16 hexadecimal digits, which each of its checkpoints contains.
        directory: working directory in which the run was started.
        sources: `data.train` and `data.val` with absolute paths; empty if the pairs came from memory.
        train_fingerprint: digest of the training pairs.
        val_fingerprint: digest of the validation pairs.
    """

    run_id: str
    directory: str
    sources: dict[str, Any]
    train_fingerprint: str
    val_fingerprint: str


@dataclass(frozen=True)
class PairReward:
    """Rewards of a pair, one line of `pair_rewards.jsonl`.

    Args:
        pair_id: identity of prompt and both responses.
        prompt_id: identity of the prompt.
        label: probability that `chosen` is the better response.
        chosen: reward of the preferred response.
        rejected: reward of the other response.
        weight: number of pairs that this pair counts as.
    """

    pair_id: str
    prompt_id: str
    label: float
    chosen: float
    rejected: float
    weight: float = 1.0


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run or an evaluation, with the contents of its files as values."""

    path: Path

    @classmethod
    def of(cls, checkpoint: str) -> RunFolder | None:
        """The run folder of a checkpoint: its path, or one of the two folders above it; None if none is a run's."""
        path = Path(checkpoint).expanduser()
        return next((run for run in map(cls, (path, *path.parents[:2])) if run.options), None)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the run; empty if none are recorded."""
        content = _json(self.path / OPTIONS_FILE)
        return content if content.keys() >= _OF_A_RUN else {}

    @property
    def identity(self) -> RunIdentity | None:
        """The identity of the run; None if none is recorded."""
        content = _json(self.path / IDENTITY_FILE)
        return from_values(RunIdentity, content) if content.keys() >= RunIdentity.__dataclass_fields__.keys() else None

    @property
    def results(self) -> list[str]:
        """Paths of the run's files that match `RESULTS`, relative to the folder."""
        return [str(path.relative_to(self.path)) for pattern in RESULTS for path in sorted(self.path.glob(pattern))]

    @property
    def is_used(self) -> bool:
        """True if the folder holds a run or parts of one."""
        has_weights = bool(self.checkpoints) or self.best_checkpoint.exists() or (self.path / EXPORT).exists()
        return has_weights or bool(self.options) or self.identity is not None

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The periodic checkpoints by optimizer step, ascending."""
        paths = sorted(self.best_checkpoint.parent.glob("step-*.ckpt"))
        return {checkpoint_step(path): path for path in paths if path.stem.removeprefix("step-").isdigit()}

    @property
    def best_checkpoint(self) -> Path:
        """Path of the weights of the best evaluation."""
        return self.path / "checkpoints" / "best.ckpt"

    @property
    def export(self) -> Path:
        """Folder of the exported best model, which `transformers` loads."""
        return self.path / BEST_FOLDER

    @property
    def best_step(self) -> int | None:
        """Optimizer step of the best evaluation, whose weights the run exported; None before the run has ended."""
        step = _json(self.path / RESULT_FILE).get("best_step")
        return step if isinstance(step, int) else None

    @property
    def divergence(self) -> str | None:
        """Error of a run that diverged; None for any other run."""
        error = _json(self.path / DIVERGED_FILE).get("error")
        return error if isinstance(error, str) else None

    def metrics(self, last_step: int | None = None) -> list[dict[str, str]]:
        """Rows of `metrics.csv`, see `read_rows`."""
        return read_rows(self.path / METRICS_FILE, last_step)

    def pair_rewards(self) -> list[PairReward]:
        """Rows of `pair_rewards.jsonl`.

        Raises:
            DataError: if the file is missing or a line of it is damaged.
        """
        path, rows = self.path / PAIR_REWARDS_FILE, []
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                rows.append(from_values(PairReward, json.loads(line)))
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing, which holds the rewards of each validation pair") from error
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}, line {len(rows) + 1}, is not the rewards of a pair: the file is damaged"
            ) from error
        return rows

    def landscape(self, checkpoint: str, kind: str) -> Path:
        """The folder of an analysis of one of the run's checkpoints, with the step in its name for a periodic one.

        Example:
            >>> RunFolder(Path("run")).landscape("run/checkpoints/step-00000010.ckpt", "hessian").as_posix()
            'run/landscape/hessian-step-00000010'
        """
        path = Path(checkpoint).expanduser()
        step = f"-{path.stem}" if path.suffix == ".ckpt" and path.stem.startswith("step-") else ""
        return self.path / "landscape" / f"{kind}{step}"


def checkpoint_step(path: Path) -> int:
    """Number of optimizer steps before a periodic checkpoint was saved."""
    return int(path.stem.removeprefix("step-"))


def read_rows(path: Path, last_step: int | None = None) -> list[dict[str, str]]:
    """Rows of a table of steps, such as `metrics.csv`, as text; an unfinished last line is left out.

    Args:
        path: the file; a missing file has no rows.
        last_step: last step whose row is included; None includes all rows.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        rows = list(csv.DictReader(line.decode() for line in whole_lines(file)))
    return rows if last_step is None else [row for row in rows if int(row["step"]) <= last_step]


def require_usable(config: TrainConfig) -> None:
    """Refuse to start a run in a folder that holds another run, or to continue a run with other options.

    Args:
        config: options of the run that is to start.

    Raises:
        ConfigError: if the folder cannot be used, with its contents and the ways out.
    """
    folder, resume = Path(config.output_dir), config.resume
    run = RunFolder(folder)
    export, is_replaced = run.export, resume == Resume.restart and run.is_used
    is_free = is_replaced or not os.path.lexists(export) or (export / EXPORT_FILE).is_file()
    if not is_free and (not export.is_dir() or any(export.iterdir())):
        raise ConfigError(
            f"{_shown(export)} is where a run puts its model, but holds no export of ours; choose another hydra.run.dir"
        )
    results = run.results
    if not results:
        return
    held = f"{_shown(folder)} already holds {results[0]}"
    if not run.is_used:
        raise ConfigError(f"{held}, which a run would overwrite, but no run; choose another hydra.run.dir")
    if resume == Resume.none:
        raise ConfigError(
            f"{held} of another run; resume=auto continues that run, resume=restart removes it and starts anew, or "
            "choose another hydra.run.dir"
        )
    before = run.options or _json(folder / RESULT_FILE).get("config")
    if resume == Resume.auto and before:
        require_same_options(before, options_of(config))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _shown(folder: Path) -> str:
    """The folder relative to the working directory if it is inside it, else as it is."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative


def require_no_run(folder: Path, option: str) -> None:
    """Refuse the folder of a run or a model for other results, which would replace its own.

    Args:
        folder: the folder, which may be missing.
        option: name of the option or argument, for the message.

    Raises:
        ConfigError: naming the file that tells.
    """
    if found := [name for name in (OPTIONS_FILE, RESULT_FILE, "config.json") if (folder / name).exists()]:
        raise ConfigError(
            f"{option} must not be the folder of a run or a model, got '{folder}' (it holds {found[0]}); name another"
        )


ANALYSIS_FILE = "analysis.json"
"""File next to the results with their options, versions and machine."""
_FREE = ("output_dir", "progress", "landscape.token_budget", "landscape.processes", "logger.")
"""Names, or beginnings of names, of the options that change no result."""


def results_folder(options: AnalyzeConfig) -> Path:
    """The folder that an analysis writes to: `output_dir`, with a number added if it holds another analysis of the run.

    Raises:
        ConfigError: if the folder holds another analysis and is not the default folder of a run's checkpoint.
    """
    folder, identity = Path(options.output_dir), _identity(options_of(options))
    if _is_for(folder, identity):
        return folder
    run = RunFolder.of(options.checkpoint)
    if run is None or folder != run.landscape(options.checkpoint, options.landscape.type):
        found = _recorded(folder)
        kind = {"type": None, "params": None} | found.get("landscape", {})
        told = f"checkpoint={found['checkpoint']}, landscape={kind['type']}, params={kind['params']}"
        raise ConfigError(f"{folder} holds the results of another analysis ({told}); choose another output_dir")
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(other for other in numbered if _is_for(other, identity))


def _is_for(folder: Path, identity: dict[str, Any]) -> bool:
    """True if a folder holds no analysis, or the one with this identity."""
    recorded = _recorded(folder)
    return not recorded or _identity(recorded) == identity


def _identity(options: dict[str, Any]) -> dict[str, Any]:
    """The options that decide a result, with an existing checkpoint as an absolute path."""
    path = os.path.expanduser(options["checkpoint"])
    decisive = dict(flat(options)) | {"checkpoint": os.path.realpath(path) if os.path.exists(path) else path}
    return {name: value for name, value in decisive.items() if not name.startswith(_FREE)}


def _recorded(folder: Path) -> dict[str, Any]:
    """The options of the analysis in a folder; empty without one."""
    options = _json(folder / ANALYSIS_FILE).get("options")
    return options if isinstance(options, dict) and "checkpoint" in options else {}

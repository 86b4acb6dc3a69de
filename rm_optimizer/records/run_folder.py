"""A run folder belongs to one run: the files that mark it, and who may start in it. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.records.run_options import options_of, require_same_options
from rm_optimizer.schema.config import Resume, TrainConfig

OPTIONS_FILE = "options.json"
"""The composed configuration that training leaves in the run folder."""
IDENTITY_FILE = "identity.json"
"""The run's id, the absolute paths of its pairs and their fingerprints."""
RESULT_FILE = "run.json"
"""The result of a finished run."""
RESULTS = (
    *("checkpoints/step-*.ckpt", "checkpoints/best.ckpt", RESULT_FILE, "best/export.json", "metrics.csv"),
    *("evaluations/step-*/metrics.json", "pair_rewards.jsonl"),
)
"""Files, as patterns, that a run leaves and another would mix with its own."""
_OF_A_RUN = frozenset({"data", "loss", "seed", "optimizer"})


@dataclass(frozen=True, kw_only=True)
class RunIdentity(JsonRecord, indent=2):
    """The identity of a run, `identity.json` in its folder.

    Args:
        run_id: 16 hexadecimal digits that each of its checkpoints carries.
        directory: the working directory that the run was started in.
        sources: `data.train` and `data.val` with absolute paths; empty where the pairs came from memory.
        train_fingerprint: digest of the training pairs.
        val_fingerprint: digest of the validation pairs.
    """

    run_id: str
    directory: str
    sources: dict[str, Any]
    train_fingerprint: str
    val_fingerprint: str


def read_identity(folder: Path) -> RunIdentity | None:
    """The identity of the run in a folder; None where none is recorded."""
    content = _json(folder / IDENTITY_FILE)
    return from_values(RunIdentity, content) if content.keys() >= RunIdentity.__dataclass_fields__.keys() else None


def read_options(folder: Path) -> dict[str, Any]:
    """The options of the run in a folder; empty where none are recorded."""
    content = _json(folder / OPTIONS_FILE)
    return content if content.keys() >= _OF_A_RUN else {}


def results_in(folder: Path) -> list[str]:
    """Files in a folder that a run left, relative to it."""
    return [str(path.relative_to(folder)) for pattern in RESULTS for path in sorted(folder.glob(pattern))]


def is_run_folder(folder: Path) -> bool:
    """True if a folder holds a run, or the remains of one."""
    marks = ("checkpoints/step-*.ckpt", "checkpoints/best.ckpt", "best/export.json")
    is_marked = any(next(folder.glob(mark), None) is not None for mark in marks)
    return is_marked or bool(read_options(folder)) or read_identity(folder) is not None


def require_usable(config: TrainConfig) -> None:
    """Refuse to start a run in a folder that holds another, or to continue one under other options.

    Args:
        config: the composed options; `output_dir` is the folder.

    Raises:
        ConfigError: naming the folder, what is in it and what can be done.
    """
    folder = Path(config.output_dir)
    if not (config.resume == Resume.restart and is_run_folder(folder)):
        _require_replaceable(folder / "best")
    results = results_in(folder)
    if not results:
        return
    held = f"{_shown(folder)} already holds {results[0]}"
    if not is_run_folder(folder):
        raise ConfigError(f"{held}, which a run would overwrite, but no run; choose another hydra.run.dir")
    if config.resume == Resume.none:
        raise ConfigError(
            f"{held} of another run; resume=auto continues that run, resume=restart removes it and starts anew, or "
            "choose another hydra.run.dir"
        )
    before = read_options(folder) or _json(folder / RESULT_FILE).get("config")
    if config.resume == Resume.auto and before:
        require_same_options(before, options_of(config))


def _require_replaceable(export: Path) -> None:
    """Refuse, before training rather than after it, a folder of the export's name that holds something else."""
    if not os.path.lexists(export) or (export / "export.json").is_file():
        return
    if not export.is_dir() or any(export.iterdir()):
        raise ConfigError(
            f"{_shown(export)} is where a run puts its model, but holds no export of ours; choose another hydra.run.dir"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _shown(folder: Path) -> str:
    """The folder as a user would type it from here."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative

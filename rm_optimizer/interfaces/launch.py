"""Flags of `rm-opt train` as overrides, and the process it becomes. Imports neither Hydra nor torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rm_optimizer.errors import ConfigError

PLAIN = re.compile(r"[A-Za-z_./][\w./:@-]*", re.ASCII)
"""Text that Hydra's grammar reads as itself, without quotes."""

RESERVED = frozenset({"null", "true", "false", "nan", "inf"})


def train_overrides(
    *,
    model: str | None = None,
    optimizer: str | None = None,
    data: str | None = None,
    epochs: str | None = None,
    batch_size: str | None = None,
) -> list[str]:
    """The overrides that the flags stand for; a flag that was not given adds none.

    Args:
        model: preset of the model group, or else the path or hub id of a model, written with a slash.
        optimizer: preset of the optimizer group.
        data: a file, folder or hub name, or else a preset of the data group.
        epochs: passes over the training pairs.
        batch_size: pairs of one optimizer step.

    Raises:
        ConfigError: if `model` is an override, as after Hydra's own `-m`.

    Example:
        >>> train_overrides(model="tiny", data="pairs.jsonl")
        ['model=tiny', 'data.train=pairs.jsonl']
    """
    if model is not None and "=" in model and not Path(model).exists():
        raise ConfigError(f"-m takes a model preset or path, got '{model}'; for a sweep write --multirun {model}")
    given = {
        "model.path" if model is not None and names_model(model) else "model": model,
        "optimizer": optimizer,
        "data.train" if data is not None and names_data(data) else "data": data,
        "training.epochs": epochs,
        "batching.batch_size": batch_size,
    }
    return [f"{option}={quoted(value)}" for option, value in given.items() if value is not None]


def analyze_overrides(
    *,
    checkpoint: str | None = None,
    kind: str | None = None,
    data: str | None = None,
    top_k: str | None = None,
    method: str | None = None,
    pairs: str | None = None,
    params: str | None = None,
) -> list[str]:
    """The overrides that the flags of `rm-opt analyze` stand for; a flag that was not given adds none.

    Args:
        checkpoint: run folder, exported folder, `.ckpt` or hub id.
        kind: preset of the landscape group.
        data: a file, folder or hub name.
        top_k: eigenvalues to compute.
        method: how to compute them.
        pairs: pairs that the loss is averaged over.
        params: which parameters.

    Example:
        >>> analyze_overrides(checkpoint="runs/a", kind="density", params="*.layers.0.*")
        ['checkpoint=runs/a', 'landscape=density', "landscape.params='*.layers.0.*'"]
    """
    given = {
        "checkpoint": checkpoint,
        "landscape": kind,
        "data.train": data,
        "landscape.top_k": top_k,
        "landscape.method": method,
        "landscape.num_pairs": pairs,
        "landscape.params": params,
    }
    return [f"{option}={quoted(value)}" for option, value in given.items() if value is not None]


def names_model(value: str) -> bool:
    """Whether `--model` got the path or hub id of a model rather than a preset.

    Example:
        >>> names_model("models/llama"), names_model("Qwen/Qwen3-0.6B"), names_model("llama")
        (True, True, False)
    """
    return "/" in value or os.sep in value or value.startswith((".", "~"))


def names_data(value: str) -> bool:
    """Whether `--data` got a path or hub name rather than a preset.

    Example:
        >>> names_data("org/preferences"), names_data("default")
        (True, False)
    """
    return "/" in value or "." in value or Path(value).exists()


def quoted(value: str) -> str:
    r"""Write text so that Hydra's grammar gives the same text back; numbers stay numbers.

    Example:
        >>> quoted("pairs.jsonl"), quoted("3"), quoted("my file.csv")
        ('pairs.jsonl', '3', "'my file.csv'")
    """
    if (PLAIN.fullmatch(value) and value.lower() not in RESERVED) or re.fullmatch(r"-?[0-9][0-9.e+-]*", value):
        return value
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", value)) + "'"


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module arguments…`, so that distributed children can repeat its command line.

    Args:
        module: what to run.
        arguments: passed on as they are.
    """
    command = [sys.executable, "-m", module, *arguments]
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # -m would import a datasets.py of the user's folder as the library
    if os.name == "nt":  # there, execv returns to the shell before the new program ends
        sys.exit(subprocess.run(command, check=False).returncode)
    sys.stdout.flush()
    os.execv(sys.executable, command)

"""Flags of a command as overrides, and the program that replaces it. Imports neither Hydra nor torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rm_optimizer.records.quoting import in_quotes

PLAIN = re.compile(r"[A-Za-z_./][\w./:@-]*", re.ASCII)
"""Text that needs no quotes in Hydra's grammar."""

RESERVED = frozenset({"null", "true", "false", "nan", "inf"})


def as_overrides(given: Mapping[str, str | None]) -> list[str]:
    """Overrides for the given options, in Hydra's grammar; a mapping in braces stays one.

    Example:
        >>> as_overrides({"checkpoint": "runs/a", "landscape": None, "landscape.params": "*.layers.0.*"})
        ['checkpoint=runs/a', "landscape.params='*.layers.0.*'"]
        >>> as_overrides({"data.train": "{path: a.csv, weight: 2}"})
        ['data.train={path: a.csv, weight: 2}']
    """
    words = {name: value for name, value in given.items() if value is not None}
    return [f"{name}={value if value.startswith('{') else quoted(value)}" for name, value in words.items()]


def names_model(value: str) -> bool:
    """True if `--model` is the path or hub id of a model, False for a preset.

    Example:
        >>> names_model("models/llama"), names_model("Qwen/Qwen3-0.6B"), names_model("llama")
        (True, True, False)
    """
    return "/" in value or os.sep in value or value.startswith((".", "~"))


def names_data(value: str) -> bool:
    """True if `--data` is a path, a hub name or a mapping of a source, False for a preset.

    Example:
        >>> names_data("org/preferences"), names_data("default")
        (True, False)
    """
    return "/" in value or "." in value or value.startswith("{") or Path(value).exists()


def quoted(value: str) -> str:
    r"""Quote text so that Hydra's grammar reads the same text; numbers stay numbers.

    Example:
        >>> quoted("pairs.jsonl"), quoted("3"), quoted("my file.csv")
        ('pairs.jsonl', '3', "'my file.csv'")
    """
    if (PLAIN.fullmatch(value) and value.lower() not in RESERVED) or re.fullmatch(r"-?[0-9][0-9.e+-]*", value):
        return value
    return in_quotes(value)


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module arguments…`; the processes of a distributed run repeat this line."""
    command = [sys.executable, "-m", module, *arguments]
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # else -m imports a user's datasets.py as the library
    if os.name == "nt":  # on Windows, execv returns to the shell before the new program ends
        sys.exit(subprocess.run(command, check=False).returncode)
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `one_exit`, while Python starts
    os.execv(sys.executable, command)

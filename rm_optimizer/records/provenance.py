"""Provenance of a result: versions, commit and machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rm_optimizer

PACKAGES = ("torch", "transformers", "pytorch-lightning", "tokenizers", "hydra-core", "numpy", "datasets", "peft")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the installed packages that affect results."""
    found = {"python": platform.python_version(), "rm-optimizer": rm_optimizer.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of this package's checkout, with `-dirty` if files differ from it; None for an installed wheel."""
    root = Path(rm_optimizer.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, str]:
    """Processor, cores and operating system, in words that fit a results table."""
    return {
        "processor": _processor(),
        "cores": str(num_cores()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

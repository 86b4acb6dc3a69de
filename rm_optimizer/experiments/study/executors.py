"""Executors of trials: in this process, in a new interpreter for each trial, or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rm_optimizer.errors import ConfigError, MissingExtra, did_you_mean
from rm_optimizer.experiments.study.trial import OUTPUT_FILE, STOPPED, Trial
from rm_optimizer.records.provenance import num_cores

_MODULE = "rm_optimizer.experiments.study.trial"


class Executor(Protocol):
    """Executor of trials, of which at most `slots` run at a time."""

    slots: int

    def start(self, folder: Path) -> None:
        """Start the trial of a folder."""

    def ended(self, seconds: float) -> list[tuple[Path, int]]:
        """Folders and exit codes of trials that ended, after a wait of at most `seconds`."""

    def stop(self) -> None:
        """Stop all trials, and return once they have ended."""


class InlineExecutor:
    """Executor that runs each trial in this process."""

    slots = 1

    def __init__(self) -> None:
        self._ended: list[tuple[Path, int]] = []

    def start(self, folder: Path) -> None:
        """Run the trial to its end.

        Raises:
            KeyboardInterrupt: if the user stopped it.
        """
        if (code := Trial(folder).measure()) == STOPPED:
            raise KeyboardInterrupt
        self._ended.append((folder, code))

    def ended(self, seconds: float) -> list[tuple[Path, int]]:
        """The trials that ran since the last call."""
        ended, self._ended = self._ended, []
        if not ended:
            time.sleep(seconds)
        return ended

    def stop(self) -> None:
        """Do nothing, since no trial runs outside `start`."""


class ProcessExecutor:
    """Executor that runs each trial in a new interpreter, which shares nothing with the others.

    Args:
        slots: most trials at a time.
        threads: number of CPU threads of each trial.
        devices: names for `CUDA_VISIBLE_DEVICES`, one for each slot; if empty, the variable is not changed.
    """

    def __init__(self, slots: int, threads: int, devices: Sequence[str] = ()) -> None:
        self.slots = slots
        self._threads = threads
        self._devices = [*devices]
        self._running: dict[Path, tuple[subprocess.Popen[bytes], str | None]] = {}

    def start(self, folder: Path) -> None:
        """Start the trial's process; its output goes to `output.log` in the trial's folder."""
        device = self._devices.pop() if self._devices else None
        with (folder / OUTPUT_FILE).open("ab") as output:
            process = subprocess.Popen(
                _command(folder),
                env=_environment(self._threads) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running[folder] = (process, device)

    def ended(self, seconds: float) -> list[tuple[Path, int]]:
        """Folders and exit codes of processes that ended."""
        deadline = time.monotonic() + seconds
        while True:
            ended = [
                (folder, code) for folder, (process, _) in self._running.items() if (code := process.poll()) is not None
            ]
            if ended or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for folder, _ in ended:
            _, device = self._running.pop(folder)
            self._devices += [] if device is None else [device]
        return ended

    def stop(self) -> None:
        """Terminate each process, and kill those that have not ended after ten seconds."""
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


class RayExecutor:
    """Executor that runs each trial in a new interpreter on a Ray cluster, whose nodes all have the study's folder.

    Args:
        threads: number of CPUs of each trial.
        gpus: number of GPUs of each trial, which may be a fraction.
        address: address of the cluster; None uses `RAY_ADDRESS`, or starts Ray on this machine.

    Raises:
        MissingExtra: if Ray is not installed.
    """

    def __init__(self, threads: int, gpus: float = 0.0, address: str | None = None) -> None:
        self._ray = connected_ray(address)
        resources = self._ray.cluster_resources()
        most = resources.get("CPU", 1) // threads
        self.slots = max(1, int(min(most, resources.get("GPU", 0) // gpus) if gpus else most))
        self._remote = self._ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_measure)
        self._threads = threads
        self._running: dict[Any, Path] = {}

    def start(self, folder: Path) -> None:
        """Submit the trial to the cluster."""
        self._running[self._remote.remote(str(folder.resolve()), self._threads)] = folder

    def ended(self, seconds: float) -> list[tuple[Path, int]]:
        """Folders and exit codes of tasks that ended; the code of a lost worker is -9."""
        if not self._running:
            time.sleep(seconds)
            return []
        done, _ = self._ray.wait([*self._running], num_returns=1, timeout=seconds)
        found = []
        for task in done:
            try:
                code = int(self._ray.get(task))
            except self._ray.exceptions.RayError:
                code = -9
            found.append((self._running.pop(task), code))
        return found

    def stop(self) -> None:
        """Cancel the running trials."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()


def connected_ray(address: str | None = None) -> Any:
    """The `ray` module, connected to a cluster.

    Args:
        address: address of the cluster; None uses `RAY_ADDRESS`, or starts Ray on this machine.

    Raises:
        MissingExtra: if Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    return ray


def executor_named(name: str, workers: int | None) -> Executor:
    """An executor by its name, with the cores and GPUs of this machine divided among the trials.

    Args:
        name: inline, process or ray.
        workers: number of trials at a time; None means one for each GPU, or one without GPUs.

    Raises:
        ConfigError: if the name is unknown, or `inline` has several workers.
    """
    cores = num_cores()
    if name == "inline" and workers not in (None, 1):
        raise ConfigError("--executor inline runs one trial at a time; leave out --workers, or take --executor process")
    if name == "inline":
        return InlineExecutor()
    if name == "process":
        devices = _devices()
        slots = workers or max(1, len(devices))
        return ProcessExecutor(slots, max(1, cores // slots), devices[:slots])
    if name == "ray":
        return RayExecutor(max(1, cores // (workers or 1)), gpus=1.0 if _devices() else 0.0)
    raise ConfigError(did_you_mean("--executor", name, ("inline", "process", "ray")))


def _devices() -> list[str]:
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def _measure(folder: str, threads: int) -> int:
    """Run the trial's process on the node of this task, and return its exit code."""
    with Path(folder, OUTPUT_FILE).open("ab") as output:
        command = _command(Path(folder))
        return subprocess.run(command, env=_environment(threads), stdout=output, stderr=output, check=False).returncode


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", _MODULE, str(folder)]


def _environment(threads: int) -> dict[str, str]:
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**os.environ, **counts, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}

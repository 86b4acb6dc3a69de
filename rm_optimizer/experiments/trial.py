"""Trial in its folder, claimed by one process and finished when `result.json` exists, and executors of trials.

The operating system releases the claim of a process that ends, even after a kill.

`python -m rm_optimizer.experiments.trial FOLDER` measures the trial in a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from rm_optimizer.core.streaming.workers import connected_ray
from rm_optimizer.errors import ConfigError, Interrupted, TrainingDiverged, require_known
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import locked, sign, write_text
from rm_optimizer.records.provenance import num_cores

SPEC_FILE, RESULT_FILE, FAILURE_FILE, CLAIM_FILE = "spec.json", "result.json", "failure.json", "claim"
OUTPUT_FILE = "output.log"
"""Output of a trial's process, in the trial's folder."""
WORK = "work"
"""Folder for the task's files; it is kept between attempts, so that a task can continue after a kill."""
CLAIMED, FAILED, STOPPED = 75, 1, 130
"""Exit codes of a trial that another process holds, of a failed one and of a stopped one."""
RecordT = TypeVar("RecordT", bound=JsonRecord)


def stored(kind: type[RecordT], path: Path, *, remedy: str) -> RecordT | None:
    """Record of a file, or None without the file.

    Args:
        kind: class of the record.
        path: the file.
        remedy: end of the message about a damaged file.

    Raises:
        ConfigError: if the file is damaged.
    """
    try:
        return kind.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged{remedy}") from error


@dataclass(frozen=True, kw_only=True)
class TrialSpec(JsonRecord, indent=1):
    """The trial of a folder, `spec.json`.

    Args:
        task: function that measures it, as `package.module:name`.
        label: short text that distinguishes it from the other trials.
        spec: JSON values with which the task is called.
    """

    task: str
    label: str
    spec: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrialResult(JsonRecord, indent=1):
    """The outcome of a trial, `result.json`.

    A diverged trial has a result too.

    Args:
        status: `finished` or `diverged`.
        values: numbers that the task returned; empty for a diverged trial.
        seconds: wall seconds of the last attempt.
        attempts: number of attempts, including the last one.
        error: error message of a diverged trial; None for a finished one.
    """

    status: str
    values: dict[str, float | int | str | None]
    seconds: float
    attempts: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrialFailure(JsonRecord, indent=1):
    """Failed attempts of a trial without a result, `failure.json`.

    Args:
        attempts: number of failed attempts.
        error: error of the last one.
        traceback: traceback of this error.
    """

    attempts: int
    error: str
    traceback: str


@dataclass(frozen=True)
class Trial:
    """The trial of a folder.

    Args:
        folder: the folder.
    """

    folder: Path

    @property
    def result(self) -> TrialResult | None:
        """The outcome; None before the end."""
        return self._stored(TrialResult, RESULT_FILE)

    @property
    def failure(self) -> TrialFailure | None:
        """Failed attempts; None if there are none."""
        return self._stored(TrialFailure, FAILURE_FILE)

    def _stored(self, kind: type[RecordT], name: str) -> RecordT | None:
        remedy = ", or of another version; remove it to measure the trial again"
        return stored(kind, self.folder / name, remedy=remedy)

    @property
    def attempts(self) -> int:
        """Number of failed attempts so far."""
        return self.failure.attempts if self.failure else 0

    @property
    def is_claimed(self) -> bool:
        """True while a living process measures the trial."""
        try:
            file = (self.folder / CLAIM_FILE).open("r+")
        except OSError:
            return False
        with file:  # closing it releases the lock that this look took
            return not locked(file)

    def fail(self, error: str, where: str = "") -> None:
        """Record a failed attempt."""
        record = TrialFailure(attempts=self.attempts + 1, error=error, traceback=where)
        write_text(self.folder / FAILURE_FILE, record.to_json() + "\n")

    def measure(self) -> int:
        """Claim and measure the trial, unless it is finished, and return an exit code.

        An error of the task is recorded and gives `FAILED`. Only a stop by the user gives `STOPPED`.

        Raises:
            ConfigError: if the file system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / CLAIM_FILE).open("a+") as claim:
            try:
                if not locked(claim):
                    return CLAIMED
            except OSError as error:
                raise ConfigError(
                    f"a study needs a file system with locks, but {self.folder} is on one without ({error.strerror}); "
                    "choose another folder"
                ) from error
            sign(claim)
            if self.result is not None:  # another driver finished it before the claim
                return 0
            started, attempts = time.monotonic(), self.attempts + 1
            status, values, sentence = "finished", {}, None
            try:
                spec = TrialSpec.from_json((self.folder / SPEC_FILE).read_text(encoding="utf-8"))
                work = self.folder / WORK
                work.mkdir(exist_ok=True)
                module, _, name = spec.task.partition(":")
                values = dict(getattr(import_module(module), name)(spec.spec, work))
            except TrainingDiverged as error:
                status, sentence = "diverged", str(error)
            except (KeyboardInterrupt, Interrupted):
                return STOPPED
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
                return FAILED
            seconds = time.monotonic() - started
            result = TrialResult(status=status, values=values, seconds=seconds, attempts=attempts, error=sentence)
            # In this order: a kill in between leaves a finished trial.
            write_text(self.folder / RESULT_FILE, result.to_json() + "\n")
            (self.folder / FAILURE_FILE).unlink(missing_ok=True)
            return 0


class InlineExecutor:
    """Executor that runs each trial in this process."""

    slots = 1

    def start(self, folder: Path) -> int:
        """Run the trial to its end, and return its exit code.

        Raises:
            KeyboardInterrupt: if the user stopped it.
        """
        if (code := Trial(folder).measure()) == STOPPED:
            raise KeyboardInterrupt
        return code

    def code(self, handle: int) -> int:
        """The exit code."""
        return handle

    def stop(self, handles: Sequence[int]) -> None:
        """Do nothing, since no trial runs outside `start`."""


class ProcessExecutor:
    """Executor that runs each trial in a new interpreter, which shares nothing with the others.

    Args:
        slots: most trials at a time.
        threads: number of CPU threads of each trial.
        devices: names for `CUDA_VISIBLE_DEVICES`, one for each slot; if empty, the variable is not changed.
    """

    def __init__(self, slots: int, threads: int, devices: Sequence[str] = ()) -> None:
        self.slots, self._threads = slots, threads
        self._free = [*devices]
        self._used: dict[subprocess.Popen[bytes], str] = {}

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start the trial's process."""
        if not self._free:
            return _started(folder, self._threads)
        process = _started(folder, self._threads, CUDA_VISIBLE_DEVICES=self._free[-1])
        self._used[process] = self._free.pop()
        return process

    def code(self, handle: subprocess.Popen[bytes]) -> int | None:
        """Exit code of the process; its device is free again."""
        code = handle.poll()
        if code is not None and handle in self._used:
            self._free.append(self._used.pop(handle))
        return code

    def stop(self, handles: Sequence[subprocess.Popen[bytes]]) -> None:
        """Terminate each process, and kill those that have not ended after ten seconds."""
        for process in handles:
            process.terminate()
        for process in handles:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class RayExecutor:
    """Executor that runs each trial in a new interpreter on a Ray cluster, whose nodes all have the study's folder.

    Args:
        threads: number of CPUs of each trial.
        gpus: number of GPUs of each trial, which may be a fraction.
        address: address of the cluster; None uses `RAY_ADDRESS`, or starts Ray on this machine.

    Raises:
        MissingExtra: if Ray is not installed.
        ConfigError: if no machine of the cluster has so many CPUs and GPUs.
    """

    def __init__(self, threads: int, gpus: float = 0.0, address: str | None = None) -> None:
        self._ray = connected_ray(address, num_cpus=num_cores())
        need = {"CPU": threads, **({"GPU": gpus} if gpus else {})}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.slots = sum(int(min(node.get(kind, 0) // number for kind, number in need.items())) for node in nodes)
        if not self.slots:
            lacks, remedy = f"{threads} cores", "a higher --workers gives each trial fewer cores"
            if all(node.get("GPU", 0) < gpus for node in nodes):
                lacks, remedy = f"{gpus:g} GPU", "an empty CUDA_VISIBLE_DEVICES lets trials run without"
            elif gpus:
                lacks += f" and {gpus:g} GPU"
            raise ConfigError(f"--executor ray needs a machine with {lacks} for a trial, and Ray has none; {remedy}")
        remote = self._ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)
        self._measure = remote(lambda folder: _started(folder, threads).wait())

    def start(self, folder: Path) -> Any:
        """Submit the trial to the cluster, and return its task."""
        return self._measure.remote(folder.resolve())

    def code(self, handle: Any) -> int | None:
        """Exit code of the task's process; -9 for a lost worker."""
        done, _ = self._ray.wait([handle], timeout=0)
        try:
            return int(self._ray.get(handle)) if done else None
        except self._ray.exceptions.RayError:
            return -9

    def stop(self, handles: Sequence[Any]) -> None:
        """Cancel the tasks."""
        for task in handles:
            self._ray.cancel(task, force=True)


Executor = InlineExecutor | ProcessExecutor | RayExecutor


def _started(folder: Path, threads: int, **variables: str) -> subprocess.Popen[bytes]:
    """The started process of a trial, whose output goes to `output.log` in the trial's folder."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with (folder / OUTPUT_FILE).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rm_optimizer.experiments.trial", str(folder)],
            env={**os.environ, **counts, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def executor_named(name: str, workers: int | None) -> Executor:
    """An executor by its name, with the cores and GPUs of this machine divided among the trials.

    Args:
        name: inline, process or ray.
        workers: number of trials at a time; None means one for each GPU, or one without GPUs.

    Raises:
        ConfigError: if the name is unknown, or `inline` has several workers.
    """
    require_known("--executor", name, ("inline", "process", "ray"))
    if name == "inline":
        if workers not in (None, 1):
            raise ConfigError(
                "--executor inline runs one trial at a time; leave out --workers, or take --executor process"
            )
        return InlineExecutor()
    import torch  # not needed for a plan

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    if name == "ray":
        return RayExecutor(max(1, num_cores() // (workers or 1)), gpus=1.0 if devices else 0.0)
    slots = workers or max(1, len(devices))
    return ProcessExecutor(slots, max(1, num_cores() // slots), devices[:slots])


if __name__ == "__main__":
    sys.exit(Trial(Path(sys.argv[1])).measure())

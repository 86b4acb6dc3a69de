"""Trial in its folder: claimed by one process, measured, and finished when `result.json` exists.

`python -m rm_optimizer.experiments.study.trial FOLDER` measures the trial in a folder.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from rm_optimizer.errors import ConfigError, Interrupted, TrainingDiverged
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.file_lock import locked, sign
from rm_optimizer.records.files import write_text

SPEC_FILE, RESULT_FILE, FAILURE_FILE, CLAIM_FILE = "spec.json", "result.json", "failure.json", "claim"
OUTPUT_FILE = "output.log"
"""Output of a trial's process, in the trial's folder."""
WORK = "work"
"""Folder for the task's files; it is kept between attempts, so that a task can continue after a kill."""
CLAIMED, FAILED, STOPPED = 75, 1, 130
"""Exit codes of a trial that another process holds, of a failed one and of a stopped one."""
RecordT = TypeVar("RecordT", bound=JsonRecord)


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
    """The outcome of a trial, `result.json`; a diverged trial has a result too.

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
        """The outcome; None if there is none yet."""
        return self._read(TrialResult, RESULT_FILE)

    @property
    def failure(self) -> TrialFailure | None:
        """Failed attempts; None if there are none."""
        return self._read(TrialFailure, FAILURE_FILE)

    @property
    def attempts(self) -> int:
        """Number of failed attempts so far."""
        return self.failure.attempts if self.failure else 0

    @property
    def state(self) -> str:
        """`finished`, `diverged`, `running`, `failed` or `waiting`."""
        if (result := self.result) is not None:
            return result.status
        if self.is_claimed:
            return "running"
        return "waiting" if self.failure is None else "failed"

    @property
    def is_claimed(self) -> bool:
        """True while a living process measures the trial."""
        try:
            file = (self.folder / CLAIM_FILE).open("r+")
        except OSError:
            return False
        with file:
            return not locked(file)

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Context in which this process holds the trial; it yields False if another process holds it.

        The operating system releases the claim when the process ends, even after a kill.

        Raises:
            ConfigError: if the file system has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / CLAIM_FILE).open("a+") as file:
            try:
                is_ours = locked(file)
            except OSError as error:
                raise ConfigError(
                    f"a study needs a file system with locks, but that of {self.folder} has none ({error.strerror}); "
                    "choose another folder"
                ) from error
            if is_ours:
                sign(file)
            yield is_ours

    def fail(self, error: str, where: str = "") -> None:
        """Record a failed attempt."""
        record = TrialFailure(attempts=self.attempts + 1, error=error, traceback=where)
        write_text(self.folder / FAILURE_FILE, record.to_json() + "\n")

    def measure(self) -> int:
        """Claim and measure the trial, unless it is finished, and return an exit code.

        An error of the task is recorded and gives `FAILED`. Only a stop by the user gives `STOPPED`.
        """
        with self.claim() as is_ours:
            if not is_ours:
                return CLAIMED
            if self.result is not None:
                return 0
            try:
                result = self._outcome()
            except (KeyboardInterrupt, Interrupted):
                return STOPPED
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
                return FAILED
            write_text(self.folder / RESULT_FILE, result.to_json() + "\n")
            (self.folder / FAILURE_FILE).unlink(missing_ok=True)
            return 0

    def _outcome(self) -> TrialResult:
        started = time.monotonic()
        spec = TrialSpec.from_json((self.folder / SPEC_FILE).read_text(encoding="utf-8"))
        work = self.folder / WORK
        work.mkdir(exist_ok=True)
        status, values, sentence = "finished", {}, None
        try:
            values = dict(task_named(spec.task)(spec.spec, work))
        except TrainingDiverged as error:
            status, sentence = "diverged", str(error)
        return TrialResult(
            status=status,
            values=values,
            seconds=time.monotonic() - started,
            attempts=self.attempts + 1,
            error=sentence,
        )

    def _read(self, kind: type[RecordT], name: str) -> RecordT | None:
        try:
            return kind.from_json((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.folder / name} is damaged, or of another version; remove it to measure the trial again"
            ) from error


def task_named(name: str) -> Callable[[Mapping[str, Any], Path], Mapping[str, Any]]:
    """The function named `package.module:name`."""
    module, _, attribute = name.partition(":")
    found: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] = getattr(import_module(module), attribute)
    return found


if __name__ == "__main__":
    sys.exit(Trial(Path(sys.argv[1])).measure())

"""The jobs of a `--multirun` sweep and their outcomes: a table at the end, and `sweep.json` after each job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rm_optimizer.errors import CheckpointError, ConfigError, Interrupted, RMOptimizerError, TrainingDiverged

SWEEP_FILE = "sweep.json"
"""Name of the file of jobs, in the folder of the sweep."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a sweep.

    Args:
        overrides: options of the job.
        status: finished, diverged, stopped or failed.
        objective: validation NLL; None without one.
        folder: run folder.
        error: text of the error that ended the job.
        exit_code: exit code of the error; 0 for a finished job.
    """

    overrides: tuple[str, ...]
    status: str
    objective: float | None
    folder: str
    error: str | None = None
    exit_code: int = 0


def failed_job(overrides: Sequence[str], folder: str, error: Exception) -> Job:
    """The job that an error ended; a bug, which is no `RMOptimizerError`, has exit code 1."""
    named = {TrainingDiverged: "diverged", Interrupted: "stopped"}
    status = next((name for kind, name in named.items() if isinstance(error, kind)), "failed")
    code = error.exit_code if isinstance(error, RMOptimizerError) else 1
    return Job(
        overrides=tuple(overrides), status=status, objective=None, folder=folder, error=str(error), exit_code=code
    )


def own_overrides(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Overrides of each job that are not common to all jobs, as one text for each job.

    Example:
        >>> own_overrides([["model=tiny", "seed=0"], ["model=tiny", "seed=1"]])
        ['seed=0', 'seed=1']
    """
    shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(item for item in job if item not in shared) for job in jobs]


@contextmanager
def naming_sweep_folder() -> Iterator[None]:
    """Replace the option of a run's folder in an error message by the option of a sweep's folder.

    Raises:
        ConfigError: if the block raises one, with the sweep's option in its text.
        CheckpointError: if the block raises one, with the sweep's option in its text.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        raise type(error)(str(error).replace("hydra.run.dir", "hydra.sweep.dir")) from error


@dataclass
class Sweep:
    """The jobs so far."""

    folder: Path | None = None
    jobs: list[Job] = field(default_factory=list)

    def add(self, job: Job, folder: Path) -> None:
        """Add a job, and write all jobs."""
        from rm_optimizer.records.files import write_text  # imports torch, so only after options are checked

        self.folder = folder
        self.jobs.append(job)
        write_text(folder / SWEEP_FILE, json.dumps([asdict(each) for each in self.jobs], indent=1) + "\n")

    def table(self) -> str:
        """One line for each job: number, status, objective, folder, the options that differ, and the error message."""
        own = own_overrides([job.overrides for job in self.jobs])
        rows = [("job", "status", "val/nll", "folder", "options")]
        rows += [
            (
                str(number),
                job.status,
                "-" if job.objective is None else f"{job.objective:.4f}",
                job.folder,
                own[number] or "-",
            )
            for number, job in enumerate(self.jobs)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows]
        lines += [f"job {number}: {job.error}" for number, job in enumerate(self.jobs) if job.error]
        return "\n".join(lines)

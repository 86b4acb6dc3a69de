"""Finished runs to compare, read from their folders, and their common validation pairs."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics, evaluate_pairs
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.run_folder import OPTIONS_FILE, PAIR_REWARDS_FILE, RESULT_FILE, PairReward, RunFolder
from rm_optimizer.records.run_options import BY_CONTENT, decisive_options
from rm_optimizer.schema.checks import require, require_once
from rm_optimizer.training.folder.record import RunResult

PairKey = tuple[str, float, float, int]
"""Id, label and weight of a validation pair, and the number of equal ones before it."""


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run of a comparison.

    Args:
        name: path of its folder, relative to the common folder of all compared runs.
        folder: its folder.
        seed: its seed.
        options: options that distinguish arms, by dotted name: those that can change the result, without the seed, and
            the training fingerprint.
    """

    name: str
    folder: RunFolder
    seed: int
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DivergedRun(FoundRun):
    """A run whose numbers stopped being finite, so that it has no scores.

    Args:
        error: sentence on the step and the pairs.
    """

    error: str


@dataclass(frozen=True, kw_only=True)
class ComparedRun(FoundRun):
    """A finished run with its rewards of the validation pairs.

    Args:
        result: its `run.json`.
        rewards: rewards of each validation pair.
    """

    result: RunResult
    rewards: tuple[PairReward, ...]

    @cached_property
    def by_key(self) -> dict[PairKey, PairReward]:
        """The rewards by pair.

        Copies of a pair in the file have different keys.
        """
        seen: Counter[tuple[str, float, float]] = Counter()
        found: dict[PairKey, PairReward] = {}
        for row in self.rewards:
            key = (row.pair_id, row.label, row.weight)
            found[(*key, seen[key])] = row
            seen[key] += 1
        return found

    def logits(self, pairs: Sequence[PairKey]) -> Float[np.ndarray, " pairs"]:
        """Beta times the margin of each of these pairs."""
        margins = [row.chosen - row.rejected for row in map(self.by_key.__getitem__, pairs)]
        return self.result.metrics.beta * np.array(margins)

    def metrics(self, pairs: Sequence[PairKey], *, num_bootstrap: int) -> PairwiseMetrics:
        """Metrics on these pairs, with intervals over prompts.

        Raises:
            ValueError: if a reward is not finite.
        """
        rows = [self.by_key[key] for key in pairs]
        return evaluate_pairs(
            np.array([row.chosen for row in rows], dtype=float),
            np.array([row.rejected for row in rows], dtype=float),
            beta=self.result.metrics.beta,
            prompt_ids=[row.prompt_id for row in rows],
            label=np.array([row.label for row in rows]),
            weight=np.array([row.weight for row in rows]),
            num_bootstrap=num_bootstrap,
            seed=0,
        )


@dataclass(frozen=True)
class FoundRuns:
    """The runs that a command line names.

    Args:
        runs: the finished runs, in order.
        diverged: the diverged runs, in order.
        left_out: one sentence for each unfinished run in a folder of runs.
    """

    runs: tuple[ComparedRun, ...]
    diverged: tuple[DivergedRun, ...] = ()
    left_out: tuple[str, ...] = ()


def read_runs(paths: Sequence[Path]) -> FoundRuns:
    """Read the runs in these folders.

    A folder of runs, such as a sweep's, gives the runs that finished or diverged.

    Args:
        paths: run folders, their `best/` folders, or folders of runs.

    Raises:
        ConfigError: if a path holds no run, a run is named twice or has not finished, or there are fewer than two runs.
        DataError: if a file of a run is missing or damaged.
    """
    folders: list[Path] = []
    left_out: list[str] = []
    for path in paths:
        for folder, is_named in _run_folders(path):
            if (folder / RESULT_FILE).is_file() or RunFolder(folder).divergence is not None:
                folders.append(folder)
            elif is_named:
                raise ConfigError(
                    f"{path} holds a run without {RESULT_FILE}, so it has not finished; finish it with resume=auto, or "
                    "leave it out"
                )
            else:
                left_out.append(f"{folder} has not finished and is left out")
    require_once("a comparison", "run", (folder.resolve() for folder in folders))
    shared = Path(os.path.commonpath([folder.absolute() for folder in folders])) if folders else Path()
    if any(folder.absolute() == shared for folder in folders):
        shared = shared.parent
    read = [_read(folder.absolute().relative_to(shared).as_posix(), folder) for folder in folders]
    runs = tuple(run for run in read if isinstance(run, ComparedRun))
    diverged = tuple(run for run in read if isinstance(run, DivergedRun))
    if len(runs) < 2:
        others = "".join(f"; {line}" for line in [*(f"{run.folder.path} diverged" for run in diverged), *left_out])
        raise ConfigError(
            f"a comparison needs two finished runs or more, got {len(runs)}; name run folders, or a folder of runs "
            f"such as a sweep's{others}"
        )
    return FoundRuns(runs, diverged, tuple(left_out))


def common_pairs(runs: Sequence[ComparedRun]) -> list[PairKey]:
    """Validation pairs that all runs have, with equal label and weight, in the first run's order.

    Raises:
        ConfigError: if there are none.
    """
    common = list(runs[0].by_key)
    for number, run in enumerate(runs[1:], start=1):
        common = [key for key in common if key in run.by_key]
        if not common:
            others = runs[0].name if number == 1 else f"the {number} runs before it"
            raise ConfigError(
                f"{run.name} has no validation pair in common with {others}, so nothing can be compared; leave it out, "
                "or train all runs with one data.val"
            )
    return common


def _run_folders(path: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the runs of a path, each with True if the path names this run itself."""
    require(path.is_dir(), "runs", "be folders of runs", f"'{path}', which is no folder")
    if _is_run(path):
        yield path, True
        return
    if runs := runs_inside(path):
        yield from ((folder, False) for folder in runs)
        return
    if (run := RunFolder.of(str(path))) is None:
        raise ConfigError(
            f"runs must be folders that rm-opt train wrote, got '{path}', which holds neither {OPTIONS_FILE} nor "
            f"{RESULT_FILE}, and no folder of a run"
        )
    yield run.path, True


def runs_inside(path: Path) -> list[Path]:
    """Folders of runs inside a folder or one level deeper, such as the jobs of a sweep, in the order of their names."""
    marks = [f"{depth}/{name}" for name in (OPTIONS_FILE, RESULT_FILE) for depth in ("*", "*/*")]
    runs = {file.parent for mark in marks for file in path.glob(mark) if _is_run(file.parent)}
    # Digits are compared as numbers, so that job 10 is after job 9.
    parts = {run: re.split(r"(\d+)", str(run)) for run in runs}
    return sorted(runs, key=lambda run: [(int(each), "") if each.isdigit() else (-1, each) for each in parts[run]])


def _is_run(path: Path) -> bool:
    return bool(RunFolder(path).options) or (path / RESULT_FILE).is_file()


def _read(name: str, path: Path) -> ComparedRun | DivergedRun:
    """The run of a folder.

    Rewards that do not give the run's recorded NLL are refused: part of a file, or another run's file.
    """
    folder, file = RunFolder(path), path / PAIR_REWARDS_FILE
    if (sentence := folder.divergence) is not None and not (path / RESULT_FILE).is_file():
        config, identity = folder.options, folder.identity
        options = _of_arms(config, "" if identity is None else identity.train_fingerprint)
        return DivergedRun(name=name, folder=folder, seed=int(config["seed"]), options=options, error=sentence)
    result = RunResult.read(path)
    if result is None:
        raise DataError(
            f"{path / RESULT_FILE} is damaged, or another version of rm-opt wrote it; train the run again, or leave it "
            "out"
        )
    options = _of_arms(result.config, result.data.train_fingerprint)
    rewards = tuple(folder.pair_rewards())
    run = ComparedRun(name=name, folder=folder, seed=result.seed, options=options, result=result, rewards=rewards)
    if len(rewards) != result.metrics.num_pairs:
        raise DataError(
            f"{file} holds {len(rewards):,} pairs, but the run was validated on {result.metrics.num_pairs:,}; train it "
            "again, or leave it out"
        )
    recorded = result.metrics.nll.value
    try:
        found = run.metrics(list(run.by_key), num_bootstrap=0).nll.value
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error}") from error
    if not math.isclose(found, recorded, rel_tol=1e-9):
        raise DataError(
            f"{file} gives a validation NLL of {found:.6f}, but {RESULT_FILE} holds {recorded:.6f}: they are "
            "not of the same weights; train the run again, or leave it out"
        )
    return run


def _of_arms(config: Mapping[str, Any], train_fingerprint: str) -> dict[str, Any]:
    """The options that can change the result, without the seed, and the training fingerprint."""
    return decisive_options(config, *BY_CONTENT, "seed") | {"training pairs": train_fingerprint[:12]}

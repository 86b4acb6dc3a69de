"""A study whose driver and trials are killed at random comes to the results of an undisturbed one, each trial once.

Trials compute for a fraction of a second. One diverges, and one meets a full disk in its first attempt. The driver and
the processes of trials are killed with SIGKILL at random moments, and the same command is started again each time.

    python benchmarks/study_faults.py --trials 60

    python benchmarks/study_faults.py --large 10000

measures how long a large study of empty trials takes to plan, to run in one process, to look at and to read as a table.

Lines: `trials_lost` (without a result), `trials_repeated` (measured again although they had one, or whose result
changed), `results_equal` (to those of the undisturbed study), and how many processes were killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rm_optimizer.errors import TrainingDiverged
from rm_optimizer.experiments.study import TRIALS, Study, planned_trial, publish
from rm_optimizer.experiments.trial import CLAIM_FILE, RESULT_FILE, InlineExecutor, ProcessExecutor

TASK = "study_faults:measure"
REPEATED = "repeated"
"""Left in the work of a trial that was measured although it had a result."""
DIVERGES, FULL_DISK = 7, 11
"""Numbers of the trials that do."""
RETRIES = 10_000


def measure(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Compute for `seconds` and return a number that the trial's own number decides."""
    if (folder.parent / RESULT_FILE).exists():
        (folder / REPEATED).touch()
    if spec["number"] == FULL_DISK and not (folder / "second").exists():
        (folder / "second").touch()
        Path("/dev/full").write_text("one byte more")
    time.sleep(spec["seconds"])
    if spec["number"] == DIVERGES:
        raise TrainingDiverged("the loss became nan in step 3")
    return {"value": int(hashlib.sha256(str(spec["number"]).encode()).hexdigest()[:8], 16) / 2**32}


def plan(folder: Path, trials: int, seconds: float) -> None:
    """Write the plan of a study of so many trials."""
    specs = [{"number": number, "seconds": seconds * (1 + number % 5)} for number in range(trials)]
    publish(folder, TASK, [planned_trial(f"number={spec['number']}", spec) for spec in specs])


def drive(folder: Path, workers: int) -> None:
    """Run the study's trials in processes."""
    Study(folder).run(ProcessExecutor(workers, 1), retries=RETRIES)


def results(folder: Path) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Status and values of every trial with a result."""
    study = Study(folder)
    found = {planned.name: study.trial(planned).result for planned in study.plan.trials}
    return {name: (result.status, result.values) for name, result in found.items() if result is not None}


def disturbed(folder: Path, workers: int, rng: random.Random) -> tuple[int, int, int]:
    """Run the study through kills; kills of drivers, kills of trials, and results that changed."""
    drivers = killed = changed = 0
    seen: dict[Path, int] = {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    while True:
        command = [sys.executable, __file__, "--drive", str(folder), "--workers", str(workers)]
        driver = subprocess.Popen(command, env=environment)
        until = time.monotonic() + rng.uniform(0.5, 4.0)
        while driver.poll() is None and time.monotonic() < until:
            time.sleep(rng.uniform(0.05, 0.5))
            if rng.random() < 0.5:
                killed += _kill_one(folder, rng)
            changed += _changed(folder, seen)
        if driver.poll() is not None:
            if driver.returncode != 0:
                raise SystemExit(f"the driver ended with {driver.returncode}")
            return drivers, killed, changed
        driver.kill()
        driver.wait()
        drivers += 1


def _kill_one(folder: Path, rng: random.Random) -> int:
    """Kill the process of one trial that is being measured; 0 if there is none."""
    running = []
    for claim in folder.glob(f"{TRIALS}/*/{CLAIM_FILE}"):
        number = claim.read_text().split()[1:2]
        with suppress(OSError):
            if number and str(claim.parent) in Path(f"/proc/{number[0]}/cmdline").read_text():
                running.append(int(number[0]))
    if not running:
        return 0
    with suppress(ProcessLookupError):
        os.kill(rng.choice(running), signal.SIGKILL)
    return 1


def _changed(folder: Path, seen: dict[Path, int]) -> int:
    """Results that are other files than when they were first seen."""
    found = {path: path.stat().st_mtime_ns for path in folder.glob(f"{TRIALS}/*/{RESULT_FILE}")}
    changed = sum(path in seen and seen[path] != stamp for path, stamp in found.items())
    seen.update(found)
    return changed


def large(folder: Path, trials: int) -> None:
    """Print seconds, and the most memory, of a study of empty trials."""
    started = time.monotonic()

    def lap(name: str) -> None:
        nonlocal started
        print(f"{name}_seconds: {time.monotonic() - started:.1f}")
        started = time.monotonic()

    plan(folder, trials, 0.0)
    lap("plan")
    study = Study(folder)
    study.run(InlineExecutor(), retries=1)
    lap("run")
    counts = study.status().counts
    print(f"trials_done: {counts['finished'] + counts['diverged']}")
    lap("status")
    rows = [*study.rows()]
    lap("table")
    print(f"rows: {len(rows)}")
    print(f"peak_memory_mib: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a study's processes at random, and compare its results.")
    add = parser.add_argument
    add("--trials", type=int, default=60)
    add("--workers", type=int, default=4, help="trials at a time")
    add("--seconds", type=float, default=0.2, help="time of the shortest trial; the longest takes five times it")
    add("--seed", type=int, default=0, help="seed of the kills")
    add("--large", type=int, help="instead, measure an undisturbed study of so many empty trials")
    add("--drive", type=Path, help="run the study of this folder, undisturbed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    if args.drive is not None:
        drive(args.drive, args.workers)
        return
    sys.modules.setdefault("study_faults", sys.modules[__name__])
    with tempfile.TemporaryDirectory() as scratch:
        if args.large is not None:
            large(Path(scratch), args.large)
            return
        calm, wild = Path(scratch, "calm"), Path(scratch, "wild")
        plan(calm, args.trials, 0.0)
        plan(wild, args.trials, args.seconds)
        Study(calm).run(InlineExecutor(), retries=1)
        drivers, killed, changed = disturbed(wild, args.workers, random.Random(args.seed))
        repeated = len(list(wild.glob(f"{TRIALS}/*/work/{REPEATED}"))) + changed
        found, expected = _by_label(wild), _by_label(calm)
        print(f"trials_lost: {args.trials - len(found)}")
        print(f"trials_repeated: {repeated}")
        print(f"results_equal: {found == expected}")
        print(f"drivers_killed: {drivers}")
        print(f"trials_killed: {killed}")


def _by_label(folder: Path) -> dict[str, tuple[str, Mapping[str, Any]]]:
    labels = {planned.name: planned.label for planned in Study(folder).plan.trials}
    return {labels[name]: outcome for name, outcome in results(folder).items()}


if __name__ == "__main__":
    main()

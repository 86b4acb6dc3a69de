"""Kill -9 at random moments, then resume: how many runs end bitwise equal to one that was never killed.

Each trial starts the same small run (dropout on, several micro-batches a step, a checkpoint every third step), kills
its process group with SIGKILL after a random time, repeats that once more, and lets the third start finish with
`resume=auto`. Compared are the bytes of `metrics.csv` and of the exported weights.

    python benchmarks/resume.py --kills 20
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OUTCOMES = ("metrics.csv", "best/model.safetensors")
KILLS_A_TRIAL = 2
OPTIONS = (
    "hardware=cpu",
    "hardware.num_threads=1",
    "model.dropout=true",
    "+model.architecture.attention_dropout=0.1",
    "data.synthetic.num_train=400",
    "data.synthetic.num_val=50",
    "batching.batch_size=16",
    "batching.micro_token_budget=600",
    "training.max_steps=300",
    "training.checkpoint_every=3",
    "training.progress=false",
    "logger.tensorboard=false",
    "resume=auto",
)


def start(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rm_optimizer.train", *OPTIONS, f"hydra.run.dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def killed(folder: Path, seconds: float) -> None:
    """Start, and kill a random time after training has begun or resumed."""
    process = start(folder)
    before = len(list(folder.glob("evaluations/*")))
    while process.poll() is None and len(list(folder.glob("evaluations/*"))) <= before:
        time.sleep(0.02)
    time.sleep(seconds)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcome(folder: Path) -> list[bytes]:
    if start(folder).wait() != 0:
        return []
    return [(folder / name).read_bytes() for name in OUTCOMES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills over all trials")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    trials = -(-args.kills // KILLS_A_TRIAL)
    with tempfile.TemporaryDirectory() as scratch:
        whole = outcome(Path(scratch, "whole"))
        equal = 0
        for trial in range(trials):
            folder = Path(scratch, f"trial-{trial}")
            for _ in range(KILLS_A_TRIAL):
                killed(folder, moments.uniform(0, 5))
            equal += outcome(folder) == whole
            print(f"trial {trial + 1} of {trials}: {equal} equal so far", flush=True)
    print(f"kills: {trials * KILLS_A_TRIAL}")
    print(f"bitwise_equal_share: {equal / trials}")


if __name__ == "__main__":
    main()

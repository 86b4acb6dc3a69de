"""Seconds and memory of choosing pairs from pools of 10^4, 10^5 and 10^6, and how they grow.

Features are random and mapped from a file, as `rm-opt select --cache` keeps them. Each pool has a process of its
own. The last lines are `seconds_1e6`, `rss_gib_1e6` (peak resident memory, pages of the mapped file included) and
`growth_exponent` (slope of log seconds over log pairs, 1 being linear).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rm_optimizer.data_efficiency import Pool, acquisition_function

SIZES = (10_000, 100_000, 1_000_000)
BLOCK = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384, help="features of a pair")
    parser.add_argument("--k", type=int, default=100, help="pairs to choose")
    parser.add_argument("--rule", default="boundary_optimal")
    parser.add_argument("--size", type=int, help="measure this pool alone, in this process")
    args = parser.parse_args()
    if args.size is not None:
        print(*measure(args.size, args.hidden, args.k, args.rule))
        return
    seconds, memory = [], []
    for size in SIZES:
        command = [sys.executable, __file__, "--hidden", str(args.hidden), "--k", str(args.k)]
        command += ["--rule", args.rule, "--size", str(size)]
        took, gib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        seconds.append(float(took))
        memory.append(float(gib))
        print(f"{size:,} pairs: {float(took):.1f} s, {float(gib):.2f} GiB", flush=True)
    print(f"seconds_1e6: {seconds[-1]:.1f}")
    print(f"rss_gib_1e6: {memory[-1]:.2f}")
    print(f"growth_exponent: {np.polyfit(np.log(SIZES), np.log(seconds), 1)[0]:.3f}")


def measure(size: int, hidden: int, k: int, rule: str) -> tuple[float, float]:
    """Seconds of the choice, and the process's peak resident memory in GiB."""
    generator = np.random.default_rng(0)
    weights = generator.normal(size=hidden) / hidden**0.5
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "differences.npy")
        written = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(size, hidden))
        for start in range(0, size, BLOCK):
            written[start : start + BLOCK] = generator.standard_normal((min(BLOCK, size - start), hidden), np.float32)
        written.flush()
        del written
        differences = np.load(path, mmap_mode="r")
        margins = np.concatenate([differences[start : start + BLOCK] @ weights for start in range(0, size, BLOCK)])
        started = time.perf_counter()
        pool = Pool(margins[None], np.zeros(size), np.zeros(size, dtype=bool), differences)
        assert len(acquisition_function(rule).select(pool, k)) == k
        seconds = time.perf_counter() - started
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()

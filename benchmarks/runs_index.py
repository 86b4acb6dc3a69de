"""Seconds to list a folder of runs, and to list it again.

Copies of one run stand in a temporary folder, each with its result and curves. A first look reads every result, a
second one reads what changed, which is nothing here.

    python benchmarks/runs_index.py --run outputs/quickstart
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rm_optimizer.records.run_folder import METRICS_FILE, OPTIONS_FILE, RESULT_FILE
from rm_optimizer.reporting.runs_index.index_server import IndexServer


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the seconds of both, and the size of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("outputs/quickstart"), help="folder of a finished run")
    parser.add_argument("--runs", type=int, default=1000, help="copies of it")
    parser.add_argument("--repeats", type=int, default=5, help="looks, of which the median is printed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            copy = Path(folder, f"{number:05d}")
            copy.mkdir()
            for name in (RESULT_FILE, METRICS_FILE, OPTIONS_FILE):
                shutil.copy(options.run / name, copy)
        firsts, seconds, size = [], [], 0
        for _ in range(options.repeats):
            with IndexServer(Path(folder)) as server:
                started = time.perf_counter()
                size = len(server.index())
                firsts.append(time.perf_counter() - started)
                started = time.perf_counter()
                server.index()
                seconds.append(time.perf_counter() - started)
    print(f"runs: {options.runs}")
    print(f"seconds_first: {median(firsts):.3f}")
    print(f"seconds_again: {median(seconds):.3f}")
    print(f"page_mb: {size / 1e6:.3f}")


if __name__ == "__main__":
    main()

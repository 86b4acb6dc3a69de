"""What runs on the simulated device, how far its numbers are from the CPU's, and how often the processor waits.

    python benchmarks/simulated_device.py            # every path, its difference and its waits
    python benchmarks/simulated_device.py --faults   # plants the faults of tests/oracles/device_faults.tsv

Each fault is planted in a copy of the package, and the tests that its row names must fail.
"""

from __future__ import annotations

import argparse
import csv
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def waits_of_steps(sharing: str) -> tuple[float, float]:
    """Waits of a training step, and its passes, as means over two steps."""
    from tests import simulated_paths as paths
    from tests.simulated_device import sim

    run = paths.prepared("llama", "none", f"batching.prefix_sharing={sharing}")
    counts = []
    for steps in (1, 3):
        sim.waits.clear()
        paths.fitted(run, steps=steps)
        counts.append(sum(sim.waits.values()))
    return (counts[1] - counts[0]) / 2, sum(len(batch.micro) for batch in run.datamodule.steps(1, 3)) / 2


def measure() -> None:
    """Print each path, then the figures, one a line."""
    import torch

    if torch.cuda.is_available():
        sys.exit("error: the simulated device would take the place of this machine's GPU; set CUDA_VISIBLE_DEVICES=")
    from tests import simulated_paths as paths
    from tests.simulated_device import plugged

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    scratch = Path(tempfile.mkdtemp())
    source = paths.whole_run(scratch / "source", "hardware=cpu")
    differences = []
    for number, (name, path) in enumerate(paths.PATHS.items()):
        (scratch / f"{number}-cpu").mkdir()
        (scratch / f"{number}-device").mkdir()
        on_cpu = path(scratch / f"{number}-cpu", source)
        with plugged() as device:
            on_device = path(scratch / f"{number}-device", source)
            differences.append(paths.largest_difference(on_cpu, on_device))
            print(f"{name}: difference {differences[-1]:.1e}, waits {sum(device.waits.values())}", flush=True)
    with plugged() as device:
        shared, padded = waits_of_steps("on"), waits_of_steps("off")
        model = paths.moved(source)
        device.waits.clear()
        model.score(["a", "b b b b"], ["c", "d e"])
        scored = sum(device.waits.values())
    shutil.rmtree(scratch)
    print(f"paths_tried: {len(differences)}")
    print(f"largest_difference: {max(differences):.1e}")
    print(f"passes_per_step: {shared[1]:g} shared, {padded[1]:g} padded")
    print(f"waits_per_step_shared: {shared[0]:g}")
    print(f"waits_per_step_padded: {padded[0]:g}")
    print(f"waits_per_scored_batch: {scored}")


def plant() -> None:
    """Print for each fault whether its tests fail, and how many were found."""
    with (ROOT / "tests/oracles/device_faults.tsv").open(encoding="utf-8", newline="") as file:
        faults = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rm_optimizer", "tests", "configs", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_simulated_device.py"]
        for fault in faults:
            changed = Path(folder) / fault["file"]
            text = changed.read_text(encoding="utf-8")
            changed.write_text(text.replace(fault["before"], fault["after"]), encoding="utf-8")
            done = subprocess.run(
                [*tests, "-k", fault["tests"]], cwd=folder, capture_output=True, text=True, check=False
            )
            changed.write_text(text, encoding="utf-8")
            found += done.returncode == 1
            print(f"{fault['kind']}: {'found' if done.returncode == 1 else 'NOT FOUND'}", flush=True)
    print(f"faults_planted: {len(faults)}")
    print(f"faults_found: {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", action="store_true", help="plant faults and run the tests that should find them")
    plant() if parser.parse_args().faults else measure()

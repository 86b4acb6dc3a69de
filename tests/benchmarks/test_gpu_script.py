"""The script of the GPU's measurements keeps the parts of one device, commit and file of pairs in a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"


def test_a_folder_of_other_pairs_is_refused(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "out"

    def run(text: str) -> subprocess.CompletedProcess[str]:
        pairs.write_text(text)
        command, environment = ["bash", str(SCRIPT), str(out), str(pairs)], os.environ | {"PYTHON": str(python)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert "=== parity: kept" not in run("one").stdout
    assert "=== parity: kept" in run("one").stdout
    assert (out / "about").read_text().startswith("mode: cpu\n")
    refused = run("two")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{out} holds results that differ in a line of {out}/about" in refused.stderr
    assert run("one").returncode == 0
    (out / "about").unlink()
    assert run("one").returncode == 2
    pairs.unlink()
    gone = subprocess.run(
        ["bash", str(SCRIPT), str(out), str(pairs)], env=os.environ | {"CPU": "1"}, capture_output=True
    )
    assert gone.returncode == 2
    assert b"PAIRS must be a file of pairs" in gone.stderr

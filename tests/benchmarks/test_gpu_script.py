"""The script of the GPU's measurements keeps the parts of one device, commit and file of pairs in a folder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import gpu_parts

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


def test_a_part_that_failed_is_run_again_and_what_it_printed_is_kept(tmp_path: Path):
    python, out = tmp_path / "python", tmp_path / "out"

    def run(ends: str) -> str:
        python.write_text(
            f"#!/bin/sh\ncase \"$*\" in *transfer*) echo 'seconds: 3'; {ends};; *) echo 'value: 1';; esac\n"
        )
        python.chmod(0o755)
        environment = os.environ | {"PYTHON": str(python), "CPU": "1"}
        done = subprocess.run(["bash", str(SCRIPT), str(out)], env=environment, capture_output=True, text=True)
        assert done.returncode == int(ends != "exit 0")
        return done.stdout

    assert "transfer failed with code 3" in (first := run("exit 3"))
    assert "failed: 1" in first
    gpu_parts.collect(out, None)
    assert json.loads((out / "results.json").read_text())["transfer"] == {"seconds": "3"}
    assert "failed: 0" in (second := run("exit 0"))
    assert "=== adapter: kept" in second
    assert "=== transfer: kept" not in second


def test_the_figures_are_taken_into_a_page_once(tmp_path: Path):
    page, start, end = tmp_path / "page.md", *(gpu_parts.MARK.format(word) for word in ("start", "end"))
    (tmp_path / "about").write_text("mode: gpu\ndevice: NVIDIA H100\ncommit: abc\npairs: none\n")
    (tmp_path / "adapter.txt").write_text("INFO: noise\nmfu: 0.41\ntokens_per_second: 9e4 \n")
    page.write_text(f"Before.\n\n{start}\n{end}\n\nAfter.\n")
    for _ in range(2):
        gpu_parts.collect(tmp_path, page)
        head = "On NVIDIA H100, commit `abc`:\n\n| part | figure | value |\n| --- | --- | --- |\n"
        rows = "| adapter | mfu | 0.41 |\n| adapter | tokens_per_second | 9e4 |\n"
        assert page.read_text() == f"Before.\n\n{start}\n{head}{rows}{end}\n\nAfter.\n"
    page.write_text(f"{start}\n")
    with pytest.raises(SystemExit, match="must hold the lines"):
        gpu_parts.collect(tmp_path, page)
    assert page.read_text() == f"{start}\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_parts.PARTS)
def test_a_part_runs_small_without_a_gpu(
    part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("rm_optimizer"), "level", logging.ERROR)
    gpu_parts.main([part, "--small", "--num-pairs", "48"])
    printed = capsys.readouterr().out
    last = {
        "adapter": "pairs_per_second",
        "full": "hessian_eigenvalues",
        "compile": "speedup",
        "transfer": "equal: True",
    }
    assert last.get(part, "padded_speedup") in printed

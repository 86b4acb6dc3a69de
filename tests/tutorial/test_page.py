"""The blocks of the retold tutorial run in order, as one program, and its notebook holds them with their results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools.notebook import PAGE, cells

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_blocks_of_the_page_run_in_order(tmp_path, python):
    program = "\n".join(text for kind, text in cells(PAGE.read_text(encoding="utf-8")) if kind == "code")
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_notebook_is_the_page_with_its_results():
    notebook = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8"))
    stored = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert stored == cells(PAGE.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]

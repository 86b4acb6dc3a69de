"""The blocks of the retold tutorial run in order, as one program, and its notebook holds them with their results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.notebook import PAGE, cells, executed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_blocks_of_the_page_run_in_order(tmp_path, python):
    program = "\n".join(text for kind, text in cells(PAGE.read_text(encoding="utf-8")) if kind == "code")
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def printed(notebook: dict[str, Any]) -> list[int]:
    """Places of the cells that print."""
    outputs = [[output.get("name") for output in cell.get("outputs", ())] for cell in notebook["cells"]]
    return [place for place, names in enumerate(outputs) if "stdout" in names]


@pytest.mark.slow
def test_a_kernel_runs_the_notebook_and_prints_where_the_stored_one_does():
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    notebook = executed(PAGE.read_text(encoding="utf-8"))
    assert printed(notebook) == printed(json.loads(NOTEBOOK.read_text(encoding="utf-8")))


def test_the_notebook_is_the_page_with_its_results():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    stored = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert stored == cells(PAGE.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]

"""Write and run `examples/tutorial.ipynb`, the notebook of `docs/tutorial.md`.

pip install -e '.[dev]'
python tools/notebook.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """Kind and text of the cells of a page: its texts and blocks, in order, without its table of differences."""
    story = page.partition("\n## Differences")[0].replace("](#differences)", "](../docs/tutorial.md#differences)")
    story = re.sub(r"\]\((\w[\w-]*\.md)", r"](../docs/\1", story)
    parts = BLOCK.split(story)
    kinds = ["markdown" if number % 2 == 0 else "code" for number in range(len(parts))]
    return [(kind, part.strip()) for kind, part in zip(kinds, parts, strict=True) if part.strip()]


def executed(page: str) -> Any:
    """The notebook of a page after a kernel ran its blocks in an empty folder, with all outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a block fails.
    """
    from nbclient import NotebookClient
    from nbformat import v4

    kinds = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    made = [kinds[kind](text, id=f"cell-{place}") for place, (kind, text) in enumerate(cells(page))]
    notebook = v4.new_notebook(cells=made)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return notebook


def main() -> None:
    """Run the page's blocks and store what they print."""
    import nbformat

    notebook = executed(PAGE.read_text("utf-8"))
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            # Bars of progress hold paths of this machine.
            cell.outputs = [output for output in cell.outputs if output.get("name") == "stdout"]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()

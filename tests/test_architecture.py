"""A package imports only from lower floors, and words and commands load without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rm_optimizer"
FLOORS = (
    {"errors", "schema"},
    {"core", "optim"},
    {"training", "landscape", "serving", "rl_coupling"},
    {"data_efficiency", "experiments"},
    {"reporting"},
    {"train", "analyze", "compare", "interfaces"},
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
BESIDE = {
    ("schema", "errors"),
    ("rl_coupling", "serving"),
    ("core", "optim"),
    ("train", "interfaces"),
    ("analyze", "interfaces"),
    ("compare", "interfaces"),
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and room of every import of ours, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rm_optimizer":
            names = [f"rm_optimizer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "rm_optimizer" and len(parts) > 1 and not parts[1].startswith("__"):
                yield node.lineno, parts[1]


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


def test_every_room_has_a_floor():
    assert {room_of(path) for path in sources()} <= set(LEVEL)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_to_lower_floors(path):
    room = room_of(path)
    wrong = [
        f"line {line}: {other}"
        for line, other in imported_rooms(ast.parse(path.read_text(encoding="utf-8")))
        if other != room and LEVEL[other] >= LEVEL[room] and (room, other) not in BESIDE
    ]
    assert wrong == [], f"{room} may not import {', '.join(wrong)}"


def test_a_wrong_import_would_be_seen():
    tree = ast.parse("def late():\n    from rm_optimizer.training.run import build_model\n")
    assert list(imported_rooms(tree)) == [(2, "training")]


def test_optim_does_not_import_core():
    found = [path.name for path in (PACKAGE / "optim").glob("*.py") if "rm_optimizer.core" in path.read_text("utf-8")]
    assert found == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


HEAVY = "[name for name in ('torch', 'transformers', 'pytorch_lightning', 'numpy') if name in sys.modules]"


@pytest.mark.parametrize(
    "module",
    ["rm_optimizer", "rm_optimizer.errors", "rm_optimizer.schema", "rm_optimizer.train", "rm_optimizer.interfaces.cli"],
)
def test_words_and_commands_load_without_torch(module):
    done = run_python(f"import sys, {module}; print({HEAVY})")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_command_line_is_checked_without_torch():
    code = f"import sys; from rm_optimizer.train import check_command; check_command(['--cfg', 'job']); print({HEAVY})"
    done = run_python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_help_takes_less_than_half_a_second_of_the_processor_and_no_torch():
    code = (
        "import sys\nfrom rm_optimizer.interfaces.cli import app\nsys.argv = ['rm-opt', '--help']\n"
        f"try:\n    app()\nfinally:\n    print({HEAVY}, file=sys.stderr)"
    )
    taken = []
    for _ in range(3):  # the first start may compile
        before = os.times()
        done = run_python(code)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert (done.returncode, done.stderr.strip()) == (0, "[]")
        assert "Usage: rm-opt" in done.stdout
    assert min(taken) < 0.5

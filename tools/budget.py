"""Size of the package against its budgets: `python tools/budget.py`. Lower a number when a room shrinks.

A line of code is one that is no blank, comment, docstring or import. The rooms are the folders of `rm_optimizer`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS: Mapping[str, int] = {
    "core": 9310,
    "serving": 4397,
    "landscape": 3839,
    "training": 3060,
    "rl_coupling": 2427,
    "reporting": 2631,
    "interfaces": 2425,
    "experiments": 1640,
    "data_efficiency": 1656,
    "schema": 1120,
    "doctor": 898,
    "explanation": 941,
    "records": 840,
    "optim": 817,
    "evaluation": 1169,
    "modules at the top": 470,
}
LIMITS: Mapping[str, int] = {
    "files": 342,
    "files of less than 40 lines": 5,
    "functions of seven parameters or more": 52,
    "import lines": 5991,
    "import lines inside functions": 394,
    "lines of code": 37640,
    "private functions with one caller": 422,
}
"""Most lines of code of each room, and most of what is counted over the package."""
SMALL_FILE = 40
MANY_PARAMETERS = 7
TOP = "modules at the top"


def measure(package: Path) -> tuple[Counter[str], Counter[str]]:
    """Lines of code of each room, and the counts of `LIMITS`."""
    rooms, found = Counter[str](), Counter[str]()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree, parts = ast.parse(text), path.relative_to(package).parts
        code, imports = _lines(tree, text)
        rooms[parts[0] if len(parts) > 1 else TOP] += code
        found.update({"files": 1, "lines of code": code, "import lines": imports})
        found["files of less than 40 lines"] += path.name != "__init__.py" and len(text.splitlines()) < SMALL_FILE
        _count_functions(tree, text, found)
    return rooms, found


def _lines(tree: ast.Module, text: str) -> tuple[int, int]:
    """Lines of code and of imports."""
    kinds: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds |= dict.fromkeys(range(node.lineno, _end(node)), "import")
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                kinds |= dict.fromkeys(range(each.lineno, _end(each)), "docstring")
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")]
    return sum(n not in kinds for n in lines), sum(kinds.get(n) == "import" for n in lines)


def _count_functions(tree: ast.Module, text: str, found: Counter[str]) -> None:
    words = Counter(re.findall(r"[A-Za-z_]\w*", text))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {node for f in functions for node in ast.walk(f) if isinstance(node, ast.Import | ast.ImportFrom)}
    found["import lines inside functions"] += sum(_end(node) - node.lineno for node in inner)
    for function in functions:
        given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        is_large = sum(argument.arg not in ("self", "cls") for argument in given) >= MANY_PARAMETERS
        found["functions of seven parameters or more"] += is_large
        found["private functions with one caller"] += (
            re.match("_[a-z]", function.name) is not None and words[function.name] == 2
        )


def _end(node: ast.stmt) -> int:
    """Line after the last of a statement."""
    return (node.end_lineno or node.lineno) + 1


def main() -> int:
    """Print what is over its budget, or the size of the package; 1 if anything is over."""
    rooms, found = measure(ROOT / "rm_optimizer")
    over = [
        f"{name}: {size} lines of code, budget {ROOMS.get(name, 0)}"
        for name, size in rooms.items()
        if size > ROOMS.get(name, 0)
    ]
    over += [f"{name}: {found[name]}, limit {most}" for name, most in LIMITS.items() if found[name] > most]
    print("\n".join(over) or f"within all budgets: {found['lines of code']:,} lines of code in {found['files']} files")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())

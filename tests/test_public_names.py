"""The public names load on first use, keep their types, and stand in one documented list."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import rm_optimizer
from rm_optimizer import PUBLIC_MODULES, errors

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_a_public_module_lists_its_names_and_loads_each(module):
    loaded = import_module(module)
    assert set(loaded.__all__) <= set(dir(loaded))
    for name in loaded.__all__:
        assert getattr(getattr(loaded, name), "__name__", name) == name
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute 'BradleyTeryRM'"):
        loaded.BradleyTeryRM  # noqa: B018


def test_errors_stand_in_one_tree_and_are_exported():
    tree = {
        name: kind
        for name, kind in vars(errors).items()
        if getattr(kind, "__module__", "") == errors.__name__ and inspect.isclass(kind)
    }
    assert set(re.findall(r"──+ (\w+) ", errors.__doc__ or "")) == set(tree) - {"RMOptimizerError"}
    assert [name for name, kind in tree.items() if getattr(rm_optimizer, name, None) is not kind] == []
    elsewhere = [
        name
        for path in (ROOT / "rm_optimizer").rglob("*.py")
        for name in re.findall(r"^class (\w+)\(RMOptimizerError\):", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted({*elsewhere} - {*tree}) == ["ApiError"]


@pytest.mark.slow
def test_a_misspelt_method_of_a_public_name_is_a_type_error_and_no_example_has_one(tmp_path):
    lines = ["import rm_optimizer", *(f"import {module}" for module in PUBLIC_MODULES[1:])]
    first = len(lines) + 1
    for module in PUBLIC_MODULES:
        loaded = import_module(module)
        for name in loaded.__all__:
            argument, value = "", f"{module}.{name}"
            if inspect.isclass(getattr(loaded, name)):
                argument, value = f"value: {value}", "value"
            lines.append(f"def misspell_{len(lines)}({argument}) -> None: {value}.misspelt()")
    program = tmp_path / "program.py"
    program.write_text("\n".join([*lines, "rm_optimizer.BradleyTeryRM"]) + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program), *map(str, (ROOT / "examples").glob("*.py"))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    found = {int(number) for number in re.findall(r"program\.py:(\d+): error", done.stdout)}
    assert found == set(range(first, len(lines) + 2)), done.stdout + done.stderr
    assert re.findall(r"examples/\w+\.py:\d+: error.*", done.stdout) == []

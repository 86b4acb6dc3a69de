"""Every row of the documents' table works as a named test shows, or differs for a reason that the manual gives."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line.split("\t") for line in (Path(__file__).parent / "table.tsv").read_text(encoding="utf-8").splitlines()]
REASONS = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.MULTILINE)
MODULES = (
    "core.base core.reward_model core.data_loader training.lightning_module training.callbacks landscape.hessian "
    "landscape.optimizer_comparison landscape.visualization rl_coupling.policy_simulation rl_coupling.ensemble "
    "rl_coupling.rl_readiness data_efficiency.active_learning data_efficiency.margin_analysis interfaces.cli"
)


def test_the_table_has_every_row_once():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 171))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_works_or_differs_for_a_reason(row):
    _, item, shown_by = row
    if shown_by.startswith("differs: "):
        assert shown_by.removeprefix("differs: ") in REASONS, item
        return
    path, _, name = shown_by.partition("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), item


@pytest.mark.parametrize("name", MODULES.split())
def test_the_modules_of_the_documents_are_there(name):
    assert import_module(f"rm_optimizer.{name}").__doc__


def test_the_extras_of_the_documents_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"dev", "pyhessian", "ray", "vllm", "flash"} <= set(extras)

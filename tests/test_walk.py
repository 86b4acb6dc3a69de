"""The order of a run's calls, as docs/architecture.md tells it, is the order of a traced run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_calls_of_a_run_are_in_the_order_that_the_manual_gives():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## A run, in the order of its calls")[2].partition("\n## ")[0]
    told = re.findall(r"`([\w/]+\.py: [\w.]+)`", section)
    assert len(told) > 20
    command = [sys.executable, str(ROOT / "tools/walk.py"), "--story"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    called = done.stdout.splitlines()
    assert [name for name in told if name not in called] == []
    assert sorted(told, key=called.index) == told


def test_every_file_that_the_manual_names_is_there():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folder, missing = "", []
    for name in re.findall(r"`([\w/]+\.py)\b", page):
        folder = name.rpartition("/")[0] if "/" in name else folder
        places = [ROOT / "rm_optimizer" / name, ROOT / "rm_optimizer" / folder / name, ROOT / name]
        missing += [name] * (not any(place.is_file() for place in places))
    assert missing == []

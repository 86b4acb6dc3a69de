"""Every command in README.md and doc.md is run: as it stands, or in the quicker form that the table below gives.

A command is a line after `$ ` in a console block, or a line of a bash block; a line that ends in a backslash goes on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "doc.md")
BLOCK = re.compile(r"^```(console|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Way:
    """How a command is run here.

    Args:
        instead: what is run in its place; None runs the command itself.
        in_checkout: run in the checkout instead of the shared scratch folder.
        prints: text that must be in its output.
        slow: whether it takes more than about ten seconds.
    """

    instead: str | None = None
    in_checkout: bool = False
    prints: str = ""
    slow: bool = False


FEW = "training.max_steps=4 training.progress=false data.synthetic.num_train=64 data.synthetic.num_val=32"
WAYS: dict[str, Way] = {
    # make installs and then starts what is run here with fewer steps; the whole suite cannot run inside itself
    "make quickstart": Way(
        f"rm-opt train experiment=quickstart {FEW} hydra.run.dir=quick", prints="gold reward", slow=True
    ),
    "make test": Way("make --dry-run test", in_checkout=True, prints="-m pytest"),
    "make check": Way("make --dry-run check", in_checkout=True, prints="mypy"),
    "rm-opt --help": Way(prints="Commands:"),
    "rm-opt info": Way(prints="presets in"),
}


def commands_in(text: str) -> list[str]:
    """Commands of the fenced blocks of a document, continuation lines joined."""
    found = []
    for kind, body in BLOCK.findall(text):
        for line in re.sub(r"\s*\\\n\s*(?:> )?", " ", body).splitlines():
            command = line.removeprefix("$ ") if kind == "bash" or line.startswith("$ ") else ""
            command = re.sub(r"\s+#.*$|^#.*$", "", command).strip()
            if command:
                found.append(command)
    return found


def documented() -> list[str]:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS if (ROOT / name).exists()]
    return list(dict.fromkeys(command for text in texts for command in commands_in(text)))


def test_the_readme_gives_the_two_commands_of_a_fresh_clone():
    commands = commands_in((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"make quickstart", "make test"} <= set(commands)


def test_every_documented_command_is_run_by_this_file():
    missing = [command for command in documented() if command not in WAYS]
    assert missing == [], "give each a Way in WAYS"


def test_make_quickstart_trains_the_quickstart_experiment():
    done = subprocess.run(["make", "--dry-run", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].endswith("/rm-opt train experiment=quickstart")


def test_continued_lines_comments_and_output_are_told_apart():
    text = (
        "```console\n$ rm-opt train \\\n    seed=1\n42\n$ rm-opt info  # all\n```\n```bash\n# first\nmake test\n```\n"
    )
    assert commands_in(text) == ["rm-opt train seed=1", "rm-opt info", "make test"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """A folder in which commands find what earlier ones left."""
    return tmp_path_factory.mktemp("scratch")


def parameters() -> list[object]:
    ways = [(command, WAYS[command]) for command in documented() if command in WAYS]
    return [pytest.param(command, way, id=command, marks=[pytest.mark.slow] * way.slow) for command, way in ways]


@pytest.mark.parametrize(("command", "way"), parameters())
def test_a_documented_command_works(command, way, scratch):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    where = ROOT if way.in_checkout else scratch
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", way.instead or command],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert way.prints in done.stdout

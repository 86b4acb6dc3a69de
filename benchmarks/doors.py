"""Does one input mean the same through every door? Counts of what is right, refused, or wrong without a word.

There is one function for each kind of input.

- `rows`: files of the same comparisons in many layouts, and of some that no reading gets right.
- `models`: folders of one reward model in many forms, and of models that are broken or other ones.
- `calls`: arguments of Python calls in many types.
- `conversations`: small models of random weights, one for each family of chat templates, are exported and served as any
  other. Their doors are the export in plain transformers and in a text-classification pipeline, the server's routes,
  and the requests of OpenRLHF, TRL and verl.
- `sentences`: command lines with a mistake; right is one sentence that names it, with an exit code and nothing written.

    python benchmarks/doors.py
    python benchmarks/doors.py rows conversations
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.builders import fresh_reward_model
from tests.core import call_forms
from tests.core.pairs import row_layouts
from tests.core.storage import folder_forms
from tests.serving.doors import FAMILIES, crossings

ROOT = Path(__file__).resolve().parents[1]
BAD_COMMANDS = "tests/bad_input/test_commands.py"


def rows() -> dict[str, int]:
    """Print what a layout of rows is read as, if it is wrong or refused, and return the counts."""
    found = []
    for layout in row_layouts.LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            found.append((layout.name, row_layouts.outcome(layout, Path(folder)).replace(folder, "")))
    return counted(found)


def calls() -> dict[str, int]:
    """Print what a form of an argument gives, if it is wrong or refused, and return the counts."""
    forms = call_forms.calls(fresh_reward_model("llama"))
    return counted([(name, call_forms.outcome(call, expected)) for name, call, expected in forms])


def models() -> dict[str, int]:
    """Print what a form of a stored model gives, if it is wrong, refused or warned of, and return the counts."""
    found = []
    for form in folder_forms.FORMS:
        with tempfile.TemporaryDirectory() as folder:
            found.append((form.name, folder_forms.outcome(form, Path(folder)).replace(folder, "")))
    return counted(found)


def sentences() -> dict[str, int]:
    """Run the bad command lines of the tests, which are one list, and return the counts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", BAD_COMMANDS], cwd=ROOT, check=False
        )
        suite = ElementTree.parse(report).getroot()[0]
    tried, wrong = int(suite.attrib["tests"]), int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"tried": tried, "right": tried - wrong, "refused": 0, "wrong_without_a_word": wrong}


def counted(found: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Print each name with an outcome other than right, and return the counts of outcomes."""
    for name, told in found:
        if told != "right":
            print(f"{name}: {told.splitlines()[0]}")
    counts = {kind: sum(told.startswith(kind) for _, told in found) for kind in ("right", "refused", "warned", "wrong")}
    wrong = counts.pop("wrong")
    return {"tried": len(found), **counts, "wrong_without_a_word": wrong}


def conversations() -> dict[str, int]:
    """Print every conversation that a door does not give its reward, and return the counts."""
    found = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found += crossings(family, Path(folder))
    for each in found:
        if each.is_wrong:
            got = f"{each.reward:.6f} instead of {each.expected:.6f}"
            print(f"{each.family}, conversation {each.number}, {each.door}: {got}")
        elif each.refusal:
            print(f"{each.family}, conversation {each.number}, {each.door}: refused: {each.refusal}")
    refused, wrong = sum(bool(each.refusal) for each in found), sum(each.is_wrong for each in found)
    return {
        "tried": len(found),
        "right": len(found) - refused - wrong,
        "refused": refused,
        "wrong_without_a_word": wrong,
    }


KINDS: dict[str, Callable[[], dict[str, int]]] = {
    "rows": rows,
    "models": models,
    "calls": calls,
    "sentences": sentences,
    "conversations": conversations,
}
"""Function of each kind of input, which prints what is not right and returns counts."""


def main() -> None:
    """Print the findings of the kinds, then their counts as `name: value`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    chosen = parser.parse_args().kinds or list(KINDS)
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        parser.error(f"expected kinds of {', '.join(KINDS)}, got {unknown[0]!r}")
    counts = {f"{kind}_{name}": count for kind in chosen for name, count in KINDS[kind]().items()}
    print("\n".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()

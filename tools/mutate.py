"""Share of changed lines that a test notices: `python tools/mutate.py --rooms core optim --draw 60 --seed 1`.

Each change edits one token of a copy of the repository: a comparison, a sign, a constant, a `not`, a keyword argument
left out, or two arguments swapped. The quick tests of the changed file's room run first, those that name the file
before others, and then `tests/oracles`. With `--covered FILE` they are the quick tests of all rooms that run the
changed line, and the oracles that do. A test has seen the change if it fails with it and passes without it. A run that
is stopped after `--timeout` seconds has seen nothing. Changes are drawn in turn from the rooms, so that every part
of the list covers all rooms. Docstrings, messages, annotations, decorators and the `strict` of `zip` are left alone.
Results go to a file of JSON lines, with which the same command continues after a stop.

    pytest -m "not slow" --cov=rm_optimizer --cov-context=test   # writes .coverage, which tells each line's tests
    python tools/mutate.py --planted                             # the ten changes of tests/oracles/planted.tsv
    python tools/mutate.py --report build/mutants.jsonl          # shares by room, with the judged survivors

`tests/oracles/survivors.tsv` judges each change that no test noticed: `equal` changes no result, `cosmetic` changes
nothing that anyone relies on, and `missed` is a gap. mutmut 3.8 and cosmic-ray 8.7 do not do this in less. Neither
draws a seeded sample or runs one set of tests after another. mutmut begins with a run of all tests and wraps every
function, which the shape checks of the tests cannot read. cosmic-ray edits the work tree and leaves out no argument.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ORACLES = "tests/oracles"
ROOMS = ("core", "optim", "evaluation", "training", "landscape", "serving", "rl_coupling", "doctor")
ROOMS += ("data_efficiency", "experiments")
LIBRARIES = "torch transformers peft scipy.stats pytorch_lightning pyarrow.parquet hydra hypothesis beartype pytest"
"""Imported once: each run is forked from this process."""
MOST_TESTS = 300
"""Most tests of one change that `--covered` names, the oracles apart."""
REWRITE = "-Wignore::pytest.PytestAssertRewriteWarning"
SWAPPED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
ALIKE = {"min", "max", "minimum", "maximum", "map", "zip", "isclose", "allclose"}
"""Calls in which two arguments may change places, or whose swap cannot run."""
MESSAGES = re.compile(r"warn\w*|info|debug|print|s?echo|\w+Error|\w+Warning|[Ff]ield|TypeVar|cast|isinstance")
"""Calls whose arguments are words for a reader, or types."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One edit of one file."""

    file: str
    line: int
    source: str
    """The line as it is, which finds a change again when lines move."""
    kind: str
    before: str
    after: str
    start: int
    """Offset in bytes of the text that is replaced."""
    old: str
    new: str


def candidates(root: Path, file: str) -> list[Change]:
    """Every change of a file."""
    text = (root / file).read_bytes()
    starts, lines = [0], text.splitlines(keepends=True)
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in _changeable(ast.parse(text)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for kind, before, new in _mutants(node):
            edit = {"start": start, "old": text[start:end].decode(), "new": f"({new})"}
            after = before.partition("(")[0] + "(...)" if kind == "keyword" else new
            source = lines[node.lineno - 1].decode().strip()
            where = {"file": file, "line": node.lineno, "source": source}
            found.append(Change(**where, kind=kind, before=before, after=after, **edit))
    return found


def _changeable(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that compute something, the outer before the inner."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Call) and MESSAGES.fullmatch(ast.unparse(node.func).split("(")[-1].split(".")[-1]):
        return
    if isinstance(node, ast.expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "slice") and not isinstance(node, ast.Subscript):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, ast.AST):
                yield from _changeable(child)


def _mutants(node: ast.expr) -> Iterator[tuple[str, str, str]]:
    """Kind, shown text and new text of each change of one expression, its parts left as they are."""
    whole = ast.unparse(node)
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            operators = [*node.ops[:i], SWAPPED[type(operator)](), *node.ops[i + 1 :]]
            yield "compare", whole, ast.unparse(ast.Compare(node.left, operators, node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        texts = [each for each in ast.walk(node) if isinstance(each, ast.JoinedStr) or _constant(each, str)]
        if not texts:
            yield "sign", whole, ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield "and/or", whole, ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not" if isinstance(node.op, ast.Not) else "sign", whole, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", whole, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield (
            "constant",
            whole,
            repr(node.value + 1 if isinstance(node.value, int) or not node.value else 2 * node.value),
        )
    elif isinstance(node, ast.Call):
        for i, each in enumerate(node.keywords):
            if each.arg not in (None, "strict"):
                kept = [*node.keywords[:i], *node.keywords[i + 1 :]]
                shown = f"{ast.unparse(node.func)}(... {ast.unparse(each)})"
                yield "keyword", shown, ast.unparse(ast.Call(node.func, node.args, kept))
        if (
            len(node.args) == 2
            and ast.dump(node.args[0]) != ast.dump(node.args[1])
            and ast.unparse(node.func).split(".")[-1] not in ALIKE
            and not any(isinstance(each, ast.Starred) for each in node.args)
        ):
            yield "swap", whole, ast.unparse(ast.Call(node.func, node.args[::-1], node.keywords))


def _constant(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def drawn(root: Path, rooms: Sequence[str], count: int, seed: int) -> list[Change]:
    """Seeded changes, one of each room in turn, of each line at most one."""
    rng, lists = random.Random(seed), []
    for room in rooms:
        files = sorted(path.relative_to(root).as_posix() for path in (root / "rm_optimizer" / room).rglob("*.py"))
        lines: dict[tuple[str, int], list[Change]] = defaultdict(list)
        for change in (each for file in files for each in candidates(root, file)):
            lines[change.file, change.line].append(change)
        lists.append([rng.choice(lines[line]) for line in rng.sample(sorted(lines), min(len(lines), count))])
    return [each[i] for i in range(count) for each in lists if i < len(each)][:count]


def planted(root: Path) -> list[Change]:
    """Changes of the list; each text must be in its file once."""
    changes = []
    for row in _table(root / ORACLES / "planted.tsv"):
        text = (root / row["file"]).read_text(encoding="utf-8")
        if text.count(row["before"]) != 1:
            raise SystemExit(f"expected {row['before']!r} once in {row['file']}, got {text.count(row['before'])} times")
        lead = text[: text.index(row["before"])]
        edit = {"start": len(lead.encode()), "old": row["before"], "new": row["after"]}
        changes.append(Change(**row, line=lead.count("\n") + 1, source=row["before"], **edit))
    return changes


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_files(root: Path, change: Change) -> list[str]:
    """Quick tests of the file's room, those that name the changed file before those that name its folder."""
    parts = Path(change.file).with_suffix("").parts
    dotted, folder = ".".join(parts), ".".join(parts[:-1])
    ranks = {}
    for path in sorted((root / "tests" / parts[1]).rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        near = parts[-1] in path.stem or path.stem.removeprefix("test_") in parts[-1]
        ranks[path.relative_to(root).as_posix()] = (-4 * near - 2 * (dotted in text) - (folder in text), len(text))
    return sorted(ranks, key=ranks.__getitem__)


def covering_tests(copy: Path, change: Change, covered: Path) -> list[str]:
    """Quick tests that run the changed line, the oracles last; empty if it only runs when its module is imported.

    At most `MOST_TESTS` and the oracles, those of the changed file's room first. A line that runs in the set-up of a
    fixture counts for all tests of the file, since they may share the fixture.

    Args:
        copy: copy of the repository.
        change: the change.
        covered: data file of coverage.py, with a context for each test.
    """
    from coverage import CoverageData

    data = CoverageData(str(covered))
    data.read()
    (measured,) = (name for name in data.measured_files() if name.endswith(f"/{change.file}"))
    tests = set()
    for context in data.contexts_by_lineno(measured).get(change.line, ()):
        test, _, phase = context.partition("|")
        tests.add(test.partition("::")[0] if phase == "setup" else test)
    tests = {test for test in tests if test and test.partition("::")[0] not in tests - {test}}
    near = {file: rank for rank, file in enumerate(test_files(copy, change))}

    def rank(test: str) -> tuple[bool, int, str]:
        file = test.partition("::")[0]
        return file.startswith(ORACLES), near.get(file, len(near)), test

    found = sorted((test for test in tests if (copy / test.partition("::")[0]).exists()), key=rank)
    others = [test for test in found if not test.startswith(ORACLES)]
    return [*others[:MOST_TESTS], *(test for test in found if test.startswith(ORACLES))]


def pytest_in(copy: Path, arguments: list[str], timeout: float) -> str | None:
    """First failure of a run of the copy's tests; None if there is none in the time."""
    log = copy.with_suffix(".txt")
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        sys.modules["__main__"] = ModuleType("__main__")  # or a process that is spawned imports this file
        code = import_module("pytest").main(
            ["-x", "-rfE", "-m", "not slow", "-p", "no:cacheprovider", REWRITE, *arguments]
        )
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + timeout
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.2)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
    code = os.waitstatus_to_exitcode(done[1])
    if code in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    return failed[1] if failed else f"exit {code}"


def tried(
    copy: Path, change: Change, timeout: float, broken: dict[str, bool], covered: Path | None
) -> dict[str, object]:
    """Result of one change, which is undone again; `broken` keeps which tests fail without a change."""
    path, began = copy / change.file, time.monotonic()
    whole = path.read_bytes()
    end = change.start + len(change.old.encode())
    assert whole[change.start : end].decode() == change.old, "the work tree changed between the draw and the copy"
    changed = whole[: change.start] + change.new.encode() + whole[end:]

    def write(content: bytes) -> None:
        path.write_bytes(content)
        seconds = 10**9 + time.monotonic_ns() // 10**6  # Python recompiles a file whose time is another
        os.utime(path, (seconds, seconds))

    def seen_by(tests: list[str]) -> str | None:
        while True:
            without = [test for test, fails in broken.items() if fails]
            write(changed)
            failed = pytest_in(copy, [*tests, *(f"--deselect={test}" for test in without)], timeout)
            write(whole)
            if failed is None or failed in without:  # the error of a whole file comes though it is left out
                return failed
            if failed not in broken:
                broken[failed] = failed.startswith("tests") and pytest_in(copy, [failed], timeout) is not None
            if not broken[failed]:
                return failed

    found = covering_tests(copy, change, covered) if covered else []
    if not found:
        found = [*(each for each in test_files(copy, change) if (copy / each).exists()), ORACLES]
    oracles = [test for test in found if test.startswith(ORACLES)]
    others = found[: len(found) - len(oracles)]
    quick = seen_by(others) if others else None
    oracle = None if quick or not oracles else seen_by(oracles)
    result = {"room": change.file.split("/")[1], "quick": quick, "oracle": oracle}
    return {**asdict(change), **result, "seconds": round(time.monotonic() - began)}


def worker(changes: list[Change], results: Path, timeout: float, covered: Path | None) -> None:
    """Try changes in a copy of the work tree's files."""
    copy = Path(mkdtemp(prefix="mutate-"))  # no TemporaryDirectory: a process that a test forks would remove it
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if failed := pytest_in(copy, ["tests/test_architecture.py"], timeout):
        raise SystemExit(f"{failed} without a change:\n{copy.with_suffix('.txt').read_text()}")
    broken: dict[str, bool] = {}
    for change in changes:
        result = tried(copy, change, timeout, broken, covered)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        seen = result["quick"] or result["oracle"] or "NOT SEEN"
        print(f"{change.file}:{change.line} {change.kind}: {change.before} -> {change.after}  {seen}", flush=True)
    shutil.rmtree(copy)


def report(results: Path) -> None:
    """Print the shares by room, and each change that no test has seen and nobody has judged."""
    key = ("file", "source", "before", "after")
    rows = _table(ROOT / ORACLES / "survivors.tsv")
    judged = {tuple(row[name] for name in key): row["verdict"] for row in rows}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        seen = "quick" if each["quick"] else "oracle" if each["oracle"] else None
        verdict = seen or judged.get(tuple(each[name] for name in key), "not judged")
        for room in (each["room"], "all"):
            counts[room][verdict] += 1
        if verdict == "not judged":
            print(*(each[name] for name in key), sep="\t")
    for room in sorted(counts, key=lambda name: (name == "all", name)):
        found = counts[room]
        of = found.total() - found["equal"] - found["cosmetic"]
        print(
            f"{room}: {found['quick']} of {of} seen by quick tests, {found['quick'] + found['oracle']} with oracles;",
            dict(found),
        )


def main() -> None:
    """Try changes, or report on those that were tried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--draw", type=int, default=60, help="number of changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds of a run of a room's tests, or of the oracles"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--covered", type=Path, help="data file of coverage.py with a context for each test")
    parser.add_argument("--planted", action="store_true", help="try the changes of the list, not drawn ones")
    parser.add_argument("--list", action="store_true", help="print the changes and try none")
    parser.add_argument("--report", type=Path, help="print the shares of a file of results")
    options = parser.parse_args()
    if options.report:
        report(options.report)
        return
    changes = planted(ROOT) if options.planted else drawn(ROOT, options.rooms, options.draw, options.seed)
    if options.list:
        for each in changes:
            print(f"{each.file}:{each.line}", each.kind, each.before, each.after, sep="\t")
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    done = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    known = {(each["file"], each["start"], each["new"]) for each in done}
    left = [each for each in changes if (each.file, each.start, each.new) not in known]
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for library in LIBRARIES.split():
        import_module(library)
    children = []
    for i in range(options.workers):
        if (child := os.fork()) == 0:
            worker(left[i :: options.workers], options.results, options.timeout, options.covered)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    report(options.results)


if __name__ == "__main__":
    main()

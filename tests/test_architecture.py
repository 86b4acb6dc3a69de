"""A package imports only from lower floors, and words and commands load without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rm_optimizer"
FLOORS = (
    {"errors", "lazy"},
    {"schema"},
    {"records"},
    {"core", "optim"},
    {"evaluation"},
    {"training", "doctor", "landscape", "serving", "rl_coupling"},
    {"experiments", "explanation"},
    {"data_efficiency"},
    {"reporting"},
    {"compare"},
    {"interfaces"},
    {"train", "analyze"},
)
"""Packages and modules of `rm_optimizer`; each imports only from floors before its own."""
INNER = {
    "core": (
        {"rows", "metrics"},
        {"pairs"},
        {"base"},
        {"tokens"},
        {"streaming", "classifier"},
        {"storage"},
        {"model"},
        {"importing"},
        {"data_loader", "reward_model"},
    ),
    "landscape": (
        {"operators", "optimizer_comparison", "visualization"},
        {"solvers"},
        {"estimates", "training_curvature"},
        {"computation", "spectrum"},
        {"hessian"},
        {"measured_loss"},
        {"layers", "surface"},
        {"analysis_context"},
        {"analysis", "series"},
    ),
    "serving": (
        {"options", "protocol", "child_process"},
        {"update_protocol"},
        {"engine"},
        {"client", "service"},
        {"weights"},
        {"http"},
        {"embedded"},
    ),
}
"""The same one level down, for packages whose rooms have an order."""
ADDRESSES = {
    ("records.codec", "reporting.results"),
    ("landscape", "compare"),
    ("serving.client.client", "explanation.explain"),
    ("landscape.optimizer_comparison", "compare"),
    *(("landscape.visualization", f"reporting.landscape.{name}") for name in ("layers", "results", "runs")),
    *(("landscape.visualization", f"reporting.landscape.{name}") for name in ("spectrum", "surfaces")),
    ("landscape.visualization", "reporting.run_report"),
}
"""Names of a higher floor that a public name or method loads on first use, as importing and imported module."""
BESIDE = {("rl_coupling", "serving"), ("rl_coupling", "doctor")}
"""Rooms that import from another on their own floor, as docs/architecture.md says why."""
MOST_FILES = 15
IMPORTS = (ast.Import, ast.ImportFrom)
"""Modules of a folder, `__init__` aside; past that it is divided."""


def module_of(path: Path) -> str:
    """Dotted name below `rm_optimizer`; a package's is its own name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


MODULES = {module_of(path): path for path in sources()}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every import of ours, those in functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rm_optimizer":
            home = (node.module or "").partition(".")[2]
            for alias in node.names:
                inside = f"{home}.{alias.name}".strip(".")
                yield node.lineno, inside if inside in MODULES else home
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("rm_optimizer."):
                    yield node.lineno, alias.name.removeprefix("rm_optimizer.")


@cache
def imports_by_module() -> dict[str, list[tuple[int, str]]]:
    """Line and module of every import of ours, by the module that imports."""
    return {
        name: [
            (line, other)
            for line, other in imported(ast.parse(path.read_text(encoding="utf-8")))
            if other and (name, other) not in ADDRESSES
        ]
        for name, path in MODULES.items()
    }


def arrows_up(floors: tuple[set[str], ...], prefix: str = "") -> list[str]:
    """Imports that do not go to a lower floor, among the children of a package."""
    level = {room: index for index, rooms in enumerate(floors) for room in rooms}
    found = []
    for name, line, room, other in (
        (name, line, name.removeprefix(prefix).partition(".")[0], other.removeprefix(prefix).partition(".")[0])
        for name, imports in imports_by_module().items()
        for line, other in imports
        if name.startswith(prefix) and other.startswith(prefix)
    ):
        if room != other and level[other] >= level[room] and (room, other) not in BESIDE:
            found.append(f"{name}, line {line}: {prefix}{other}")
    return found


def circle(children: dict[str, set[str]]) -> list[str]:
    """A circle of imports among the children of a package; empty if there is none."""
    try:
        TopologicalSorter(children).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_a_floor():
    assert {name.partition(".")[0] for name in MODULES} <= set().union(*FLOORS)
    for package, floors in INNER.items():
        inside = {name.split(".")[1] for name in MODULES if name.startswith(f"{package}.")}
        assert inside <= set().union(*floors)


def test_imports_go_to_lower_floors():
    assert arrows_up(FLOORS) == []


@pytest.mark.parametrize("package", INNER)
def test_imports_inside_a_package_go_to_lower_floors(package):
    assert arrows_up(INNER[package], f"{package}.") == []


@pytest.mark.parametrize("package", ["", *(name for name, path in MODULES.items() if path.name == "__init__.py")])
def test_no_circle_of_imports_among_the_children_of_a_package(package):
    prefix = f"{package}." if package else ""
    children: dict[str, set[str]] = {}
    for name, imports in imports_by_module().items():
        if not name.startswith(prefix):
            continue
        child = name.removeprefix(prefix).partition(".")[0]
        others = {other.removeprefix(prefix).partition(".")[0] for _, other in imports if other.startswith(prefix)}
        children.setdefault(child, set()).update(others - {child})
    assert circle(children) == []


def test_no_folder_holds_more_files_than_a_reader_takes_in():
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    crowded = {str(folder.relative_to(PACKAGE)): count for folder, count in counts.items() if count > MOST_FILES}
    assert crowded == {}


def test_a_wrong_import_would_be_seen():
    tree = ast.parse("def late():\n    from rm_optimizer.training.run import build_model\n")
    assert list(imported(tree)) == [(2, "training.run")]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_optim_does_not_import_core():
    found = [path.name for path in (PACKAGE / "optim").glob("*.py") if "rm_optimizer.core" in path.read_text("utf-8")]
    assert found == []


def test_the_page_of_a_run_and_the_records_of_a_comparison_need_no_torch():
    """Imports at the top of the modules, and of all that these import there."""
    seen, left = set[str](), {"reporting.folder_page", "experiments.optimizer_comparison.setting"}
    while left:
        seen.add(name := left.pop())
        tops = [node for node in ast.parse(MODULES[name].read_text("utf-8")).body if isinstance(node, IMPORTS)]
        found = {word for node in tops for _, word in imported(ast.Module([node], []))}
        left |= {word for word in found if word in MODULES} - seen
        outside = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in tops}
        assert not {str(word).partition(".")[0] for word in outside} & {"torch", "transformers", "hydra"}, name


ODD_OPENINGS = (
    *("What", "Whether", "How", "Which", "Where", "Who", "Why", "When", "If"),
    *("Of", "In", "To", "By", "With", "As", "At", "For", "From", "On", "Also", "Those"),
)


def test_docstrings_begin_with_a_noun_phrase_or_a_verb():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    odd = [
        f"{name}: {text.splitlines()[0]}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.split(maxsplit=1)[0].rstrip(",:") in ODD_OPENINGS
    ]
    assert odd == []


def test_tests_are_annotated_in_one_way():
    """A test returns nothing, and no test says so."""
    annotated = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.returns is not None
    ]
    assert not annotated


def test_arrays_are_annotated_in_one_way():
    odd = [
        f"{name}, line {node.lineno}: {text}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None
        if re.search(r"torch\.Tensor|NDArray\[np\.float", text := ast.unparse(node.annotation))
    ]
    assert odd == []


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


SLOW = {"torch", "scipy.stats", "scipy.optimize", "sklearn", "pandas", "sympy", "matplotlib", "pytorch_lightning"}
"""Modules that take a third of a second or more."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data check {pairs}", "pairs"),
        ("data check nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("info", "adamw"),
        ("evaluate ./nowhere -d {pairs}", "no model at ./nowhere"),
        ("evaluate org/name -d nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("report nowhere", "no folder nowhere"),
    ],
)
def test_a_command_imports_nothing_slow_before_it_needs_it(tmp_path, words, said):
    rows = "".join(f'{{"prompt": "What is {n}?", "chosen": "It is {n}.", "rejected": "No."}}\n' for n in range(4))
    (tmp_path / "pairs.jsonl").write_text(rows)
    argv = ["rm-opt", *words.format(pairs=tmp_path / "pairs.jsonl").split()]
    code = (
        f"import sys\nfrom rm_optimizer.interfaces.entry import main\nsys.argv = {argv}\n"
        f"try:\n    main()\nfinally:\n    print(sorted({SLOW} & set(sys.modules)))"
    )
    done = run_python(code)
    assert said in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("option", ["data.train=nowhere.jsonl", "data.val=['nowhere*.jsonl']", "model.path=./nowhere"])
def test_a_path_that_does_not_exist_is_refused_without_torch(tmp_path, option):
    code = (
        "import sys\nfrom rm_optimizer.errors import RMOptimizerError\nfrom rm_optimizer.train import check_command\n"
        f"try:\n    check_command({[option, f'output_dir={tmp_path}/run']})\n"
        f"except RMOptimizerError as error:\n    print(error, {HEAVY})"
    )
    done = run_python(code)
    assert "nowhere" in done.stdout, done.stderr
    assert done.stdout.strip().endswith(" []") or done.stdout.strip().endswith("['numpy']")


def test_help_imports_little():
    code = (
        "import sys\nfrom rm_optimizer.interfaces.cli import app\nsys.argv = ['rm-opt', '--help']\n"
        f"try:\n    app()\nfinally:\n    print({HEAVY}, len(sys.modules), file=sys.stderr)"
    )
    done = run_python(code)
    heavy, num_modules = done.stderr.strip().rsplit(" ", 1)
    assert (done.returncode, heavy) == (0, "[]")
    assert "Usage: rm-opt" in done.stdout
    assert int(num_modules) < 500  # about 350, which take a third of a second


CUDA = {
    "core/classifier/attention.py": "FlashAttention's and FlexAttention's kernels are CUDA's",
    "experiments/trial.py": "trials get devices by CUDA_VISIBLE_DEVICES",
    "landscape/operators/objective.py": "TF32 is CUDA's",
    "landscape/solvers/reference.py": "an argument of PyHessian",
    "records/randomness.py": "a name in checkpoints of earlier versions",
    "schema/config.py": "a name of Lightning's",
    "serving/embedded/vllm_worker.py": "vLLM gets devices by CUDA_VISIBLE_DEVICES",
    "serving/weights/group_transfer.py": "NCCL is CUDA's",
}
"""Files that name CUDA, with the reason; all others ask `records/accelerator.py` for the devices of this machine."""


def test_cuda_is_named_only_where_nothing_else_would_do():
    named = re.compile(r"torch\.cuda|[\"']cuda(:\d)?[\"']")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if named.search(path.read_text("utf-8"))}
    assert found == CUDA.keys()


def test_scripts_import_names_that_the_package_has():
    folders = ("benchmarks", "studies", "tools", "examples")
    scripts = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    missing = [
        f"{path.name}: {module.__name__}.{name.name}"
        for path in scripts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name
        for module in [import_module(node.module or "")]
        for name in node.names
        if not hasattr(module, name.name)
        and not (hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name.name}"))
    ]
    assert len(scripts) > 40
    assert missing == []

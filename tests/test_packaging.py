"""The wheel carries the presets and, in an empty folder, composes what the checkout composes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).resolve().parent.parent
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}
OVERRIDES = [
    [],
    ["optimizer=muon", "hardware=h100"],
    ["model=tiny", "optimizer=lion", "training.epochs=2", "logger=wandb"],
    ["experiment=quickstart", "seed=3", "data.columns={prompt: question}"],
]


def test_every_required_package_is_imported_and_every_import_is_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [line for lines in project["optional-dependencies"].values() for line in lines]
    required = {canonical(Requirement(line).name) for line in project["dependencies"]}
    known = required | {canonical(Requirement(line).name) for line in optional}
    modules = packages_distributions()
    used: set[str] = set()
    for path in (ROOT / "rm_optimizer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            used |= {canonical(name) for each in names for name in modules.get(each.split(".")[0], [])}
    # TensorBoard writes through Lightning's logger; the others come with transformers, torch, Lightning and FastAPI.
    assert required - used == {"tensorboard"}
    brought = {"huggingface-hub", "packaging", "pyyaml", "jinja2", "lightning-utilities", "pydantic", "pydantic-core"}
    traces = {name for name in used if name.startswith("opentelemetry-")}  # exported where a user has installed them
    assert used - known - brought - traces <= {"rm-optimizer", "starlette"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True)
    return folder


def run(command: list[str], cwd: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_every_preset(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    presets = {f"rm_optimizer/configs/{file.relative_to(ROOT / 'configs')}" for file in ROOT.glob("configs/**/*.yaml")}
    assert presets <= set(names)
    assert "rm_optimizer/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"rm_optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda overrides: " ".join(overrides) or "nothing")
def test_the_wheel_composes_what_the_checkout_composes(site, tmp_path, overrides):
    words = [*overrides, "--cfg", "job"]
    installed = run([sys.executable, str(site / "bin" / "rm-opt"), "train", *words], tmp_path, site)
    checkout = run([sys.executable, "-m", "rm_optimizer.train", *words], tmp_path, ROOT)
    assert installed == checkout
    assert "optimizer:" in installed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_wheel_reads_its_own_presets(site, tmp_path):
    code = "from rm_optimizer.schema import config_root; print(config_root())"
    assert run([sys.executable, "-c", code], tmp_path, site).strip() == str(site / "rm_optimizer" / "configs")


def test_nothing_that_is_installed_brings_torchs_companions():
    """They pin torch's exact version and would hold it back, or fail to import beside another one."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*declared["dependencies"], *declared["optional-dependencies"]["dev"]]
    seen: set[str] = set()
    while waiting:
        wanted = Requirement(waiting.pop())
        if wanted.name in seen or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(wanted.name)
        try:
            waiting += requires(wanted.name) or []
        except PackageNotFoundError:
            continue
    assert "torch" in seen
    assert seen.isdisjoint(UNWANTED)

"""Trials of the readiness study: one measures one world."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rm_optimizer.experiments.readiness.measurement import MeasuredWorld, WorldSize, measure_world
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.experiments.study.plan import PlannedTrial, planned_trial
from rm_optimizer.experiments.study.trial import WORK
from rm_optimizer.records.files import write_text

TASK = "rm_optimizer.experiments.readiness.trials:measure"
WORLD_FILE = "world.json"
_CODE = ("stacked_gru", "world", "reward_models", "sharpness", "policy_training", "measurement")


def code_digest() -> str:
    """16 hexadecimal digits of the code that makes worlds, models, policies and their features.

    Comments, docstrings, layout and annotations are no part of it.
    """
    room = Path(__file__).parent
    shared = room.parents[1] / "rl_coupling" / "readiness" / "features.py"
    digest = hashlib.sha256()
    for path in (*(room / f"{name}.py" for name in _CODE), shared):
        digest.update(ast.dump(_Bare().visit(ast.parse(path.read_text(encoding="utf-8")))).encode())
    return digest.hexdigest()[:16]


class _Bare(ast.NodeTransformer):
    """Leaves out what does not run."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def planned_worlds(seeds: Sequence[int], size: WorldSize) -> list[PlannedTrial]:
    """A trial for each world; its name depends on the code too."""
    values = asdict(size) | {"architectures": list(size.architectures)}
    return [planned_trial(f"world {seed}", {"world": seed, "size": values, "code": code_digest()}) for seed in seeds]


def measure(spec: Mapping[str, Any], folder: Path) -> dict[str, float | int | str | None]:
    """Measure one world on one thread, and keep its models in `world.json`.

    Args:
        spec: one of `planned_worlds`.
        folder: folder of the trial's work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        size = WorldSize(**spec["size"] | {"architectures": tuple(spec["size"]["architectures"])})
        found = measure_world(spec["world"], size)
    finally:
        torch.set_num_threads(threads)
    write_text(folder / WORLD_FILE, found.to_json() + "\n")
    return {"world": found.seed, "models": len(found.models), "ceiling": found.ceiling}


def measured_worlds(study: Study, seeds: Sequence[int]) -> list[MeasuredWorld]:
    """The worlds of a study that are measured, of these seeds."""
    found = []
    for planned in study.plan.trials:
        trial = study.trial(planned)
        if planned.spec["world"] in seeds and trial.result is not None and trial.result.status == "finished":
            text = (trial.folder / WORK / WORLD_FILE).read_text(encoding="utf-8")
            found.append(MeasuredWorld.from_json(text))
    return sorted(found, key=lambda world: world.seed)

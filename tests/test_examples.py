"""The scripts of `examples/` run as a user starts them, one after the other in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.schema.data import SyntheticConfig
from tests.serving.running import free_socket

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEED_AN_ACCOUNT = {"wandb_dashboard.py"}
"""Scripts that another test imports, since they cannot run without an account."""
FEW = ["training.max_steps=4", "training.progress=false", "batching.batch_size=8"]


@pytest.fixture(scope="module")
def start(tmp_path_factory, python):
    """Run a script in the folder of these tests and return what it printed."""
    folder = tmp_path_factory.mktemp("examples")
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])

    def run(script: str, *arguments: str) -> str:
        command = [python, str(EXAMPLES / script), *arguments]
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "accuracy " in run("train_from_table.py", *FEW)
    pairs = synthetic_world(SyntheticConfig(num_train=24, num_val=2)).train
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair.to_dict()) + "\n" for pair in pairs), encoding="utf-8")
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "printed"),
    [
        ("score_and_rank.py", ["outputs/from_table"], "beats the next with probability 0."),
        ("spectrum_of_a_run.py", ["outputs/from_table", "pairs.jsonl", "8"], "eigenvalue "),
        ("custom_callback.py", [*FEW, "data.synthetic.num_train=32", "data.synthetic.num_val=8"], "step 2: margin "),
        ("best_of_n.py", ["outputs/from_table/best"], "best of 64: reward "),
        ("cold_start_rlhf.py", ["1"], "step 1: KL "),
        ("nano_reward_model.py", ["pairs.jsonl", "pairs.jsonl"], "accuracy "),
        ("serve_and_update.py", ["outputs/from_table/best"], "\ndoubled "),
    ],
)
def test_an_example_runs(start, script, arguments, printed):
    if script == "serve_and_update.py":
        with free_socket() as taken:
            arguments = [*arguments, str(taken.getsockname()[1])]
    assert printed in start(script, *arguments)


def test_every_python_example_is_run():
    source = Path(__file__).read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.glob("*.py")} - NEED_AN_ACCOUNT
    assert [name for name in names if f'"{name}"' not in source] == []

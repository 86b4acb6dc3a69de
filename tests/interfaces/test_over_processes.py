"""`evaluate`, `score`, `select` and `blame` by torchrun: the same bits for any number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from rm_optimizer.core.streaming.workers import change_model, end_chunks, follow_chunks, lead_chunks, map_chunks
from rm_optimizer.errors import CheckpointError
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_reward_model
from tests.training.launched import environment

RM_OPT = Path(sys.executable).with_name("rm-opt")


def chunk_of(number: int, chunk: int) -> int:
    if chunk == 3:
        raise CheckpointError("chunk 3 is bad")
    return number * chunk


def unreadable() -> int:
    raise CheckpointError("the model is damaged here")


def process(rank: int, size: int, folder: str) -> None:
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    if rank:
        assert follow_chunks(lambda: 10)
        assert follow_chunks(unreadable)
        assert not follow_chunks(lambda: 10)
        Path(folder, "left").touch()
        os._exit(0)
    lead_chunks()
    assert [*map_chunks(chunk_of, 10, iter((0, 1, 2)), None)] == [0, 10, 20]
    with pytest.raises(CheckpointError, match="chunk 3 is bad"):
        [*map_chunks(chunk_of, 10, range(7), None)]
    assert [*map_chunks(chunk_of, 10, [5], None)] == [50]
    change_model()
    with pytest.raises(CheckpointError, match="the model is damaged here"):
        [*map_chunks(chunk_of, 10, range(2), None)]
    change_model()
    end_chunks()
    assert [*map_chunks(chunk_of, 10, [1, 2], None)] == [10, 20]  # alone again
    Path(folder, "done").touch()
    os._exit(0)  # gloo's threads may abort a process that ends as usual


@pytest.mark.slow
def test_chunks_are_dealt_in_order_and_errors_raised_by_the_first_process(tmp_path):
    torch.multiprocessing.spawn(process, (2, str(tmp_path)), nprocs=2)
    assert (tmp_path / "done").exists()
    assert (tmp_path / "left").exists()


def test_one_process_of_torchrun_computes_alone(monkeypatch):
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    lead_chunks()
    assert [*map_chunks(chunk_of, 10, [1, 2], None)] == [10, 20]


@pytest.mark.slow
def test_a_users_mistake_is_one_sentence_although_other_models_follow(tmp_path):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", RM_OPT]
    words = ["evaluate", "empty", "model", "--suite", "nonesuch.yaml"]
    done = subprocess.run(
        [*start, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert "error: nonesuch.yaml: the suite cannot be read" in done.stderr
    assert "RuntimeError" not in done.stderr


def test_tasks_of_slurm_and_workers_beside_torchrun_are_refused(tmp_path, monkeypatch, capsys):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Why?", "chosen": "So.", "rejected": "No."}) + "\n")
    words = ["evaluate", str(tmp_path / "model"), "--data", str(pairs)]

    def refused(*more: str) -> str:
        with pytest.raises(SystemExit):
            app([*words, *more])
        return capsys.readouterr().err

    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "expected one process, or several of torchrun, got tasks of SLURM" in refused()
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun has started the processes that score" in refused("--ray", "2")
    assert "torchrun has started the processes that score" in refused("--suite", "rewardbench", "--ray", "2")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "suite", "score", "select", "blame"])
def test_one_two_and_four_processes_write_the_same_bits(command, tmp_path):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    tiny_reward_model("llama", seed=1).save_pretrained(tmp_path / "other")
    own = {"path": "pairs.jsonl", "layout": {"format": "explicit"}, "group": ["part"], "rows": 700}
    suite = {"source": "here", "sets": {"main": own}, "score": "mean", "average": {"mean": {"mean": ["0", "1"]}}}
    (tmp_path / "suite.yaml").write_text(json.dumps(suite))
    rows = [
        {"prompt": f"Number {i % 90}?", "chosen": f"It is {i}.", "rejected": f"No, {i * i}.", "part": str(i % 2)}
        for i in range(700)
    ]
    sides = [{"prompt": row["prompt"], "response": row["chosen"]} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sides))
    few = rows[:300]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    words = {
        "blame": ["blame", "model", "-d", "few.jsonl", "--pair", "few.jsonl", "--damping", "0.01", "--output", "{at}"],
        "evaluate": ["evaluate", "model", "--data", "pairs.jsonl", "--bootstrap", "20", "--output", "{at}"],
        "suite": ["evaluate", "model", "other", "--suite", "suite.yaml", "--bootstrap", "20", "--output", "{at}"],
        "score": ["score", "model", "in.jsonl", "{at}/out.jsonl"],
        "select": [
            "select",
            "pairs.jsonl",
            "--k",
            "40",
            "--model",
            "model",
            "--cache",
            "{at}/cache",
            "--out",
            "{at}/out.jsonl",
        ],
    }[command]
    written = []
    for size in (1, 2) if command in ("suite", "blame") else (1, 2, 4):
        at = tmp_path / str(size)
        at.mkdir()
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "--no-python", RM_OPT]
        full = [sys.executable, *start, *(word.replace("{at}", str(at)) for word in words)]
        done = subprocess.run(full, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        names = ("pair_rewards.jsonl", "metrics.json", "suite.json", "out.jsonl", "differences.npy", "blame.json")
        files = {path.name: path.read_bytes() for path in at.rglob("*") if path.name in names}
        assert len(files) == {"evaluate": 2, "suite": 1, "score": 1, "select": 2, "blame": 1}[command]
        written.append(files)
    assert all(each == written[0] for each in written)

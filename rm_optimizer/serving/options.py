"""Options of a reward server, checked before anything is loaded. Imports no torch."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError, require_known
from rm_optimizer.records.locations import BEST_FOLDER
from rm_optimizer.schema.checks import require_key
from rm_optimizer.schema.publish import Transport

ENGINES = ("auto", "transformers", "vllm")
ACCESS_LOGS = ("off", "text", "json")
DTYPES = ("float32", "bfloat16")
DEFAULT_TRANSPORTS = "inline,path"
"""Transports for which the server opens no connection."""
DEFAULT_QUEUED_TOKENS = 131_072
"""Most queued tokens: one minute's work at 2,000 tokens a second."""
MAX_NAME = 256
LEAST_GAIN = 1.1
"""Least speed-up that is worth a second copy of the weights."""


@dataclass(frozen=True)
class ServeOptions:
    """The options of `rm-opt serve`, each with its flag and help.

    Raises:
        ConfigError: if an option is not valid.
    """

    checkpoint: Annotated[str, Argument(help="Hub id, exported folder, run folder or Lightning .ckpt.")]
    engine: Annotated[
        str,
        Option("--engine", help="auto, transformers or vllm; auto is vllm where it is installed and suits the model."),
    ] = "auto"
    host: Annotated[str, Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000
    api_key: Annotated[
        str | None, Option("--api-key", envvar="RM_OPT_API_KEY", help="Key that every request must carry.")
    ] = None
    update_key: Annotated[
        str | None,
        Option("--update-key", envvar="RM_OPT_UPDATE_KEY", help="Key of weight updates; by default --api-key."),
    ] = None
    takes_updates: Annotated[bool, Option("--updates/--no-updates", help="Accept or refuse weight updates.")] = True
    transports: Annotated[
        str, Option("--transports", help="Accepted transports of weight updates: inline, path, gloo, nccl.")
    ] = DEFAULT_TRANSPORTS
    dtype: Annotated[str, Option("--dtype", help="Type of the backbone's weights: float32 or bfloat16.")] = "float32"
    token_budget: Annotated[
        int | None, Option("--token-budget", min=1, help="Tokens of one forward pass; measured if absent.")
    ] = None
    max_queued_tokens: Annotated[
        int, Option("--max-queued-tokens", min=1, help="Most tokens of unanswered requests.")
    ] = DEFAULT_QUEUED_TOKENS
    weights_root: Annotated[
        Path | None, Option("--weights-root", help="Folder below which weight updates may name files.")
    ] = None
    served_model_name: Annotated[str | None, Option("--served-model-name", help="Model name in requests.")] = None
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads of the model.")] = None
    replicas: Annotated[
        int, Option("--replicas", min=1, help="Processes with a copy of the model, behind one port.")
    ] = 1
    ray: Annotated[
        bool, Option("--ray", help="Run the replicas on Ray Serve, on the cluster of RAY_ADDRESS or on this machine.")
    ] = False
    state: Annotated[
        Path | None, Option("--state", help="Folder that keeps published weights and their names over restarts.")
    ] = None
    check: Annotated[
        str | None,
        Option("--check", metavar="MODEL", help="Model or file of scores whose rewards the server must give."),
    ] = None
    access_log: Annotated[
        str, Option("--access-log", help="A line about each request on standard output: off, text or json.")
    ] = "off"

    def __post_init__(self) -> None:
        choices = (("--engine", self.engine, ENGINES), ("--dtype", self.dtype, DTYPES))
        for option, value, known in (*choices, ("--access-log", self.access_log, ACCESS_LOGS)):
            require_known(option, value, known)
        for option, key in (("--api-key", self.api_key), ("--update-key", self.update_key)):
            if key is not None:
                require_key(option, key)
        if self.weights_root is not None and not self.weights_root.is_dir():
            raise ConfigError(f"--weights-root must be a folder that exists, got {self.weights_root}")
        if self.engine == "vllm" and self.ray:
            raise ConfigError("--ray needs --engine transformers; --replicas alone starts several processes of vLLM")
        if self.ray and self.check is not None:
            raise ConfigError("--check is not possible with --ray; compare with rm-opt why once the server is ready")
        if self.update_key is not None and not self.takes_updates:
            raise ConfigError("--update-key and --no-updates exclude each other; leave one of them out")
        for word in self.transport_names:
            require_known("--transports", word, list(Transport))
        name = self.model_name
        if not name.isprintable() or name != name.strip() or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(
                f"--served-model-name must be 1 to {MAX_NAME} printable characters without outer blanks, got {name!r}"
            )

    @property
    def transport_names(self) -> tuple[str, ...]:
        """The transports, one by one."""
        return tuple(word.strip() for word in self.transports.split(","))

    @property
    def model_name(self) -> str:
        """Name of the model in requests: the given name, else its folder's, file's or hub id's."""
        return self.served_model_name if self.served_model_name is not None else name_of(self.checkpoint)

    @property
    def checks_host(self) -> bool:
        """True if the `Host` of requests must be this machine, since no key keeps web pages of other names out."""
        return is_loopback(self.host) and self.api_key is None

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def warning(self) -> str | None:
        """Likely mistake in the options, in one sentence."""
        if is_loopback(self.host) or self.api_key is not None:
            return None
        may_replace = " and replace the weights" if self.takes_updates and self.update_key is None else ""
        hint = ", or --no-updates to keep the weights" if may_replace else ""
        return f"everybody who reaches {self.host} may score{may_replace}: set --api-key{hint}"


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        dtype: type of the backbone's weights.
        token_budget: tokens of one pass; None measures.
        tree_budget: tokens of one pass over common starts; None is `token_budget`, at least `TREE_TOKENS` if measured.
        threads: CPU threads; None leaves PyTorch's own number.
        device: `auto`, `cpu` or `cuda`.
        packed_linears: least speed-up for which oneDNN's layout is used; None never uses it.
        replica: number of the replica, which chooses its GPU where there are several.
        replicas: number of all replicas.
        tokenizer_folder: folder for the model's tokenizer, which the server reads; empty writes none.
        engine: `transformers` or `vllm`.
        vllm_folder: folder for the model in the form that vLLM loads, written by the worker with a tokenizer folder.
    """

    checkpoint: str
    dtype: str = "float32"
    token_budget: int | None = None
    tree_budget: int | None = None
    threads: int | None = None
    device: str = "auto"
    packed_linears: float | None = LEAST_GAIN
    replica: int = 0
    replicas: int = 1
    tokenizer_folder: str = ""
    engine: str = "transformers"
    vllm_folder: str = ""


def is_loopback(host: str) -> bool:
    """True for an address or name of this machine that no other reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def name_of(checkpoint: str) -> str:
    """Name of the model from its folder or file, from its run if a run's folder holds it, or from its hub id."""
    path = Path(checkpoint).expanduser()
    if path.exists():
        path = path.resolve()
    return path.parent.name if path.name == BEST_FOLDER and path.parent.name else path.name

"""What `rm-opt serve` was told, checked before anything is loaded. Imports no torch."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from rm_optimizer.errors import ConfigError, RMOptimizerError, did_you_mean
from rm_optimizer.schema.checks import require_key
from rm_optimizer.schema.publish import Transport

ENGINES = ("auto", "transformers", "vllm")
DTYPES = ("float32", "bfloat16")
DEFAULT_TRANSPORTS = "inline,path"
"""Transports for which the server connects to nobody."""
MAX_NAME = 256
RUN_SUBFOLDERS = frozenset({"best"})
"""Folders of a run whose name says nothing of the model."""


@dataclass(frozen=True)
class ServeOptions:
    """What `rm-opt serve` was told.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        engine: `transformers`, `vllm`, or `auto`, which is vllm where it is installed and the model suits it.
        host: address to bind.
        port: port to bind.
        api_key: what every request must bring; None asks for nothing.
        update_key: what requests of weight updates must bring instead; None asks for the `api_key` there too.
        takes_updates: whether weights may be replaced at all.
        transports: of weight updates, separated by commas.
        dtype: type of the backbone's weights.
        token_budget: tokens of one pass; None measures.
        max_queued_tokens: most tokens of unanswered requests.
        weights_root: folder below which weight updates may name files; None allows none.
        served_model_name: what requests call the model.
        threads: CPU threads of the model; None leaves PyTorch's own number.

    Raises:
        ConfigError: if an option is not valid.
    """

    checkpoint: str
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    update_key: str | None = None
    takes_updates: bool = True
    transports: str = DEFAULT_TRANSPORTS
    dtype: str = "float32"
    token_budget: int | None = None
    max_queued_tokens: int = 131_072
    weights_root: Path | None = None
    served_model_name: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for option, value, known in (("--engine", self.engine, ENGINES), ("--dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ConfigError(did_you_mean(option, value, known))
        for option, key in (("--api-key", self.api_key), ("--update-key", self.update_key)):
            if key is not None:
                require_key(option, key)
        if self.weights_root is not None and not self.weights_root.is_dir():
            raise ConfigError(f"--weights-root must be a folder that exists, got {self.weights_root}")
        if self.update_key is not None and not self.takes_updates:
            raise ConfigError("--update-key and --no-updates exclude each other; leave one of them out")
        for word in self.transport_names:
            if word not in list(Transport):
                raise ConfigError(did_you_mean("--transports", word, list(Transport)))
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
        """What requests call the model: the name that was given, or that of its folder, file or hub id."""
        return self.served_model_name if self.served_model_name is not None else name_of(self.checkpoint)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def checks_host(self) -> bool:
        """Whether requests must name this machine: where no key keeps a web page of another name out."""
        return self.is_local and self.api_key is None

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def warning(self) -> str | None:
        """What is likely a mistake, in a sentence."""
        if self.is_local or self.api_key is not None:
            return None
        may_replace = " and replace the weights" if self.takes_updates and self.update_key is None else ""
        hint = ", or --no-updates to keep the weights" if may_replace else ""
        return f"everybody who reaches {self.host} may score{may_replace}: set --api-key{hint}"


def name_of(checkpoint: str) -> str:
    """The model's name: that of its folder or file, of its run where a run's folder holds it, or of its hub id."""
    path = Path(checkpoint).expanduser()
    if path.exists():
        path = path.resolve()
    return path.parent.name if path.name in RUN_SUBFOLDERS and path.parent.name else path.name


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that nobody else can take.

    Raises:
        RMOptimizerError: if the address is taken, or is none of this machine's.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        reason = (error.strerror or str(error)).lower()
        raise RMOptimizerError(f"cannot listen on {host}:{port} ({reason}); choose another --port or --host") from error
    return listening

"""What `rm-opt serve` tells the vLLM server that it starts, in a file that only its user may read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.serving.engine import EngineDescription
from rm_optimizer.serving.staged_json import description_from_json, description_to_json

SETTINGS_VARIABLE = "RM_OPTIMIZER_VLLM_SETTINGS"
"""Environment variable with the file's path; where it is missing, the plugin leaves vLLM as it is."""
RESTARTS_VARIABLE = "RM_OPTIMIZER_VLLM_RESTARTS"
"""Times that the supervisor has restarted the server."""
_FILE = "settings.json"


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """A served model and how to answer for it.

    Args:
        work: folder of this server, kept over restarts.
        folder: the model that vLLM loads.
        adapter: the first LoRA adapter, in peft's form; None serves the model alone.
        description: the model; the token budget is vLLM's to say.
        model_name: what requests call it.
        url: where it answers.
        api_key: what every request must bring; None asks for nothing.
        update_key: what requests of weight updates must bring instead; None asks for the `api_key` there too.
        takes_updates: whether weights may be replaced at all.
        transport_names: transports of weight updates.
        checks_host: whether requests must name this machine.
        max_queued_tokens: most tokens of unanswered requests.
        weights_root: folder below which weight updates may name files; None allows none.
        num_restarts: times that the server was restarted.
    """

    work: Path
    folder: Path
    adapter: Path | None
    description: EngineDescription
    model_name: str
    url: str
    api_key: str | None
    update_key: str | None
    takes_updates: bool
    transport_names: tuple[str, ...]
    checks_host: bool
    max_queued_tokens: int
    weights_root: Path | None
    num_restarts: int = 0

    @property
    def history_folder(self) -> Path:
        """Where updates are kept for restarts."""
        return self.work / "history"

    @property
    def adapters_folder(self) -> Path:
        """Where the adapters of updates are written."""
        return self.work / "adapters"

    @property
    def started_file(self) -> Path:
        """Exists once the server has answered its parity probe."""
        return self.work / "started"

    def write(self) -> Path:
        """Write the settings into the working folder, and make the folders in it."""
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / _FILE
        values = asdict(self) | {"description": description_to_json(self.description)}
        file.touch(mode=0o600)
        file.write_text(json.dumps(values, default=str), encoding="utf-8")
        return file

    @classmethod
    def read(cls) -> VllmSettings:
        """The settings that the environment points to.

        Raises:
            ConfigError: if it does not.
        """
        if SETTINGS_VARIABLE not in os.environ:
            raise ConfigError("vLLM's plugin rm_optimizer is started by `rm-opt serve CHECKPOINT --engine vllm` alone")
        values: dict[str, Any] = json.loads(Path(os.environ[SETTINGS_VARIABLE]).read_text(encoding="utf-8"))
        paths = {
            key: None if values[key] is None else Path(values[key])
            for key in ("work", "folder", "adapter", "weights_root")
        }
        restarts = int(os.environ.get(RESTARTS_VARIABLE, "0"))
        description = description_from_json(values["description"])
        values["transport_names"] = tuple(values["transport_names"])
        return cls(**{**values, **paths, "description": description, "num_restarts": restarts})

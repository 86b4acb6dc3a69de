"""Settings that `rm-opt serve` passes to its vLLM server in a file that only its user may read."""

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
"""Environment variable with the file's path; without it the plugin leaves vLLM unchanged."""
RESTARTS_VARIABLE = "RM_OPTIMIZER_VLLM_RESTARTS"
"""Environment variable with the number of restarts by the supervisor."""
_FILE = "settings.json"


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Settings of a served model.

    Args:
        work: folder of this server, kept over restarts.
        folder: folder of the model that vLLM loads.
        adapter: folder of the first LoRA adapter, in peft's form; None serves the model alone.
        description: description of the model without its token budget, which vLLM determines.
        model_name: name of the model in requests.
        url: address of the server.
        api_key: key that every request must carry; None requires no key.
        update_key: key for weight updates in its place; None requires the `api_key` there too.
        takes_updates: True if weights may be replaced.
        transport_names: transports of weight updates.
        checks_host: True if the `Host` of requests must be this machine.
        max_queued_tokens: most tokens of unanswered requests.
        weights_root: folder for the files of weight updates by path; None allows none.
        num_restarts: number of restarts of the server.
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
        values = asdict(self) | {"description": description_to_json(self.description)}
        file.touch(mode=0o600)
        file.write_text(json.dumps(values, default=str), encoding="utf-8")
        return file

    @classmethod
    def read(cls) -> VllmSettings:
        """Settings from the file that the environment names.

        Raises:
            ConfigError: if the environment names none.
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

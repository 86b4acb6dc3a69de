"""Settings that `rm-opt serve` passes to its vLLM server in a file that only its user may read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from rm_optimizer.errors import ConfigError
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.vllm.folder import VllmModel

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

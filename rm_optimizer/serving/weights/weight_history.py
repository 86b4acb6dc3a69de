"""Updates of a server on disk, which a restarted process applies to its checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from rm_optimizer.errors import WeightsRefused
from rm_optimizer.records.files import write_text
from rm_optimizer.serving.engine import StagedWeights
from rm_optimizer.serving.staged_json import staged_from_json, staged_to_json

LIST_FILE = "committed.json"


class WeightHistory:
    """Committed updates in a folder that outlives the process with the model.

    Args:
        folder: folder of the updates, created if missing; updates of an earlier process are kept.
        is_listed: also keep a list of the updates in the folder, for a process that receives none.
    """

    def __init__(self, folder: Path, *, is_listed: bool = True) -> None:
        self.folder, self._is_listed = folder, is_listed
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / LIST_FILE
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        self.committed: tuple[StagedWeights, ...] = tuple(map(staged_from_json, values))
        self._remove_others()

    @property
    def files(self) -> list[str]:
        """Files of the updates, oldest first."""
        return [str(weights.file) for weights in self.committed]

    def keep(self, weights: StagedWeights) -> StagedWeights:
        """Move the update's file into this folder, and return the update with its new path.

        Raises:
            WeightsRefused: if the file cannot be moved; nothing of it is left then.
        """
        target = self.folder / f"{weights.revision}.safetensors"
        try:
            shutil.move(weights.file, target)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise WeightsRefused(f"the update's file cannot be written: {error.strerror}") from error
        return replace(weights, file=target)

    def remember(self, weights: StagedWeights) -> None:
        """Record a kept update as served, and remove earlier ones that it replaces entirely."""
        names = {spec.name for spec in weights.tensors}
        earlier = [kept for kept in self.committed if not names.issuperset(spec.name for spec in kept.tensors)]
        self.committed = (*earlier, replace(weights, probe=None))
        self._record()

    def clear(self) -> None:
        """Remove all updates, so that only the checkpoint remains."""
        self.committed = ()
        self._record()

    def _record(self) -> None:
        if self._is_listed:
            write_text(self.folder / LIST_FILE, json.dumps([staged_to_json(kept) for kept in self.committed]))
        self._remove_others()

    def forget(self, weights: StagedWeights) -> None:
        """Remove the file of a kept update that is not served."""
        weights.file.unlink(missing_ok=True)

    def _remove_others(self) -> None:
        served = {weights.file for weights in self.committed}
        for file in self.folder.glob("*.safetensors"):
            if file not in served:
                file.unlink(missing_ok=True)

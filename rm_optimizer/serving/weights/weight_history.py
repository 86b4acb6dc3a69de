"""Updates of a server: names, staging, commits, and files for a restarted process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rm_optimizer.errors import RMOptimizerError, WeightsRefused
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.engine import STAGED, Engine, StagedWeights
from rm_optimizer.serving.update_protocol import Begin

KEPT_NAMES = 10_000
"""Most names kept; answers of older names are still distinguished by their revision."""


class ServedNames:
    """Digests of the served weights by version name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._contents: OrderedDict[str, str | None] = OrderedDict()

    def may_be(self, update: Begin | StagedWeights) -> bool:
        """True if the update's name is new, or was used for the same resulting weights."""
        self.note()
        if update.version not in self._contents:
            return True
        content = _content(self._engine, update)
        return content is not None and content == self._contents[update.version]

    def note(self) -> None:
        """Record the names of the served weights and of the checkpoint's own."""
        self._contents.setdefault(self._engine.description.version, self._engine.description.version)
        self._contents.setdefault(self._engine.version, _content(self._engine))
        while len(self._contents) > KEPT_NAMES:
            self._contents.popitem(last=False)


def _content(engine: Engine, *updates: Begin | StagedWeights) -> str | None:
    """Digest of the model with further updates; None if a sender omitted a tensor's digest."""
    digests: dict[str, str | None] = {"": engine.description.version}  # digest of the tensors that no update replaces
    for update in (*engine.committed, *updates):
        kept = {} if update.mode is RewardModelTrainingMode.full else digests
        digests = kept | {spec.name: spec.sha256 and f"{spec.dtype} {spec.sha256}" for spec in update.tensors}
    if None in digests.values():
        return None
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


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
        self.committed: tuple[StagedWeights, ...] = tuple(map(STAGED.validate_python, values))
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
            values = [STAGED.dump_python(kept, mode="json") for kept in self.committed]
            write_text(self.folder / LIST_FILE, json.dumps(values))
        self._remove_others()

    def forget(self, weights: StagedWeights) -> None:
        """Remove the file of a kept update that is not served."""
        weights.file.unlink(missing_ok=True)

    def _remove_others(self) -> None:
        served = {weights.file for weights in self.committed}
        for file in self.folder.glob("*.safetensors"):
            if file not in served:
                file.unlink(missing_ok=True)


class UpdatableEngine(ABC):
    """Common part of engines: it stages and commits one update after the other, with their files in a history."""

    def __init__(self, history: WeightHistory) -> None:
        self._history = history
        self._staged: StagedWeights | None = None
        self._updating = asyncio.Lock()

    @property
    def committed(self) -> Sequence[StagedWeights]:
        """Updates that serve on top of the checkpoint, oldest first."""
        return self._history.committed

    async def stage(self, weights: StagedWeights) -> None:
        """Read and check new weights while the old ones serve; see `Engine.stage`."""
        async with self._updating:
            self._drop_staged()
            kept = await asyncio.to_thread(self._history.keep, weights)
            try:
                await self._read(kept)
            except (RMOptimizerError, asyncio.CancelledError):
                self._history.forget(kept)
                raise
            self._staged = kept

    async def commit(self, revision: int) -> None:
        """Swap in the staged weights between two batches; see `Engine.commit`."""
        async with self._updating:
            if self._staged is None or self._staged.revision != revision:
                raise WeightsRefused("the new weights are not staged any more; begin the update again")
            staged, self._staged = self._staged, None
            try:
                await self._swap_in(staged)
            except RMOptimizerError:
                self._history.forget(staged)
                raise

    async def rollback(self) -> None:
        """Discard the staged weights; the served weights stay."""
        async with self._updating:
            self._drop_staged()
            await self._discard()

    @abstractmethod
    async def _read(self, weights: StagedWeights) -> None:
        """Let the model's processes read and check the weights."""

    @abstractmethod
    async def _swap_in(self, weights: StagedWeights) -> None:
        """Serve the weights that were read, and record them in the history; on failure serve the old ones."""

    @abstractmethod
    async def _discard(self) -> None:
        """Let the model's processes discard the weights that were read."""

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._history.forget(self._staged)
            self._staged = None

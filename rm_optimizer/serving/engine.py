"""Interface between a server and its engine: rewards of token ids with their version, and weight updates.

An update has two steps. `stage` reads and checks the new weights while the old ones answer; `commit` swaps them between
two batches. Every answer comes from the old weights until a commit has returned, and from the new ones afterwards.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rm_optimizer.errors import CheckpointError, RMOptimizerError, WeightsRefused
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.update_protocol import TensorSpec, WeightProbe

HALF_TOLERANCE = 2.0**-2
"""Least tolerance of a weight probe in half types, in units of max(1, |reward|): the sender may compute in float32."""


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of one batch, all of them from one revision of the weights.

    Args:
        rewards: raw rewards in the order of the sequences, possibly not finite.
        version: name of the weights that computed them.
        revision: their serial number, see `new_revision`; None from a server that has none, a plain vLLM.
    """

    rewards: tuple[float, ...]
    version: str
    revision: int | None

    @property
    def weights(self) -> tuple[str, int | None]:
        """Identity of the weights, equal for batches computed by the same weights."""
        return self.version, self.revision


def new_revision(after: int = 0) -> int:
    """Serial number of weights that are about to serve: milliseconds since 1970, and above `after`.

    A second run may use the same name; other weights never get the same revision, not even after a restart.
    """
    return max(after + 1, time.time_ns() // 1_000_000)


def checkpoint_revision(version: str) -> int:
    """Serial number of a checkpoint's own weights, the same on every server and below every `new_revision`.

    Args:
        version: fingerprint of the weights.
    """
    return zlib.crc32(version.encode())


@dataclass(frozen=True)
class EngineDescription:
    """Description of a loaded model.

    Args:
        engine: `transformers` or `vllm`.
        architecture: class of the classifier.
        dtype: type that the backbone computes in.
        device: device of the model.
        version: fingerprint of the checkpoint's own weights, the same on every server.
        max_length: most tokens of a sequence.
        vocab_size: exclusive upper bound of the token ids.
        token_budget: tokens of one pass at which the engine is fastest.
        tree_budget: tokens of one pass over sequences with common starts; None where the engine has no other one.
        replicas: copies of the model that compute at the same time.
        shares_prompts: True if a common start of sequences is computed once.
        pad_token_id: the id that fills masked positions; it never ends a sequence.
        tensors: names of the tensors that an update must bring, by mode.
        tokenizer_folder: folder with the model's tokenizer; empty if none was requested.
        identity: `ConversationRenderer.identity` of the model.
        export: the checkpoint's `export.json` with certificate and reward statistics; empty without one.
    """

    engine: str
    architecture: str
    dtype: str
    device: str
    version: str
    max_length: int
    vocab_size: int
    token_budget: int
    shares_prompts: bool
    tree_budget: int | None = None
    replicas: int = 1
    pad_token_id: int = 0
    tensors: Mapping[RewardModelTrainingMode, tuple[TensorSpec, ...]] = field(default_factory=dict)
    tokenizer_folder: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)
    export: Mapping[str, Any] = field(default_factory=dict)

    def require_same(self, loaded: EngineDescription, checkpoint: str | Path) -> None:
        """Refuse another checkpoint than the first load found, since a revision names its weights.

        Args:
            loaded: description of a later load.
            checkpoint: the checkpoint, for the message.

        Raises:
            CheckpointError: if the checkpoint was replaced.
        """
        # what changes a reward; budgets are measured
        fields = "version", "architecture", "dtype", "vocab_size", "max_length", "pad_token_id", "identity"
        if any(getattr(loaded, name) != getattr(self, name) for name in fields):
            raise CheckpointError(
                f"expected {checkpoint} to hold weights {self.version} with their template, as at the start, got "
                f"weights {loaded.version}; the checkpoint was replaced while it was served, so start the server again"
            )


@dataclass(frozen=True)
class StagedWeights:
    """New weights in a file, from any transport.

    Args:
        version: name of the weights once they are served.
        revision: serial number of the weights once they are served.
        mode: set of tensors in the file.
        file: safetensors file that belongs to the server; the engine moves it to the folder that restarts read.
        tensors: the sender's manifest.
        probe: rewards that the new weights must give.
    """

    version: str
    revision: int
    mode: RewardModelTrainingMode
    file: Path
    tensors: tuple[TensorSpec, ...]
    probe: WeightProbe | None = None


STAGED = TypeAdapter(StagedWeights)
"""Conversion to JSON values and back."""


def probe_sequences(probe: WeightProbe | None, max_length: int) -> list[list[int]]:
    """Token ids of the probe; without a probe, a few ids of every vocabulary."""
    return probe.input_ids if probe else [list(range(min(8, max_length)))]


def check_rewards(rewards: Sequence[float], probe: WeightProbe | None, dtype: str) -> None:
    """Compare the new weights' rewards of `probe_sequences` with the sender's.

    Args:
        rewards: rewards of the new weights.
        probe: probe of the sender, or None.
        dtype: type that the served backbone computes in.

    Raises:
        WeightsRefused: if a reward is not finite, or differs from the sender's.
    """
    if not all(map(math.isfinite, rewards)):
        raise WeightsRefused(f"the new weights give a reward that is not finite: {list(rewards)}")
    if probe is None:
        return
    least = HALF_TOLERANCE if dtype in ("bfloat16", "float16") else 0.0
    for number, (got, expected) in enumerate(zip(rewards, probe.rewards, strict=True)):
        if abs(got - expected) > max(probe.tolerance, least) * max(1.0, abs(expected)):
            raise WeightsRefused(
                f"probe[{number}]: the new weights give {got:.6g} where their sender has {expected:.6g}"
            )


def on_top(committed: Sequence[StagedWeights], weights: StagedWeights) -> tuple[StagedWeights, ...]:
    """Updates of a model after a further one, without those that it replaces entirely."""
    names = {spec.name for spec in weights.tensors}
    return *(kept for kept in committed if not names.issuperset(spec.name for spec in kept.tensors)), weights


LIST_FILE = "committed.json"
OWNER_FILE = "checkpoint"
"""File with the fingerprint of the checkpoint whose updates a folder keeps, above their folder."""


class WeightHistory:
    """Committed updates in a folder that outlives the process with the model.

    Args:
        folder: folder of the updates, created if missing; updates of an earlier process are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.committed = self.read(folder)
        self._remove_others()

    @staticmethod
    def read(folder: Path) -> tuple[StagedWeights, ...]:
        """Updates that are recorded in a folder, oldest first."""
        file = folder / LIST_FILE
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        found = map(STAGED.validate_python, values)
        return tuple(replace(weights, file=folder / weights.file.name) for weights in found)

    def own(self, version: str) -> None:
        """Record the fingerprint of the checkpoint that the updates belong to.

        Raises:
            CheckpointError: if there are updates of another checkpoint.
        """
        file = self.folder.with_name(OWNER_FILE)
        if self.committed and (not file.is_file() or file.read_text(encoding="utf-8") != version):
            raise CheckpointError(
                f"expected the updates in {file.parent} to be of weights {version}, got updates of others; serve their "
                "checkpoint, or choose another folder with --state"
            )
        write_text(file, version)

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
        """Record a kept update as served, and remove earlier ones that it replaces entirely.

        Raises:
            WeightsRefused: if the record cannot be written; the earlier one remains then.
        """
        try:
            self._record(on_top(self.committed, replace(weights, probe=None)))
        except OSError as error:
            raise WeightsRefused(f"the update cannot be recorded: {error.strerror}") from error

    def clear(self) -> None:
        """Remove all updates, so that only the checkpoint remains."""
        self._record(())

    def _record(self, committed: tuple[StagedWeights, ...]) -> None:
        write_text(self.folder / LIST_FILE, json.dumps([STAGED.dump_python(kept, mode="json") for kept in committed]))
        self.committed = committed
        self._remove_others()

    def _remove_others(self) -> None:
        served = {weights.file for weights in self.committed}
        for file in self.folder.glob("*.safetensors"):
            if file not in served:
                file.unlink(missing_ok=True)


class Engine(ABC):
    """Scores token ids, and stages and commits updates. Every method may be called from any task of one event loop.

    Args:
        history: committed updates, which outlive the process with the model.

    Attributes:
        version: name of the weights that answer the next batch; empty before the first start.
        revision: their serial number.
        failure: reason of a permanent failure; None while the engine can answer.
        num_restarts: restarts of the model's process after its death.
    """

    def __init__(self, history: WeightHistory) -> None:
        self.version, self.revision = "", 0
        self.failure: str | None = None
        self.num_restarts = 0
        self._description: EngineDescription | None = None
        self._history = history
        self._staged: StagedWeights | None = None
        self._updating = asyncio.Lock()

    @property
    def description(self) -> EngineDescription:
        """Description of the served model; available once `start` has returned."""
        assert self._description is not None, "the engine has not started"
        return self._description

    @property
    def committed(self) -> Sequence[StagedWeights]:
        """Updates that serve on top of the checkpoint, oldest first."""
        return self._history.committed

    @property
    def replica_bytes(self) -> Mapping[str, int]:
        """Memory of each process that serves the model, in bytes, by the name of the replica."""
        return {}

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """True while the model is loaded and its process runs."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model.

        Raises:
            RMOptimizerError: if it cannot be loaded.
        """

    async def restore(self) -> None:
        """Apply the updates of an earlier process to the checkpoint, which has passed its parity check.

        Raises:
            RMOptimizerError: if they cannot be loaded, or belong to another checkpoint.
        """
        self._history.own(self.description.version)
        if self.committed:
            await self._restore()
            self.version, self.revision = self.committed[-1].version, self.committed[-1].revision

    @abstractmethod
    async def stop(self) -> None:
        """Answer the accepted batches, then end the process; a second call does nothing."""

    @abstractmethod
    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards of the sequences, each with ids below `vocab_size` and 1 to `max_length` of them.

        Raises:
            EngineUnavailable: if the engine has stopped, or died on this batch again after a restart.
        """

    async def stage(self, weights: StagedWeights) -> None:
        """Read and check new weights while the old ones serve; they replace any weights staged before.

        Checks that the tensors are the mode's, with the right shapes, the manifest's digests and finite values.

        Raises:
            WeightsRefused: if a check fails; nothing is staged then.
            EngineUnavailable: if the engine is not up.
        """
        async with self._updating:
            self._drop_staged()
            kept = await asyncio.to_thread(self._history.keep, weights)
            try:
                await self._read(kept)
            except (RMOptimizerError, asyncio.CancelledError):
                kept.file.unlink(missing_ok=True)
                raise
            self._staged = kept

    async def commit(self, revision: int) -> None:
        """Swap in the staged weights between two batches, check their probe, and swap back if it fails.

        Raises:
            WeightsRefused: if nothing of this revision is staged (a restart loses it), or the probe fails.
            EngineUnavailable: if the engine is not up.
        """
        async with self._updating:
            if self._staged is None or self._staged.revision != revision:
                raise WeightsRefused("the new weights are not staged any more; begin the update again")
            staged, self._staged = self._staged, None
            try:
                await self._swap_in(staged)
            except RMOptimizerError:
                staged.file.unlink(missing_ok=True)
                raise

    async def rollback(self) -> None:
        """Discard the staged weights; the served weights stay."""
        async with self._updating:
            self._drop_staged()
            await self._discard()

    def _serve_checkpoint(self) -> None:
        """Name the checkpoint's own weights as the served ones."""
        self.version = self.description.version
        self.revision = checkpoint_revision(self.version)

    @abstractmethod
    async def _restore(self) -> None:
        """Load the updates of the history."""

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
            self._staged.file.unlink(missing_ok=True)
            self._staged = None

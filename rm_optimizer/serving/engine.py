"""Interface between a server and its engine: rewards of token ids with their version, and weight updates.

An update has two steps. `stage` reads and checks the new weights while the old ones answer; `commit` swaps them between
two batches. Every answer comes from the old weights until a commit has returned, and from the new ones afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from rm_optimizer.errors import CheckpointError, WeightsRefused
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

    A second run may use the same name; a revision is never repeated, not even after a restart of the server.
    """
    return max(after + 1, time.time_ns() // 1_000_000)


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
        shares_prompts: True if a common start of sequences is computed once.
        packed_linears: True if linear layers use weights in oneDNN's own layout.
        pad_token_id: the id that fills masked positions; it never ends a sequence.
        tensors: names of the tensors that an update must bring, by mode.
        tokenizer_folder: folder with the model's tokenizer; empty if none was requested.
        identity: `ConversationRenderer.identity` of the model.
        export: the checkpoint's `export.json` with certificate and reward statistics; empty if there is none.
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
    packed_linears: bool
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

        def identity(description: EngineDescription) -> tuple[object, ...]:  # what changes a reward; sizes are measured
            sizes = description.vocab_size, description.max_length, description.pad_token_id
            return description.version, description.architecture, description.dtype, *sizes, dict(description.identity)

        if identity(loaded) != identity(self):
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


class Engine(Protocol):
    """Scores token ids. Every method may be called from any task of one event loop."""

    @property
    def description(self) -> EngineDescription:
        """Description of the served model; available once `start` has returned."""

    @property
    def version(self) -> str:
        """Name of the weights that answer the next batch."""

    @property
    def revision(self) -> int:
        """Serial number of the weights that answer the next batch."""

    @property
    def committed(self) -> Sequence[StagedWeights]:
        """Updates that serve on top of the checkpoint, oldest first."""

    @property
    def is_up(self) -> bool:
        """True while the model is loaded and its process runs."""

    @property
    def failure(self) -> str | None:
        """Reason of a permanent failure; None while the engine can answer."""

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the model's process after its death."""

    async def start(self) -> None:
        """Load the model.

        Raises:
            RMOptimizerError: if it cannot be loaded.
        """

    async def stop(self) -> None:
        """Answer the accepted batches, then end the process; a second call does nothing."""

    async def score(self, sequences: Sequence[Sequence[int]], group_sizes: Sequence[int] | None = None) -> ScoredBatch:
        """Rewards of the sequences, each with ids below `vocab_size` and 1 to `max_length` of them.

        Args:
            sequences: token ids.
            group_sizes: number of neighbors in each group of sequences that start alike; None leaves it to the engine
                to find them.

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

    async def commit(self, revision: int) -> None:
        """Swap in the staged weights between two batches, check their probe, and swap back if it fails.

        Raises:
            WeightsRefused: if nothing of this revision is staged (a restart loses it), or the probe fails.
            EngineUnavailable: if the engine is not up.
        """

    async def rollback(self) -> None:
        """Discard the staged weights; the served weights stay."""

"""Wire format of weight updates: begin, commit or abort, and their answers. This module does not import torch."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import Field, StrictBool, StrictInt, StrictStr, StringConstraints, model_validator

from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.protocol import ErrorDetail, Items, RequestModel, ServedWeights, TokenIds, WireModel

MAX_TENSORS = 2**14
"""Most tensors of an update."""
MIN_TIMEOUT_SECONDS = 0.05
"""Shortest timeout of an update, in seconds."""
VersionName: TypeAlias = Annotated[
    StrictStr, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:+-]+$")
]
"""Version name of weights: ASCII without blanks, since it is sent in a header."""
BatchId: TypeAlias = Annotated[StrictStr, StringConstraints(min_length=1, max_length=128)]


class TensorSpec(RequestModel):
    """One tensor of an update.

    Args:
        name: name in the state of the `transformers` classifier, adapter layers included.
        shape: sizes of its axes.
        dtype: `float32`, `bfloat16`, …
        sha256: hexadecimal digest of its contiguous little-endian bytes; None where none was computed.
    """

    name: StrictStr = Field(min_length=1, max_length=1024)
    shape: Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True, max_length=16)]
    dtype: StrictStr = Field(max_length=32)
    sha256: StrictStr | None = Field(default=None, pattern="^[0-9a-f]{64}$")


class WeightProbe(RequestModel):
    """Sequences and their rewards by the sender's model; an update with other rewards is rolled back."""

    input_ids: Items[TokenIds] = Field(min_length=1)
    rewards: Items[float]
    tolerance: float = Field(default=1e-4, gt=0, description="Largest difference, in units of max(1, |reward|).")

    @model_validator(mode="after")
    def _one_reward_each(self) -> WeightProbe:
        if len(self.input_ids) != len(self.rewards):
            raise ValueError(f"expected {len(self.input_ids)} rewards, one for each sequence, got {len(self.rewards)}")
        return self


class Begin(RequestModel):
    """Announcement of an update, with everything that the receiver needs to refuse it before the transfer.

    Args:
        batch_id: the sender's id of this update; a repeated one is the same update.
        mode: set of tensors in the update.
        version: name of the weights once they are served.
        base_version: version that must be served before the update; another one is a conflict. None accepts any.
        base_revision: revision that must be served before the update; another one is a conflict. None accepts any.
        revision: serial number of the weights once they are served, if it is above the served one; None leaves it to
            the receiver. One number for several servers.
        tensors: manifest of the tensors, in the order of their transfer.
        transport: channel of the transfer.
        path: safetensors file below the server's weights root, for the transport `path`.
        rendezvous: `host:port` where the sender waits, for `gloo` and `nccl`.
        timeout_seconds: seconds after which the receiver abandons the update.
        probe: rewards to check before the new weights answer any request.
    """

    batch_id: BatchId
    mode: RewardModelTrainingMode
    version: VersionName
    base_version: VersionName | None = None
    base_revision: StrictInt | None = None
    revision: StrictInt | None = Field(default=None, gt=0, lt=2**53)
    tensors: Annotated[list[TensorSpec], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    transport: Transport
    path: StrictStr | None = Field(default=None, max_length=4096)
    rendezvous: StrictStr | None = Field(default=None, max_length=512)
    timeout_seconds: float = Field(default=120.0, ge=MIN_TIMEOUT_SECONDS)
    probe: WeightProbe | None = None

    @model_validator(mode="after")
    def _one_tensor_a_name(self) -> Begin:
        name, count = Counter(spec.name for spec in self.tensors).most_common(1)[0]
        if count > 1:
            raise ValueError(f"expected each tensor once, got {name[:64]!r} {count} times")
        return self


class Ready(ServedWeights):
    """Answer to `Begin`: the receiver is ready for the transfer."""

    batch_id: str


class Commit(RequestModel):
    """Request to validate and swap in the transferred weights; the answer is an `Outcome`."""

    batch_id: BatchId
    only_prepares: StrictBool = Field(default=False, description="Validate alone; another commit swaps the weights in.")


class Abort(RequestModel):
    """Request to abandon the update; the served weights stay."""

    batch_id: BatchId
    reason: StrictStr = Field(default="", description="Reason, kept and logged on one line of at most 500 characters.")

    @model_validator(mode="after")
    def _one_short_line(self) -> Abort:
        """Shorten untrusted text to one line, so that it fills neither memory nor log."""
        self.reason = "".join(c if c.isprintable() else " " for c in self.reason[:500])
        return self


class OutcomeStatus(StrEnum):
    """Kind of an update's end, or `prepared` before it."""

    prepared = "prepared"
    committed = "committed"
    refused = "refused"
    aborted = "aborted"


class Outcome(ServedWeights):
    """Outcome of an update and the weights served now; a repeated request gets the same answer."""

    batch_id: str
    status: OutcomeStatus
    error: ErrorDetail | None = None
    seconds: float = Field(default=0.0, description="Seconds from the beginning of the update to this outcome.")


class WeightStatus(ServedWeights):
    """`GET /rm/weights/status`: the served weights, the update in progress and an outcome."""

    active: str | None = Field(description="Id of the update in progress.")
    outcome: Outcome | None = Field(description="Outcome of the update in question, else of the last; null if unknown.")
    root: str | None = Field(description="Folder for files of the transport `path`.")
    transports: list[Transport]


class Received(WireModel):
    """Answer to an upload."""

    batch_id: str
    bytes: int

"""What goes over the wire: requests and answers of scoring, errors, and the messages of a weight update.

`/classify` speaks vLLM 0.32's form, so that a client need not know which engine answers. Unknown fields are refused,
where vLLM ignores them: a client that asks for raw rewards by a field of another age (`activation`, `softmax`,
`normalize`) would otherwise train on squashed ones without an error. Imports no torch.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from rm_optimizer.schema.publish import RewardModelTrainingMode as RewardModelTrainingMode
from rm_optimizer.schema.publish import Transport as Transport

VERSION_HEADER = "x-rm-version"
"""Response header with the version of the weights that computed the answer."""
REVISION_HEADER = "x-rm-revision"
"""Response header with the serial number of these weights, which no other weights ever have."""
PROTOCOL_VERSION = 1
"""Raised when a client of the older form would misread an answer."""
SIGMOID_CONVENTION = "raw rewards by default; use_activation=true applies sigmoid(reward) once"
"""What `/rm/info` says of activations."""

TokenIds: TypeAlias = Annotated[list[StrictInt], Field(description="Token ids of one sequence.")]
ClassifyInput: TypeAlias = StrictStr | TokenIds | list[StrictStr] | list[TokenIds]
"""Text or token ids of one sequence, or a list of either."""


def sigmoid(reward: float) -> float:
    """`1 / (1 + exp(-reward))`: the one place where a reward becomes a probability.

    Example:
        >>> round(sigmoid(2.0), 4)
        0.8808
    """
    tail = math.exp(-abs(reward))
    return (1.0 if reward >= 0 else tail) / (1.0 + tail)


class WireModel(BaseModel):
    """A message whose fields are all known."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class WireMessage(WireModel):
    """One turn of a conversation."""

    role: StrictStr = Field(min_length=1)
    content: StrictStr


class ClassifyRequest(WireModel):
    """`POST /classify`: vLLM's request for one label.

    Exactly one of `input` and `messages` is given. Text is tokenised as it stands; `messages` is one conversation that
    ends with the assistant's response, rendered as in training.
    """

    model: StrictStr | None = None
    input: ClassifyInput | None = None
    messages: list[WireMessage] | None = None
    use_activation: StrictBool | None = Field(
        default=None, description="True: sigmoid(reward). False or absent: the reward itself."
    )
    add_special_tokens: StrictBool = Field(
        default=True, description="Let the tokenizer add its special tokens to text, as vLLM does."
    )

    @model_validator(mode="after")
    def _one_source(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give exactly one of input and messages")
        return self


class ScoreItem(WireModel):
    """One prompt and the responses to it."""

    prompt: StrictStr | list[WireMessage] = Field(description="Text, or the messages before the response.")
    responses: list[StrictStr] = Field(min_length=1)


class ScoreRequest(WireModel):
    """`POST /rm/score`: conversations that the server renders as training did."""

    model: StrictStr | None = None
    items: list[ScoreItem] = Field(min_length=1)
    use_activation: StrictBool | None = None


class OpenRLHFRequest(BaseModel):
    """`POST /get_reward`: OpenRLHF's remote reward model; `query` holds whole texts, prompt and response."""

    model_config = ConfigDict(extra="ignore")

    query: list[StrictStr] = Field(min_length=1)
    prompts: list[Any] | None = None
    labels: list[Any] | None = None


class ClassifyDatum(WireModel):
    """One sequence's answer: `probs[0]` is the reward, or its sigmoid where that was asked for."""

    index: int
    label: str | None = "reward"
    probs: list[float]
    num_classes: int = 1


class Usage(WireModel):
    """Tokens that a request held, as they were read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyResponse(WireModel):
    """The answer of `/classify`, vLLM's form with the version of the weights beside it."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyDatum]
    usage: Usage
    rm_version: str = Field(description="Version of the weights that computed every number in the answer.")
    rm_revision: int | None = Field(description="Serial number of these weights.")


class ScoreResponse(WireModel):
    """The answer of `/rm/score`: for each item, the rewards of its responses."""

    model: str
    rewards: list[list[float]]
    usage: Usage
    rm_version: str
    rm_revision: int | None


class OpenRLHFResponse(WireModel):
    """What OpenRLHF expects; `rewards` and `scores` are the raw rewards."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


class ErrorDetail(WireModel):
    """Why a request was not answered.

    Args:
        message: one sentence: what was expected, what was got, what to do.
        type: the kind, `NonFiniteScore` say.
        param: the field at fault, `input[3]` say.
        code: the HTTP status.
    """

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorBody(WireModel):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class VersionResponse(WireModel):
    """`GET /version` and `GET /rm/version`: the weights that answer now, and the software."""

    version: str = Field(description="Version of the weights.")
    revision: int = Field(description="Their serial number: milliseconds since 1970 when they came.")
    protocol: int = PROTOCOL_VERSION
    engine: str
    package: str


class RenderingInfo(WireModel):
    """How conversations become token ids; two parties with one `template_hash` read the same tokens."""

    kind: str
    template_hash: str
    rendering: str
    pinned_date: str | None


class InfoResponse(WireModel):
    """`GET /rm/info`: what a client checks before it trusts the numbers."""

    protocol: int = PROTOCOL_VERSION
    engine: str
    model: str
    version: str
    revision: int
    architecture: str
    dtype: str
    rendering: RenderingInfo
    max_length: int
    vocab_size: int
    pad_token_id: int
    eos_token_id: int | None
    token_budget: int
    max_request_tokens: int = Field(description="Most tokens of one request; a larger one is refused with 413.")
    max_request_items: int = Field(description="Most sequences of one request.")
    shares_prompts: bool
    sigmoid_convention: str = SIGMOID_CONVENTION
    parity: dict[str, Any] | None = Field(description="Served rewards against the checkpoint's certificate.")
    reward_statistics: dict[str, Any] | None = Field(description="Of the rewards on validation data, as exported.")


class TensorSpec(WireModel):
    """One tensor of an update.

    Args:
        name: as in the state of the `transformers` classifier, adapter layers included.
        shape: sizes of its axes.
        dtype: `float32`, `bfloat16`, …
        sha256: hexadecimal digest of its contiguous little-endian bytes; None where none was computed.
    """

    name: StrictStr = Field(min_length=1)
    shape: list[StrictInt]
    dtype: StrictStr
    sha256: StrictStr | None = Field(default=None, pattern="^[0-9a-f]{64}$")


class WeightProbe(WireModel):
    """Sequences and the rewards that the sender's model gives them: an update that scores otherwise is taken back."""

    input_ids: list[TokenIds] = Field(min_length=1)
    rewards: list[float]
    tolerance: float = Field(default=1e-4, gt=0, description="In units of max(1, |reward|).")

    @model_validator(mode="after")
    def _one_reward_each(self) -> WeightProbe:
        if len(self.input_ids) != len(self.rewards):
            raise ValueError(f"expected {len(self.input_ids)} rewards, one for each sequence, got {len(self.rewards)}")
        return self


class Begin(WireModel):
    """Announces an update: everything the receiver needs to refuse it before a byte has moved.

    Args:
        batch_id: the sender's id of this update; a repeated one is the same update.
        mode: what is sent.
        version: name of the weights once they serve.
        base_version: the version they follow; another one serving is a conflict. None asks nothing.
        base_revision: the revision they follow, likewise.
        tensors: the manifest: every tensor that comes, in the order in which it comes.
        transport: how they come.
        path: for `path`, the safetensors file, below the server's weights root.
        rendezvous: for `gloo` and `nccl`, `host:port` where the sender waits.
        timeout_seconds: after which the receiver gives the update up.
        probe: rewards to check before the new weights answer anybody.
    """

    batch_id: StrictStr = Field(min_length=1, max_length=128)
    mode: RewardModelTrainingMode
    version: StrictStr = Field(min_length=1, max_length=128, pattern=r"^[\w.:+-]+$")
    base_version: StrictStr | None = None
    base_revision: StrictInt | None = None
    tensors: list[TensorSpec] = Field(min_length=1)
    transport: Transport
    path: StrictStr | None = None
    rendezvous: StrictStr | None = None
    timeout_seconds: float = Field(default=120.0, gt=0)
    probe: WeightProbe | None = None


class Ready(WireModel):
    """Answer to `Begin`: the receiver stands, and the sender may transfer."""

    batch_id: str
    version: str = Field(description="Of the weights that serve now.")
    revision: int


class Commit(WireModel):
    """Everything has been sent: validate, swap, answer with an `Outcome`."""

    batch_id: StrictStr = Field(min_length=1, max_length=128)


class Abort(WireModel):
    """The sender gives the update up; the weights that serve stay."""

    batch_id: StrictStr = Field(min_length=1, max_length=128)
    reason: StrictStr = ""


class OutcomeStatus(StrEnum):
    """How an update ended."""

    committed = "committed"
    refused = "refused"
    aborted = "aborted"


class Outcome(WireModel):
    """How an update ended, and what serves now; asked again for the same batch, the same answer."""

    batch_id: str
    status: OutcomeStatus
    version: str = Field(description="Of the weights that serve now.")
    revision: int
    error: ErrorDetail | None = None
    seconds: float = Field(default=0.0, description="From the beginning to this outcome.")

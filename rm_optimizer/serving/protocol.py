"""Wire format of scoring: requests, answers and errors. `update_protocol` has the messages of weight updates.

`/classify` has vLLM 0.32's form, so that clients work with every engine. Unknown fields are refused, where vLLM
ignores them. Otherwise a client that requests raw rewards by a field of another vLLM version (`activation`, `softmax`,
`normalize`) would train on squashed rewards without an error. This module does not import torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, StrictInt, StrictStr, Tag, model_validator
from pydantic_core import PydanticCustomError

from rm_optimizer.errors import did_you_mean

VERSION_HEADER = "x-rm-version"
"""Response header with the version of the weights that computed the answer."""
REVISION_HEADER = "x-rm-revision"
"""Response header with the serial number of these weights, which is never reused."""
PROTOCOL_VERSION = 1
"""Version of the wire format, increased when an older client would misread an answer."""
SIGMOID_CONVENTION = "raw rewards by default; use_activation=true applies sigmoid(reward) once"
"""Description of activations in `/rm/info`."""

MAX_ITEMS = 4096
"""Most sequences of one request."""
MAX_IDS = 2**20
"""Most token ids of one sequence in a request; the model's own limit is lower."""
MAX_MESSAGES = 1024
"""Most messages of one conversation, and parts of one message."""

Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]
"""List with one entry a sequence. Validation ends at its first wrong entry, so that a wrong body costs little time."""
TokenIds: TypeAlias = Annotated[
    list[StrictInt], Field(description="Token ids of one sequence.", fail_fast=True, max_length=MAX_IDS)
]


def _kind_of_input(value: object) -> str:
    """Tag of a value's form, from the type of its first entry; pydantic would otherwise try every form."""
    if not isinstance(value, list):
        return "(text)"
    first = value[0] if value else None
    return "(texts)" if isinstance(first, str) else "(lists of ids)" if isinstance(first, list) else "(ids)"


def _is_list(value: object) -> str:
    return "(list)" if isinstance(value, list) else "(text)"


TextOr: TypeAlias = Annotated[
    Annotated[StrictStr, Tag("(text)")] | Annotated[Item, Tag("(list)")], Discriminator(_is_list)
]
"""Text, or a list in its place."""
ClassifyInput: TypeAlias = Annotated[
    Annotated[StrictStr, Tag("(text)")]
    | Annotated[TokenIds, Tag("(ids)")]
    | Annotated[Items[StrictStr], Tag("(texts)")]
    | Annotated[Items[TokenIds], Tag("(lists of ids)")],
    Discriminator(_kind_of_input),
]
"""Text or token ids of one sequence, or a list of either."""


def sigmoid(reward: float) -> float:
    """Sigmoid of a reward, `1 / (1 + exp(-reward))`, the only conversion of rewards to probabilities.

    Example:
        >>> round(sigmoid(2.0), 4)
        0.8808
    """
    tail = math.exp(-abs(reward))
    return (1.0 if reward >= 0 else tail) / (1.0 + tail)


class WireModel(BaseModel):
    """Message without unknown fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RequestModel(WireModel):
    """Message to the server; its first unknown field is refused with the nearest known name."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, value: object) -> object:
        """Refuse an unknown field; pydantic would list every one."""
        unknown = next((key for key in value if key not in cls.model_fields), None) if isinstance(value, dict) else None
        if unknown is not None:
            name = str(unknown)[:64].encode("utf-8", "replace").decode()
            sentence = did_you_mean("field", name, cls.model_fields)
            raise PydanticCustomError("unknown_field", "{sentence}", {"sentence": sentence, "field": name})
        return value


class TextPart(RequestModel):
    """Part of a message's content in OpenAI's form; only text is supported."""

    type: Literal["text"]
    text: StrictStr


TextParts: TypeAlias = Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class WireMessage(RequestModel):
    """One turn of a conversation, in OpenAI's form."""

    role: StrictStr = Field(min_length=1, max_length=256)
    content: TextOr[TextParts] | None = Field(
        default=None, description="Text, or text parts that are joined; absent in a turn that only calls tools."
    )
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None
    reasoning_content: StrictStr | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""


WireMessages: TypeAlias = Annotated[list[WireMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]
"""Messages of one conversation."""


class TemplateValues(RequestModel):
    """Values that the chat template reads with the messages, as `apply_chat_template` takes them."""

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """The values by name."""
        return {name: getattr(self, name) for name in TemplateValues.model_fields}


_ITEM: Any = {"prompt": "What is 2 + 2?", "responses": ["It is 4.", "I do not know."]}
_CONVERSATION: Any = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
_TEXT = "Prompt: What is 2 + 2?\n\nResponse: "
_QUERY: Any = {"query": [f"{_TEXT}It is 4."], "prompts": [_TEXT]}


class ClassifyRequest(TemplateValues):
    """`POST /classify`: vLLM's request for one label.

    Exactly one of `input` and `messages` is given. Text is tokenized unchanged; `messages` is one conversation that
    ends with the assistant's response, rendered as in training. Fields of vLLM that cannot change a reward (`user`,
    `priority`, `request_id`, `cache_salt`) are accepted and ignored. Nothing is truncated: `truncate_prompt_tokens`
    refuses what it would cut.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": [[1, 15, 2]]}, {"messages": _CONVERSATION}]})
    model: StrictStr | None = None
    input: ClassifyInput | None = None
    messages: WireMessages | None = None
    use_activation: StrictBool | None = Field(
        default=None, description="True: sigmoid(reward). False or absent: the reward itself."
    )
    add_special_tokens: StrictBool = Field(
        default=True, description="Let the tokenizer add its special tokens to text, as vLLM does."
    )
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = Field(
        default=None,
        description="Most tokens of a sequence; a longer one is refused, not cut. -1: the model's own limit.",
    )
    user: object = Field(default=None, description="Ignored.")
    priority: object = Field(default=None, description="Ignored.")
    request_id: object = Field(default=None, description="Ignored.")
    cache_salt: object = Field(default=None, description="Ignored.")

    @model_validator(mode="after")
    def _one_source(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give exactly one of input and messages")
        if self.messages is None and any(value is not None for value in self.values().values()):
            raise ValueError("tools, documents and chat_template_kwargs belong to messages, not to input")
        return self


class ScoreItem(TemplateValues):
    """One prompt and the responses to it."""

    prompt: TextOr[WireMessages] = Field(description="Text, or the messages before the response.")
    responses: Items[TextOr[WireMessages]] = Field(
        min_length=1, description="Texts, or the messages of each response up to the assistant's last."
    )


class ScoringRequest(RequestModel):
    """`POST /rm/score`: conversations that the server renders as training did."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"examples": [{"items": [_ITEM]}]})
    model: StrictStr | None = None
    items: Items[ScoreItem] = Field(min_length=1)
    use_activation: StrictBool | None = None


class OpenRLHFRequest(BaseModel):
    """`POST /get_reward`: OpenRLHF's remote reward model; `query` holds whole texts, prompt and response."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [_QUERY]})

    query: Items[StrictStr] = Field(
        description="Texts; an empty list, by which OpenRLHF probes a server, has no rewards."
    )
    prompts: object = Field(default=None, description="The text before each answer, which shows where it begins.")
    labels: object = Field(default=None, description="Ignored.")


class ClassifyDatum(WireModel):
    """Answer for one sequence: `probs[0]` is the reward, or its sigmoid if requested."""

    index: int
    label: str | None = "reward"
    probs: list[float]
    num_classes: int = 1


class Usage(WireModel):
    """Number of tokens in a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyResponse(WireModel):
    """Answer of `/classify`: vLLM's form and the version of the weights."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyDatum]
    usage: Usage
    rm_version: str = Field(description="Version of the weights that computed every number in the answer.")
    rm_revision: int | None = Field(description="Serial number of these weights.")


class ScoringResponse(WireModel):
    """Answer of `/rm/score`: the rewards of each item's responses."""

    model: str
    rewards: list[list[float]]
    usage: Usage
    rm_version: str
    rm_revision: int | None


class OpenRLHFResponse(WireModel):
    """Answer in OpenRLHF's form; `rewards` and `scores` are the raw rewards."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


class ErrorDetail(WireModel):
    """Description of a failure.

    Args:
        message: one sentence with the expected value, the value found and a remedy.
        type: kind of failure, for example `NonFiniteScore`.
        param: field at fault, for example `input[3]`.
        code: HTTP status.
    """

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorBody(WireModel):
    """Body of every unsuccessful answer."""

    error: ErrorDetail


class ServedWeights(WireModel):
    """Weights that are served now."""

    version: str = Field(description="Name of the weights that are served now.")
    revision: int = Field(description="Serial number of these weights: their arrival in milliseconds since 1970.")


class VersionResponse(ServedWeights):
    """`GET /version` and `GET /rm/version`: the weights that answer now, and the software."""

    protocol: int = PROTOCOL_VERSION
    engine: str
    package: str


class ModelCard(WireModel):
    """A served model in OpenAI's list of them, as vLLM writes it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rm-optimizer"
    max_model_len: int


class ModelList(WireModel):
    """`GET /v1/models`: the one model that is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class RenderingInfo(WireModel):
    """Rendering of conversations as token ids; equal `template_hash` means equal tokens."""

    kind: str
    template_hash: str
    rendering: str
    pinned_date: str | None


class InfoResponse(ServedWeights):
    """`GET /rm/info`: properties of the server that a client verifies."""

    protocol: int = PROTOCOL_VERSION
    engine: str
    model: str
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
    parity: dict[str, Any] | None = Field(description="Comparison of served rewards with the checkpoint's certificate.")
    reward_statistics: dict[str, Any] | None = Field(description="Statistics of the rewards on validation data.")

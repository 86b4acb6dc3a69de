"""Messages and responses, read from the forms that data sets and requests give them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from rm_optimizer.records.codec import OMITTED_EMPTY, strict_json

_ROLES = {name: name for name in ("user", "assistant", "system", "tool", "developer")}
_ROLES |= dict.fromkeys(("human", "prompter"), "user")
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant")
_ROLES |= dict.fromkeys(("observation", "tool_response"), "tool")
"""Roles by the names that data sets give them, in lower case."""
_CALL_ROLES = frozenset({"function_call", "tool_call"})
"""Roles of a turn whose content spells a tool call, as ms-swift and LLaMA-Factory write it."""
_FIELDS = {name: name for name in ("tool_calls", "tool_call_id", "name", "reasoning_content")}
_FIELDS |= {"reasoning": "reasoning_content", "thinking": "reasoning_content", "function_call": "tool_calls"}
"""Fields of a message that are read with its content, by the names that data sets give them."""
_CALL_FIELDS = tuple(name for name, ours in _FIELDS.items() if ours == "tool_calls")
_UNREAD_FIELDS = frozenset({"tools", "functions", "image", "images", "audio", "videos", "files"})
"""Fields of a message that change its meaning and that are not read."""
CONTEXT_ROLE = "(context)"
"""Role of the entry before a conversation's messages that holds what else the template reads."""
TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs")
"""Columns of a row that its chat template reads with the messages."""
_PROSE_WORDS = 10
_OTHER_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\\nrtxuU'\"]")
"""A backslash as `repr` never writes one."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Common names of the two speakers (human, gpt, bot, …) become `user` and `assistant`, which chat templates read.

    Args:
        role: speaker of the turn.
        content: its text.
        fields: what a template reads with it: `tool_calls` in OpenAI's form with arguments as objects,
            `tool_call_id`, `name` and `reasoning_content`. It must not be changed.

    Raises:
        ValueError: if the role is empty, the content is not text, or a user's content is blank.

    Example:
        >>> Message("human", "Hi.").role
        'user'
    """

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False, metadata=OMITTED_EMPTY)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not self.role:
            raise ValueError(f"a message's role must be non-empty text, got {self.role!r}")
        if not isinstance(self.content, str):
            raise ValueError(f"a message's content must be text, got {type(self.content).__name__}")
        object.__setattr__(self, "role", _ROLES.get(self.role.strip().lower(), self.role))
        if self.role == "user" and not self.content.strip():
            raise ValueError("a message of role user must not be empty")
        if self.role == CONTEXT_ROLE and (self.content or not self.fields):
            raise ValueError(f"the role {CONTEXT_ROLE} is for tools and documents of a conversation, not for a message")

    def to_dict(self) -> dict[str, Any]:
        """`{"role": …, "content": …}` with its fields, the form chat templates take."""
        return {"role": self.role, "content": self.content, **self.fields}

    def shown(self) -> str:
        """The content and the fields as one text, for readers and for searches."""
        return f"{self.content}\n{json.dumps(self.fields, ensure_ascii=False)}" if self.fields else self.content


Prompt: TypeAlias = str | tuple[Message, ...]
"""A prompt is text (one user turn or a transcript) or the messages before the response.

The messages may begin with one of `CONTEXT_ROLE`, as `with_context` puts it there."""


class Turns(str):
    """A response of several messages, or of one with more than content: their JSON, which knows the messages.

    A plain text is never such a response, whatever it spells, so that no answer can pass for several turns.

    Args:
        messages: messages from the first that answers to the assistant's last.

    Raises:
        ValueError: if the last message is not the assistant's.

    Example:
        >>> response = Turns((Message("assistant", "Let me see."), Message("tool", "4"), Message("assistant", "4.")))
        >>> len(response.messages), response == str(response)
        (3, False)
    """

    messages: tuple[Message, ...]

    def __new__(cls, messages: tuple[Message, ...]) -> Turns:
        """The response of these messages."""
        if not messages or messages[-1].role != "assistant":
            got = f"one of {messages[-1].role!r}" if messages else "no message"
            raise ValueError(f"a response must end with a message of the assistant, got {got}")
        text = super().__new__(cls, json.dumps([message.to_dict() for message in messages], ensure_ascii=False))
        text.messages = messages
        return text

    def __str__(self) -> str:
        return "".join(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turns) and self.messages == other.messages

    def __ne__(self, other: object) -> bool:  # that of `str` would compare the texts
        return not self == other

    def __hash__(self) -> int:
        return hash(self.messages)

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, (self.messages,)


def response_of(messages: Sequence[Message]) -> str:
    """The response of these messages: the text of a plain answer, or `Turns`.

    Raises:
        ValueError: if the last message is not the assistant's.
    """
    is_text = len(messages) == 1 and messages[0].role == "assistant" and not messages[0].fields
    return messages[0].content if is_text else Turns(tuple(messages))


def read_response(name: str, value: object) -> str:
    """A response that is text or a list of messages.

    Raises:
        ValueError: if it is neither, or a message of it cannot be used.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return response_of(read_messages(name, value))


def turns_of(response: str) -> tuple[Message, ...]:
    """The messages of a response."""
    return response.messages if isinstance(response, Turns) else (Message("assistant", response),)


def shown_response(response: str) -> str:
    """The response as one text for readers: of several messages each with its role."""
    shown = "\n\n".join(f"{turn.role}: {turn.shown()}" for turn in turns_of(response))
    return shown if isinstance(response, Turns) else response


def response_json(response: str) -> Any:
    """The response as JSON values: text, or the messages of `Turns`."""
    return [message.to_dict() for message in response.messages] if isinstance(response, Turns) else response


def are_objects(value: object) -> bool:
    """True for a list of objects."""
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def without_nulls(value: Any) -> Any:
    """The value without null parts of objects, which Arrow files add."""
    if isinstance(value, Mapping):
        return {str(name): without_nulls(part) for name, part in value.items() if part is not None}
    return list(map(without_nulls, value)) if isinstance(value, list | tuple) else value


def parsed(value: Any) -> Any:
    """The value of a text that spells a list or an object in JSON or as Python prints it; any other value itself.

    Python's notation counts only if the value prints as the same text: what numpy prints reads as other values.

    Example:
        >>> parsed("['a', None]"), parsed("['a' 'b']"), parsed("Hi"), parsed(1)
        (['a', None], "['a' 'b']", 'Hi', 1)
    """
    if not isinstance(value, str) or not (text := value.strip()).startswith(("[", "{")):
        return value
    with suppress(ValueError, RecursionError):
        return strict_json(text)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        if not _OTHER_ESCAPE.search(text) and repr(found := ast.literal_eval(text)) == text:
            return found
    return value


def is_message(value: object) -> bool:
    """True for a value like a message: an object with `role` and `content`, or `from` and `value`."""
    if not isinstance(value, Mapping):
        return False
    is_plain = {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()
    return is_plain or ("role" in value and any(isinstance(value.get(name), list | Mapping) for name in _CALL_FIELDS))


def has_messages(value: object) -> bool:
    """True for a message, and for a list that begins with one."""
    return is_message(value) or (isinstance(value, list) and bool(value) and is_message(value[0]))


def are_texts(value: object) -> TypeGuard[list[str]]:
    """True for a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def is_assistant(value: object) -> bool:
    """True for a value like a message of the assistant."""
    if not isinstance(value, Mapping) or not is_message(value):
        return False
    role = value.get("role", value.get("from"))
    return isinstance(role, str) and _ROLES.get(role.strip().lower()) == "assistant"


def read_messages(name: str, value: object) -> tuple[Message, ...]:
    """Messages from a cell: a list of `{role, content}` or `{from, value}` objects.

    Args:
        name: the column, for the text of errors.
        value: the cell.

    Raises:
        ValueError: if it is no such list, or a message has a field that would be lost, such as `tool_calls`.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} must be a list of messages, got {shown_kind(value)}")
    if isinstance(value, tuple) and all(isinstance(item, Message) for item in value):
        return value  # pairs of one prompt share it
    try:
        messages = tuple(_read_message(name, number, item) for number, item in enumerate(value, 1))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error
    if any(message.role == CONTEXT_ROLE for message in messages[1:]):
        raise ValueError(f"{name} has a message of role {CONTEXT_ROLE} after the first one")
    return messages


def _read_message(name: str, number: int, item: object) -> Message:
    if isinstance(item, Message):
        return item
    if not isinstance(item, Mapping) or not is_message(item):
        got = "a list of texts" if isinstance(item, str) else str(item)[:60]
        raise ValueError(f"{name} must hold messages with role and content, got {got}")
    where = f"{name}: message {number}"
    role_field, content_field = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    role, content = item[role_field], _content(where, item.get(content_field))
    if role == CONTEXT_ROLE:
        return Message(role, content or "", {column: item[column] for column in TEMPLATE_COLUMNS if column in item})
    fields: dict[str, Any] = {}
    for given, value in item.items():
        if given in (role_field, content_field) or is_empty(value):
            continue
        ours, is_prose = _FIELDS.get(given), isinstance(value, str) and len(value.split()) > _PROSE_WORDS
        if ours is None and (given in _UNREAD_FIELDS or is_prose or are_objects(value)):
            told = "write it into the message's content, or remove the field"
            raise ValueError(f"{where} has {given}, which is not read and would be lost; {told}")
        if ours in fields:
            raise ValueError(f"{where} has {given} and another field of the same meaning; leave one out")
        if ours == "tool_calls":
            fields[ours] = list(_calls(where, value))
        elif ours is not None:
            if not isinstance(value, str):
                raise ValueError(f"{where}: {given} must be text, got {type(value).__name__}")
            fields[ours] = value
    if isinstance(role, str) and role.strip().lower() in _CALL_ROLES and isinstance(content, str):
        role, content, fields = "assistant", "", {"tool_calls": list(_calls(where, parsed(content)))} | fields
    if content is None and "tool_calls" in fields:
        content = ""  # the text of a turn that only calls tools is null in OpenAI's form
    message = Message(role, content, fields)
    require_characters(where, message.shown())
    return message


def _content(where: str, value: Any) -> Any:
    """The text of a content that may be a list of text parts, which are joined; any other value as it is.

    Raises:
        ValueError: if a part is not text.
    """
    if not isinstance(value, list) or not value or not all(isinstance(part, Mapping | str) for part in value):
        return value
    for place, part in enumerate(value, 1):
        if isinstance(part, Mapping) and (part.get("type") != "text" or not isinstance(part.get("text"), str)):
            raise ValueError(f"{where}: part {place} of content is of type {part.get('type')}; only text is read")
    return "".join(part if isinstance(part, str) else part["text"] for part in value)


def _calls(where: str, value: Any) -> Iterator[dict[str, Any]]:
    """Tool calls in OpenAI's form, with their arguments as objects.

    Arguments written as the JSON of an object are read, as `transformers` wants them, so that both spellings give the
    same text.

    Raises:
        ValueError: if there is no such call.
    """
    for call in value if isinstance(value, list) else [value]:
        if isinstance(call, Mapping) and "function" not in call:
            call = {"id": call.get("id"), "function": {key: call[key] for key in call if key not in ("id", "type")}}
        function = call["function"] if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: tool_calls must hold calls with a function's name, got {call!r:.60}")
        found = without_nulls(call)
        arguments = found["function"].setdefault("arguments", {})
        with suppress(ValueError, RecursionError):  # text that is no JSON stays text
            read = strict_json(arguments or "{}") if isinstance(arguments, str) else arguments
            found["function"]["arguments"] = read if isinstance(read, dict) else arguments
        yield found | {"type": "function", "function": found.pop("function")}


def require_characters(name: str, text: str) -> None:
    """Refuse text with half of a surrogate pair, which JSON can spell and no tokenizer can read.

    Raises:
        ValueError: if the text holds one; the message shows where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.end + 20]
        told = "half of a UTF-16 surrogate pair, which is no character and has no tokens"
        raise ValueError(f"{name} holds {told}, in {shown!r}") from error


def require_text(name: str, value: object) -> str:
    """The text.

    Raises:
        ValueError: if it is no text; the message names the column.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown_kind(value)}")
    return value


def require_response(name: str, text: str) -> None:
    """Refuse a response that is blank or holds half of a surrogate pair.

    Raises:
        ValueError: naming it.
    """
    if not text.strip():
        raise ValueError(f"{name} must not be empty")
    require_characters(name, text)


def is_empty(value: object) -> bool:
    """True for an empty cell or field: null, NaN, blanks or an empty list."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or value == [] or value == {} or value != value


def shown_kind(value: object) -> str:
    """Kind of a cell's value, in a word."""
    return "nothing" if value is None or value == "" or value == [] else type(value).__name__

"""Messages and prompts: one reader of prompts for files, commands, the Python API and the server.

A prompt comes as text, as an HH-style transcript, as a list of messages or as the text of one, in JSON or as Python
prints it. All of them become the same messages here, so that a file, a command, the Python API and a server give the
same reward to the same prompt.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

_TURN = re.compile(r"(?:\A\s*|\n\n(?!System))(Human|Assistant|System):")
LAST_TURN = "\n\nAssistant:"
"""Text before the response in an HH-style transcript."""
_SPEAKERS = {"Human": "user", "Assistant": "assistant", "System": "system"}
_ROLES = {name: name for name in ("user", "assistant", "system", "tool", "developer")}
_ROLES |= dict.fromkeys(("human", "prompter"), "user")
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant")
"""Roles by the names that data sets give them, in lower case."""
_UNREAD_FIELDS = frozenset({
    "tool_calls", "function_call", "tools", "reasoning_content", "reasoning", "thinking", "name", "image", "images",
    "audio", "videos", "files",
})  # fmt: skip
"""Fields of a message that templates would print, or that change its meaning."""
_PROSE_WORDS = 10
_FIELD_NAMES = ('"role"', '"from"', "'role'", "'from'")
_OTHER_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\\nrtxuU'\"]")
"""A backslash as `repr` never writes one."""
_CONTROL = (
    r"<\|[\w ]{2,40}\|>|<\uff5c[^\uff5c\n]{2,40}\uff5c>|</?s>|\[/?INST\]|<</?SYS>>|<extra_id_\d+>|"
    r"<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk|sep|cls|mask)>|\[(?:CLS|SEP|MASK|PAD)\]"
)
"""Tokens that chat templates and tokenizers of common families write around content."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Common names of the two speakers (human, gpt, bot, …) become `user` and `assistant`, which chat templates read.

    Raises:
        ValueError: if the role is empty, the content is not text, or a user's content is blank.

    Example:
        >>> Message("human", "Hi.").role
        'user'
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not self.role:
            raise ValueError(f"a message's role must be non-empty text, got {self.role!r}")
        if not isinstance(self.content, str):
            raise ValueError(f"a message's content must be text, got {type(self.content).__name__}")
        object.__setattr__(self, "role", _ROLES.get(self.role.strip().lower(), self.role))
        if self.role == "user" and not self.content.strip():
            raise ValueError("a message of role user must not be empty")

    def to_dict(self) -> dict[str, str]:
        """`{"role": …, "content": …}`, the form chat templates take."""
        return {"role": self.role, "content": self.content}


Prompt: TypeAlias = str | tuple[Message, ...]
"""A prompt is text (one user turn, a transcript, the JSON of messages) or the messages before the response."""


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as messages; text that is neither a transcript nor the JSON of messages is one user turn.

    Raises:
        ValueError: if a message cannot be used.
    """
    if not isinstance(prompt, str):
        return read_messages("prompt", prompt)
    read = read_prompt(prompt)
    return (Message("user", read),) if isinstance(read, str) else read


def parse_transcript(text: str) -> tuple[Message, ...]:
    r"""The turns of an HH-style transcript (Bai et al., 2022, https://arxiv.org/abs/2204.05862) as messages.

    Turns of one speaker in a row are joined by a blank line, as chat templates want speakers to alternate.

    Raises:
        ValueError: if the text does not begin with a turn.

    Example:
        >>> [message.role for message in parse_transcript("\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Bye")]
        ['user', 'assistant', 'user']
    """
    turns = list(_TURN.finditer(text))
    if not turns or turns[0].start() != 0:
        raise ValueError("a transcript must begin with 'Human:'")
    ends = [turn.start() for turn in turns[1:]] + [len(text)]
    messages: list[Message] = []
    for turn, end in zip(turns, ends, strict=True):
        message = Message(_SPEAKERS[turn[1]], text[turn.end() : end].strip())
        if messages and messages[-1].role == message.role:
            message = Message(message.role, f"{messages.pop().content}\n\n{message.content}")
        messages.append(message)
    return tuple(messages)


def begins_with_turn(text: str) -> bool:
    """True if the text begins like an HH-style transcript."""
    return _TURN.match(text) is not None


def read_prompt(value: object) -> Prompt:
    """A prompt in any form: text, a transcript that ends in `Assistant:`, messages, or the text of messages.

    Raises:
        ValueError: if it is none of these, or a message of it cannot be used.
    """
    if isinstance(value, list | tuple):
        return read_messages("prompt", value)
    if not isinstance(value, str):
        raise ValueError(f"prompt must be text or a list of messages, got {shown_kind(value)}")
    start, body = _TURN.match(value), value.rstrip()
    if start is not None and start[1] != "Assistant" and body.endswith(LAST_TURN):
        messages = parse_transcript(body.removesuffix(LAST_TURN))
        if any(message.role == "user" for message in messages):
            return messages
    return read_messages("prompt", parsed) if (parsed := messages_text(value)) else value


def parsed_text(text: str) -> Any:
    """The value of a text that spells a list or an object in JSON or as Python prints it; None for any other text.

    Python's notation counts only if the value prints as the same text: what numpy prints reads as other values.

    Example:
        >>> parsed_text("['a', None]"), parsed_text("['a' 'b']"), parsed_text("Hi")
        (['a', None], None, None)
    """
    text = text.strip()
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if _OTHER_ESCAPE.search(text):
        return None
    try:
        value = ast.literal_eval(text)
        return value if repr(value) == text else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def messages_text(text: str) -> list[Any] | None:
    """The messages that the text spells, if it is a list of messages; None for any other text.

    Example:
        >>> messages_text('[{"from": "human", "value": "Hi"}]')
        [{'from': 'human', 'value': 'Hi'}]
    """
    if not text.lstrip().startswith("[") or not any(name in text for name in _FIELD_NAMES):
        return None
    value = parsed_text(text)
    return value if isinstance(value, list) and value and all(map(is_message, value)) else None


def is_message(value: object) -> bool:
    """True for a value like a message: an object with `role` and `content`, or `from` and `value`."""
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


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
    """Messages from a cell: a list of `{role, content}` or `{from, value}` objects, or its text.

    Args:
        name: the column, for the text of errors.
        value: the cell.

    Raises:
        ValueError: if it is no such list, or a message has a field that would be lost, such as `tool_calls`.
    """
    if isinstance(value, str):
        value = messages_text(value) or value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} must be a list of messages, got {shown_kind(value)}")
    if isinstance(value, tuple) and all(isinstance(item, Message) for item in value):
        return value  # pairs of one prompt share it
    try:
        return tuple(_read_message(name, number, item) for number, item in enumerate(value, 1))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(name) else f"{name}: {text}") from error


def _read_message(name: str, number: int, item: object) -> Message:
    if isinstance(item, Message):
        return item
    if not isinstance(item, Mapping) or not is_message(item):
        got = "a list of texts" if isinstance(item, str) else str(item)[:60]
        raise ValueError(f"{name} must hold messages with role and content, got {got}")
    role, content = ("role", "content") if "role" in item and "content" in item else ("from", "value")
    for field, value in item.items():
        if field in (role, content) or is_empty(value):
            continue
        is_prose = isinstance(value, str) and len(value.split()) > _PROSE_WORDS
        are_objects = isinstance(value, list) and all(isinstance(part, Mapping) for part in value)
        if field in _UNREAD_FIELDS or is_prose or are_objects:
            raise ValueError(
                f"{name}: message {number} has {field}, which is not read and would be lost; write it into the "
                f"message's content, or remove the field"
            )
    text = item[content]
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], Mapping):
        part = text[0]  # the one part of a list, as some templates write text
        text = part["text"] if part.get("type") == "text" and isinstance(part.get("text"), str) else text
    message = Message(item[role], text)
    require_characters(f"{name}: message {number}", message.content)
    return message


def control_tokens(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Pattern of tokens that stand for the frame of a conversation: of common families, and these of a tokenizer."""
    return re.compile("|".join([*map(re.escape, special_tokens), _CONTROL]))


def require_characters(name: str, text: str) -> None:
    """Refuse text with half of a surrogate pair, which JSON can spell and no tokenizer can read.

    Raises:
        ValueError: if the text holds one; the message shows where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.end + 20]
        raise ValueError(
            f"{name} holds half of a UTF-16 surrogate pair, which is no character and has no tokens, in {shown!r}"
        ) from error


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

"""Prompts: one reader for files, commands, the Python API and the server.

A prompt comes as text, as an HH-style transcript or as a list of messages. All of them become the same messages here,
so that a file, a command, the Python API and a server give the same reward to the same prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rm_optimizer.core.rows.messages import (
    CONTEXT_ROLE,
    TEMPLATE_COLUMNS,
    Message,
    Prompt,
    are_objects,
    is_empty,
    parsed,
    read_messages,
    shown_kind,
    without_nulls,
)

TURN = re.compile(r"(?:\A\s*|\n\n(?!System))(Human|Assistant|System):")
"""The beginning of a turn of an HH-style transcript."""
LAST_TURN = "\n\nAssistant:"
"""Text before the response in an HH-style transcript."""
_SPEAKERS = {"Human": "user", "Assistant": "assistant", "System": "system"}


def with_context(prompt: Prompt, values: Mapping[str, Any]) -> Prompt:
    """The prompt with what else its chat template reads; the prompt itself if that is nothing.

    Args:
        prompt: text or messages.
        values: cells by name; `TEMPLATE_COLUMNS` are read, as values or as their text. Empty ones count as
            absent, and so do null fields in tools, documents and arguments, which Arrow files add to objects.

    Raises:
        ValueError: if `tools` or `documents` is no list of objects, `chat_template_kwargs` no object of names, or the
            prompt has such values already.
    """
    found: dict[str, Any] = {}
    for name in TEMPLATE_COLUMNS:
        value = values.get(name)
        if is_empty(value):
            continue
        value = without_nulls(parsed(value))
        if isinstance(value, list):
            value = without_nulls(list(map(parsed, value)))
        are_named = name == "chat_template_kwargs"
        if not (isinstance(value, dict) if are_named else are_objects(value)):
            raise ValueError(f"{name} must be {'an object' if are_named else 'a list of objects'}, got {value!r:.60}")
        if not is_empty(value):
            found[name] = value
    if not found:
        return prompt
    messages = as_messages(prompt)
    if messages[0].role == CONTEXT_ROLE:
        raise ValueError(f"{', '.join(found)} is given twice, in the prompt and with it; leave one out")
    return Message(CONTEXT_ROLE, "", found), *messages


def split_context(messages: Sequence[Message]) -> tuple[Mapping[str, Any], tuple[Message, ...]]:
    """Values that the chat template reads with the messages, by column, and the messages."""
    is_there = bool(messages) and messages[0].role == CONTEXT_ROLE
    return (messages[0].fields, tuple(messages[1:])) if is_there else (MappingProxyType({}), tuple(messages))


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as messages; text that is no transcript is one user turn.

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
    before, *turns = TURN.split(text)
    if before or not turns:
        raise ValueError("a transcript must begin with 'Human:'")
    messages: list[Message] = []
    for speaker, words in zip(turns[::2], turns[1::2], strict=True):
        message = Message(_SPEAKERS[speaker], words.strip())
        if messages and messages[-1].role == message.role:
            message = Message(message.role, f"{messages.pop().content}\n\n{message.content}")
        messages.append(message)
    return tuple(messages)


def read_prompt(value: object) -> Prompt:
    """A prompt in any form: text, a transcript that ends in `Assistant:`, or messages.

    Raises:
        ValueError: if it is something else, or a message of it cannot be used.
    """
    if isinstance(value, list | tuple):
        return read_messages("prompt", value)
    if not isinstance(value, str):
        raise ValueError(f"prompt must be text or a list of messages, got {shown_kind(value)}")
    start, body = TURN.match(value), value.rstrip()
    if start is not None and start[1] != "Assistant" and body.endswith(LAST_TURN):
        messages = parse_transcript(body.removesuffix(LAST_TURN))
        if any(message.role == "user" for message in messages):
            return messages
    return value

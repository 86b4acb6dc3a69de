"""Columns beside the prompt that belong to what the model reads: a system turn, an instruction's input, and tools.

They are used, or the row is refused: a reward for another conversation than the labeled one is wrong without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rm_optimizer.core.rows.messages import Message, Prompt, as_messages, is_empty, is_message, read_prompt
from rm_optimizer.core.rows.readers import Row

CONTEXT_COLUMNS = frozenset({"system", "input"})
"""Columns that are read into the prompt."""
UNREAD_COLUMNS = frozenset({
    "tools", "functions", "tool_calls", "chat_template_kwargs", "documents", "history", "context", "system_prompt",
    "system_message", "input", "image", "images", "audio", "audios", "video", "videos",
})  # fmt: skip
"""Columns that would change what the model reads, and that are not read unless they are mapped."""


def row_prompt(row: Row) -> Prompt:
    """The prompt of a row with its `system` and `input` columns.

    Raises:
        ValueError: if the prompt is none, or a column beside it would be lost.
    """
    return in_context(row, read_prompt(row.get("prompt")), {})


def in_context(row: Row, prompt: Prompt, columns: Mapping[str, str | None]) -> Prompt:
    r"""The prompt with a row's system turn in front and its instruction's input behind.

    The input follows the instruction after a line break, as data sets of Alpaca's form (Taori et al., 2023) are read
    by LLaMA-Factory. It is read where `columns` maps it, or maps `prompt` to `instruction`.

    Raises:
        ValueError: if a column would be lost, or the system turn contradicts the prompt's own.

    Example:
        >>> in_context({"system": "Be brief."}, "Why?", {})
        (Message(role='system', content='Be brief.'), Message(role='user', content='Why?'))
        >>> in_context({"input": "1, 2, 3"}, "Add these.", {"prompt": "instruction"})
        'Add these.\n1, 2, 3'
    """
    lost = unread_column(row, columns)
    if lost is not None:
        raise ValueError(f"{lost} is not read and would be lost; write it into the prompt, or leave the column out")
    has_input, has_system = (not is_empty(row.get(name)) for name in ("input", "system"))
    if has_input:
        prompt = _with_input(prompt, _text_of(row, "input"))
    return _with_system(prompt, _text_of(row, "system")) if has_system else prompt


def is_context(name: str) -> bool:
    """True for the name of a column, or of a part of an object, that belongs to what the model reads."""
    return name in CONTEXT_COLUMNS or name in UNREAD_COLUMNS


def unread_column(row: Row, columns: Mapping[str, str | None]) -> str | None:
    """First column of a row with context that the model would not read; None if there is none.

    A part of an object, which has its path for name, is judged by the last word of it, and other messages of a
    conversation are context as well.
    """
    reads_input = "input" in columns or columns.get("prompt") == "instruction"
    for name, value in row.items():
        outer, _, last = name.rpartition(".")
        if outer and not is_empty(value) and (is_context(last) or is_message(value)):
            return name
        if name in UNREAD_COLUMNS and not is_empty(value) and not (name == "input" and reads_input):
            return name
    return None


def _text_of(row: Row, name: str) -> str:
    value: Any = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {json.dumps(value, default=str)[:60]}")
    return value


def _with_input(prompt: Prompt, text: str) -> Prompt:
    if not isinstance(prompt, str):
        raise ValueError("input follows an instruction that is text, but the prompt is a list of messages")
    return f"{prompt}\n{text}"


def _with_system(prompt: Prompt, text: str) -> Prompt:
    messages = as_messages(prompt)
    if messages and messages[0].role == "system":
        if messages[0].content.split() != text.split():
            raise ValueError("the system column says otherwise than the prompt's own system message; leave one out")
        return prompt
    return (Message("system", text), *messages)

"""Fields of conversations that a chat template must show: their marked copies, and links that follow from the order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from rm_optimizer.schema.composition import described

Turn: TypeAlias = Mapping[str, Any]
"""Message in the form that chat templates take."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which chat templates read a turn's reasoning."""
_CONSTANTS = frozenset({"type", "strict", "additionalProperties", "$schema"})
"""Names whose values in a tool's description say how it is written, and not what it does."""
_LINKS = frozenset({"id", "tool_call_id"})
THINKING, CLOSING_TAG = "<think>", "</think>"
"""Path of thinking inside a content, which is its opening tag, and its closing tag."""
_THINKING = re.compile(r"\s*(?:<think>(.*?)|((?:(?!<think>).)*?))</think>\s*", re.DOTALL)
"""Thinking at the start of an answer; if its opening is in the generation prompt, all up to the closing tag."""


def stored_template(name: str, **words: object) -> str:
    """A chat template of `configs/layout/general/templates.yaml`, with JSON values in place of words."""
    text: str = described("layout/general/templates.yaml")[name]
    for word, value in words.items():
        text = text.replace(word, json.dumps(value, ensure_ascii=False))
    return text


def rebuilt(
    value: Any, leaf: Callable[[str, Any], Any], key: Callable[[str, str], str] = lambda _, name: name, path: str = ""
) -> Any:
    """Copy of nested values, changed part by part.

    Args:
        value: a value of objects, lists and leaves.
        leaf: function of the path and the value of a leaf.
        key: function of the path and the name of a part of an object; the default keeps the name.
        path: path of the value.
    """
    if isinstance(value, Mapping):
        parts = ((name, part, f"{path}.{name}") for name, part in value.items())
        return {key(at, name): rebuilt(part, leaf, key, at) for name, part, at in parts}
    if isinstance(value, list):
        return [rebuilt(part, leaf, key, f"{path}[{i}]") for i, part in enumerate(value)]
    return leaf(path, value)


class Marks:
    """Copies of values in which each part that a template must show is a mark, with the place of each mark.

    Example:
        >>> marks = Marks()
        >>> marks.turn({"role": "user", "content": "Hi"}, 0)
        {'role': 'user', 'content': 'rmopt0mark'}
        >>> marks.places
        {'rmopt0mark': (0, 'content')}
    """

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, str]] = {}

    def turn(self, turn: Turn, number: int) -> dict[str, Any]:
        """The turn with marks for its contents, its names, and the names and values of arguments."""
        marked = dict(turn)
        for name, value in turn.items():
            if name == "tool_calls":
                marked[name] = [self._call(call, number, f"tool_calls[{i}]") for i, call in enumerate(value)]
            elif name != "role" and name not in _LINKS and str(value).strip():
                marked[name] = self._mark(number, name)
        return marked

    def value(self, value: Any, path: str) -> Any:
        """The value of a tool or a document with a mark for each of its parts."""
        constants: set[str] = set()

        def key(at: str, name: str) -> str:  # a path does not tell: a name may hold a dot
            constants.update({at} if name in _CONSTANTS else ())
            return name

        return rebuilt(value, lambda at, part: part if at in constants else self._mark(0, at), key, path)

    def _call(self, call: Mapping[str, Any], number: int, path: str) -> dict[str, Any]:
        function, mark = dict(call["function"]), partial(self._mark, number)
        for name, value in call["function"].items():
            at = f"{path}.function.{name}"
            function[name] = rebuilt(value, mark, mark, at) if name == "arguments" else mark(at)
        beside = {
            name: value if name in ("id", "type") else mark(f"{path}.{name}")
            for name, value in call.items()
            if name != "function"
        }
        return beside | {"function": function}

    def _mark(self, number: int, path: str, replaced: Any = None) -> str:
        mark = f"rmopt{len(self.places)}mark"
        self.places[mark] = (number, path)
        return mark


def shape(value: Any) -> Any:
    """Hashable form of a turn that is equal for turns which differ in their texts and numbers alone."""
    if isinstance(value, Mapping):
        return tuple((name, part if name == "role" else shape(part)) for name, part in value.items())
    if isinstance(value, list):
        return tuple(map(shape, value))
    return bool(value.strip()) if isinstance(value, str) else type(value).__name__


def split_thinking(content: str) -> tuple[str, str]:
    r"""The thinking at the start of an answer, without its tags and the blanks around it, and the rest.

    Example:
        >>> split_thinking("<think>\nHm.\n</think>\n\nSo."), split_thinking("So.")
        (('Hm.', 'So.'), ('', 'So.'))
    """
    found = _THINKING.match(content) if CLOSING_TAG in content else None
    return ("", content) if found is None else ((found[1] or found[2] or "").strip(), content[found.end() :])


def texts_of(turns: Sequence[Turn]) -> list[tuple[int, str, str]]:
    """Texts of the turns that must be in the rendered text, each with the number of its turn and its path."""
    found = []
    for number, turn in enumerate(turns):
        found += [(number, name, turn[name]) for name in REASONING_FIELDS if turn.get(name)]
        thinking, answer = split_thinking(turn["content"]) if turn["role"] == "assistant" else ("", turn["content"])
        # A template may write other blanks around the tags, and may leave out an empty block.
        found += [(number, name, part) for name, part in ((THINKING, thinking), ("content", answer)) if part]
        for i, call in enumerate(turn.get("tool_calls", ())):
            path = f"tool_calls[{i}].function.arguments"
            found += [(number, at, text) for at, text in _texts(call["function"].get("arguments"), path)]
    return found


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(part, f"{path}.{name}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _texts(part, f"{path}[{i}]")


def call_in_order(turns: Sequence[Turn], number: int) -> Mapping[str, Any]:
    """The call that a tool's result answers by its place: the k-th result after several calls is of the k-th.

    Returns:
        The call; empty without one.
    """
    start = number
    while start and turns[start - 1]["role"] == "tool":
        start -= 1
    calls = turns[start - 1].get("tool_calls", []) if start else []
    return calls[number - start] if number - start < len(calls) else {}


def is_name_of_call(turns: Sequence[Turn], number: int) -> bool:
    """True if the turn's `name` names the function whose call it answers by its place."""
    function = call_in_order(turns, number).get("function", {})
    return turns[number]["role"] == "tool" and bool(function.get("name") == turns[number]["name"])


def linked_in_order(turns: Sequence[Turn], number: int) -> dict[str, Any] | None:
    """The turn, which has a `tool_call_id`, linked to the call of its place; None if it is linked so already."""
    turn = turns[number]
    call = call_in_order(turns, number)
    if call and call.get("id") in (None, turn["tool_call_id"]):
        return None
    return {**turn, "tool_call_id": call.get("id", "rmoptmark")}

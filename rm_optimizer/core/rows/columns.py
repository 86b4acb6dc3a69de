"""Columns of rows: their mapping to our names, the numbers in their cells, and those that belong to the prompt."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, reduce
from typing import Any

from rm_optimizer.core.rows.messages import (
    TEMPLATE_COLUMNS,
    Message,
    Prompt,
    are_objects,
    are_texts,
    is_empty,
    is_message,
    parsed,
    require_text,
)
from rm_optimizer.core.rows.prompts import as_messages, split_context, with_context
from rm_optimizer.core.rows.readers import Row

CONTEXT_COLUMNS = frozenset({"system", "input", *TEMPLATE_COLUMNS})
"""Columns that are read into the prompt."""
UNREAD_COLUMNS = frozenset({
    "functions", "tool_calls", "history", "context", "system_prompt", "system_message", "input", "image", "images",
    "audio", "audios", "video", "videos",
})  # fmt: skip
"""Columns that would change what the model reads, and that are not read unless they are mapped."""
TOOLS = cache(re.compile(r"(?:^|[_ .-])(?:tools?|functions?)(?:$|[_ .-])", re.IGNORECASE).search)
"""Search for the name of a column that holds descriptions of tools, if its cells are lists of objects."""
OPTIONAL_COLUMNS = ("margin", "label", "weight")
"""Columns of numbers that a pair of any format may have."""


def in_context(row: Row, prompt: Prompt, columns: Mapping[str, str | None]) -> Prompt:
    r"""The prompt with a row's system turn and what its template reads in front, and its instruction's input behind.

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
    if (lost := unread_column(row, columns)) is not None:
        raise ValueError(f"{lost} is not read and would be lost; write it into the prompt, or leave the column out")
    given, system = (None if is_empty(row.get(name)) else require_text(name, row[name]) for name in ("input", "system"))
    if given is not None and not isinstance(prompt, str):
        raise ValueError("input follows an instruction that is text, but the prompt is a list of messages")
    prompt = prompt if given is None else f"{prompt}\n{given}"
    if system is not None:
        context, messages = split_context(as_messages(prompt))
        if messages[0].role != "system":
            prompt = with_context((Message("system", system), *messages), context)
        elif messages[0].content.split() != system.split():
            raise ValueError("the system column differs from the prompt's own system message; leave one out")
    return with_context(prompt, row)


def is_context(name: str) -> bool:
    """True for the name of a column, or of a part of an object, that belongs to what the model reads."""
    return name in CONTEXT_COLUMNS or name in UNREAD_COLUMNS


def unread_column(row: Row, columns: Mapping[str, str | None]) -> str | None:
    """First column of a row with context that the model would not read; None if it reads all.

    A part of an object, which has its path for name, is judged by the last word of it, and other messages of a
    conversation are context as well.
    """
    reads_input = "input" in columns or columns.get("prompt") == "instruction"
    for name, value in row.items():
        outer, _, last = name.rpartition(".")
        is_lost = name in UNREAD_COLUMNS and not (name == "input" and reads_input)
        is_lost |= name != "tools" and TOOLS(name) is not None and are_objects(parsed(value))
        if (is_lost or (outer and (is_context(last) or is_message(value)))) and not is_empty(value):
            return name
    return None


Columns = Mapping[str, Any]
"""Our column name to the file's or to a path, to a list of these, or to `{user: …, assistant: …}`, the lists of texts
of both speakers; None leaves the file's column of that name out."""
_TRUTH: Mapping[str, object] = {"true": 1, "false": 0}
_SLICE = re.compile(r"(-?\d*):(-?\d*)")


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of all columns of rows."""
    return list(dict.fromkeys(name for row in rows for name in row))


def paths_of(theirs: Any) -> list[str]:
    """Column names and paths that one of our columns is read from."""
    return [theirs] if isinstance(theirs, str) else [*(theirs.values() if isinstance(theirs, Mapping) else theirs)]


def renamed(row: Row, columns: Columns, paths: Mapping[str, Sequence[str]], parse: Collection[str]) -> Row:
    """The row under our column names; columns without one of ours keep theirs.

    A name such as `answer.text` reads inside objects, and the same part of each object of a list. `turns.-1` is the
    last item of a list, `turns.:-1` all before it, and `response*` or `fields.response*` what has such a name. What
    lies beside a path becomes a column with its path for name.

    Args:
        row: the row as it is stored.
        columns: column mapping.
        paths: names and paths that each of our columns is read from, or its own name where it is left out.
        parse: names and paths whose text is read as the list or object that it spells.
    """
    roots = {path: columns_at(path, row) for each in paths.values() for path in each}
    mapped = {
        ours: cell(row, theirs, parse)
        for ours, theirs in columns.items()
        if theirs is not None and any(roots[path] for path in paths[ours])
    }
    consumed = {*itertools.chain(*roots.values())}
    kept = {name: value for name, value in row.items() if name not in consumed}
    inside = dict.fromkeys(name for path, found in roots.items() if "." in path for name in found if name != path)
    texts = [text for value in mapped.values() for text in texts_in(value)] if inside else []
    for root in inside:
        read = [path.split(".")[1:] for path in roots if root_of(path) == root]
        kept |= _beside(root, row.get(root), read, texts)
    return kept | mapped


def _beside(path: str, value: Any, read: Sequence[list[str]], texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Path and value of all that nothing reads in a value; of a list that is read whole, only its context.

    Args:
        path: path of the value.
        value: the value.
        read: paths inside the value that are read.
        texts: all texts that are read, also of messages that lie on no path.
    """
    if not read and not (is_message(value) and value.get("content", value.get("value")) in texts):
        yield path, value
    if not read or [] in read:
        return
    value, wanted = parsed(value), {steps[0] for steps in read}
    if isinstance(value, list) and not any(re.match(r"-?\d|-?\d*:", step) for step in wanted):
        value = {
            name: part
            for name in dict.fromkeys(str(key) for item in value if isinstance(item, Mapping) for key in item)
            for part in [_inside(value, name)]
            if name in wanted or (is_context(name) and not all(is_empty(each) or is_missing(each) for each in part))
        }
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        if isinstance(value, list) or not is_empty(part):
            inner = [steps[1:] for steps in read if _leads_to(steps[0], name, value)]
            yield from _beside(f"{path}.{name}", part, inner, texts)


def _leads_to(step: str, place: Any, value: Any) -> bool:
    """True if the step of a path leads from a value to its part at a place."""
    if isinstance(value, Mapping):
        return step == place or fnmatchcase(str(place), step)
    found = _SLICE.fullmatch(step)
    return place in range(len(value))[_slice(found)] if found else step in (str(place), str(place - len(value)))


def root_of(path: str) -> str:
    """The column that a path leads into."""
    return path.partition(".")[0]


def columns_at(path: str, names: Collection[str]) -> list[str]:
    """The columns among these names that a path is or leads into; several for a pattern such as `response*`."""
    if path in names:
        return [path]
    root = root_of(path)
    return [name for name in names if fnmatchcase(name, root)] if "*" in root else [root] if root in names else []


def cell(row: Row, path: Any, parse: Collection[str] = ()) -> Any:
    """The value at a column name or at a path into a column; None where the path leads nowhere.

    Several paths give the list of their values, and paths of two speakers the conversation. Text at a path of `parse`
    is read as the list or object that it spells.

    Example:
        >>> cell({"answers": [{"text": "a"}, {"text": "b"}]}, "answers.text")
        ['a', 'b']
        >>> cell({"turns": ["a", "b", "c"]}, "turns.:-1")
        ['a', 'b']
    """
    if isinstance(path, Mapping):
        return _conversation({role: cell(row, each, parse) for role, each in path.items()})
    if not isinstance(path, str):
        return [cell(row, each, parse) for each in path]
    value = row[path] if path in row else reduce(_inside, path.split("."), row)
    return parsed(value) if path in parse else value


def read_number(name: str, value: object) -> float:
    """A finite number from a cell, which may be text as in CSV; true is 1 and false 0.

    Raises:
        ValueError: if it is no finite number; the text names the column.
    """
    try:
        number = float(_TRUTH.get(str(value).strip().casefold(), value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _conversation(speakers: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The messages of texts or lists of texts, one for each speaker; None if they differ in kind or length."""
    lists = [*speakers.values()]
    if not any(isinstance(value, list) for value in lists):
        lists = [[value] for value in lists]
    if not all(map(are_texts, lists)) or len(set(map(len, lists))) != 1:
        return None
    turns = zip(*lists, strict=True)
    return [{"role": role, "content": text} for turn in turns for role, text in zip(speakers, turn, strict=True)]


def _slice(step: re.Match[str]) -> slice:
    return slice(*(int(end) if end else None for end in step.groups()))


def _inside(value: Any, step: str) -> Any:
    value = parsed(value)
    if isinstance(value, Mapping):
        if "*" in step:
            return {name: part for name, part in value.items() if fnmatchcase(name, step) and not is_empty(part)}
        return value.get(step)
    if not isinstance(value, list):
        return None
    if found := _SLICE.fullmatch(step):
        return value[_slice(found)]
    if step.lstrip("-").isdigit():
        return value[int(step)] if -len(value) <= int(step) < len(value) else None
    return [_inside(item, step) for item in value]


def is_missing(value: Any) -> bool:
    """True for a cell without a value, and for a list of such."""
    return value is None or (isinstance(value, list) and all(map(is_missing, value)))


def texts_in(value: Any) -> Iterator[str]:
    """The texts and numbers in a cell, those inside its lists and objects too, which may be written as text.

    Roles and types are no texts of messages.
    """
    parts = parsed(value)
    if isinstance(parts, Mapping):
        parts = [part for name, part in parts.items() if name not in ("role", "from", "type")]
    if isinstance(parts, list | tuple):
        for item in parts:
            yield from texts_in(item)
    elif not is_empty(value):
        yield str(value)


def folded(text: str) -> str:
    """The text without regard to case and blanks."""
    return " ".join(text.casefold().split())

"""Coercions of texts, prompts and rows that a Python caller gives: one rule a kind, for every public call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import pyarrow as pa

from rm_optimizer.core.rows.messages import Message, Prompt, is_message, read_response
from rm_optimizer.errors import DataError

Texts: TypeAlias = str | Iterable[str]
"""Several texts as a list, tuple, generator, array or column, or a single one.

In place of a response's text, a list may hold the messages of one."""
Prompts: TypeAlias = Prompt | Iterable[Prompt]
"""Several prompts, each a text or messages, or a single one."""


def listed(name: str, values: Any) -> list[Any]:
    """Values of a list, tuple, generator, array or column.

    Args:
        name: name of the argument, for the message.
        values: the argument.

    Raises:
        TypeError: if it is a text, a mapping, a set, a table or a single value.
    """
    is_other = isinstance(values, str | bytes | Mapping | Set) or hasattr(values, "columns")
    if is_other or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, tuple, generator, array or column, got {type(values).__name__}")
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    return found if isinstance(found, list) else [found]


def texts(name: str, values: Texts) -> list[str]:
    """The texts; a single text is a list of one, never its letters.

    Raises:
        TypeError: if the argument holds no values, or one is not text; the message names the argument.

    Example:
        >>> texts("responses", "Hello")
        ['Hello']
    """
    found = [values] if isinstance(values, str) else listed(name, values)
    for place, text in enumerate(found):
        if isinstance(text, list | tuple) and text and all(isinstance(m, Message) or is_message(m) for m in text):
            found[place] = read_response(f"{name}[{place}]", text)
        elif not isinstance(text, str):
            raise TypeError(f"{name}[{place}] must be text, got {type(text).__name__}")
    return found


def is_one_prompt(prompts: object) -> bool:
    """True for a text, and for the messages of one conversation."""
    first = next(iter(prompts), None) if isinstance(prompts, Sequence) else None
    return isinstance(prompts, str) or isinstance(first, Message | Mapping)


def prompts_of(name: str, values: Prompts) -> list[Prompt]:
    """The prompts; a text or the messages of one conversation are a list of one.

    Raises:
        TypeError: if the argument holds no values.
    """
    found: list[Any] = [values] if isinstance(values, str) else listed(name, values)
    return [tuple(found)] if is_one_prompt(found) else found


def paired(prompts: Prompts, responses: Texts) -> tuple[list[Prompt], list[str]]:
    """Prompts and responses one for one; a single prompt belongs to every response.

    Args:
        prompts: one prompt for each response, or a single one, as text or messages.
        responses: the responses, or the text of a single one.

    Raises:
        ValueError: if there are not as many prompts as responses, or several prompts have a single text for response.
        TypeError: if an argument holds no values, or a response is not text.

    Example:
        >>> paired("Explain chess", ["Start with pawns.", "No."])
        (['Explain chess', 'Explain chess'], ['Start with pawns.', 'No.'])
    """
    found = texts("responses", responses)
    given = [prompts] if isinstance(prompts, str) else listed("prompts", prompts)
    if is_one_prompt(prompts) or is_one_prompt(given):
        return prompts_of("prompts", given) * len(found), found
    if isinstance(responses, str):
        raise ValueError(f"expected a list of responses with a list of prompts, got the text {responses[:40]!r}")
    if len(given) != len(found):
        raise ValueError(f"expected one response for each prompt, got {len(given)} prompts and {len(found)} responses")
    return given, found


def flat_groups(prompts: Prompts, responses_of_each: Iterable[Texts]) -> tuple[list[Prompt], list[str], list[int]]:
    """Prompts and responses one for one, neighbors with one prompt, and the number of responses to each prompt.

    Raises:
        ValueError: if there are not as many groups of responses as prompts.
    """
    each, given = prompts_of("prompts", prompts), listed("responses_of_each", responses_of_each)
    groups = [listed(f"responses_of_each[{place}]", group) for place, group in enumerate(given)]
    if len(each) != len(groups):
        found = f"{len(each)} prompts and {len(groups)} groups"
        raise ValueError(f"expected a group of responses for each prompt, got {found}")
    rows = [(prompt, text) for prompt, group in zip(each, groups, strict=True) for text in group]
    return *paired([prompt for prompt, _ in rows], [text for _, text in rows]), list(map(len, groups))


def table_rows(name: str, data: Any) -> list[Any]:
    """Rows of a data frame, an Arrow table, a `datasets.Dataset` or a mapping of columns; the values of a list.

    Cells are those that the table has in a Parquet file: a missing number is None, an array of messages is a list. A
    level of the index with a name is a column.

    Args:
        name: name of the argument, for the message.
        data: the argument.

    Raises:
        DataError: if the columns have different lengths, a column mixes types that no file can hold, an index has the
            name of a column, or the data hold several splits.
        TypeError: if it is no table and no list; its content is never part of the message.

    Example:
        >>> table_rows("data", {"prompt": ["2 + 2?", "3 + 3?"], "chosen": ["4", "6"]})[1]
        {'prompt': '3 + 3?', 'chosen': '6'}
    """
    if hasattr(data, "column_names") and hasattr(data, "to_list"):
        return [*data.to_list()]
    is_table = hasattr(data, "columns")
    if isinstance(data, Mapping):
        if data and all(hasattr(split, "column_names") for split in data.values()):
            splits = ", ".join(map(str, data))
            raise DataError(f"{name} holds the splits {splits}; give one of them, such as {name}['{next(iter(data))}']")
        is_table = all(isinstance(column, Iterable) and not isinstance(column, str) for column in data.values())
    if not is_table:
        return listed(name, data)
    try:
        if hasattr(data, "iloc"):
            levels = [level for level in data.index.names if level is not None]
            if twice := [level for level in levels if [*levels, *data.columns].count(level) > 1]:
                raise DataError(f"{name}: the index {twice[0]} is also a column; rename it or reset_index(drop=True)")
            table = pa.Table.from_pandas(data.reset_index(level=levels), preserve_index=False)
        else:
            table = pa.table({**data} if isinstance(data, Mapping) else data)
    except pa.ArrowException as error:
        raise DataError(f"{name} cannot be read as a table: {' '.join(str(error).split())}") from error
    return table.to_pylist()  # type: ignore[no-any-return]

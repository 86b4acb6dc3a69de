"""Hints for columns that fit no format: a proposed mapping, without a guess at the meaning of values.

A mapping is proposed only if the name itself is known and the mapped rows have a format. A merely similar name is never
proposed, nor is a column of ranks, winners or other numbers as a score or label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rm_optimizer.core.pairs.formats import RowFormat, detect_format
from rm_optimizer.core.rows.columns import Columns, renamed
from rm_optimizer.core.rows.messages import is_empty, is_message
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.core.rows.row_context import unread_column
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import Spelling

_OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "history", "conversations", "problem"),
    "chosen": (
        "better", "preferred", "accepted", "positive", "response_chosen", "answer_chosen", "chosen_response",
        "preferred_response", "text_chosen", "text_correct", "response_w",
    ),
    "rejected": (
        "worse", "dispreferred", "negative", "response_rejected", "answer_rejected", "rejected_response",
        "dispreferred_response", "text_rejected", "text_incorrect", "response_l",
    ),
    "responses": ("completions", "answers", "candidates", "generations"),
    "scores": ("rewards", "ratings"),
    "ranks": ("rank", "ranking"),
}  # fmt: skip
"""Column names of other data sets, by the equivalent names here."""
_SIDES = re.compile(r"(?P<stem>.+?)[ _-]?(?P<side>1|2|0|[abjkwlAB])", re.ASCII)
_PAIRS_OF_SIDES = (("1", "2"), ("0", "1"), ("a", "b"), ("A", "B"), ("j", "k"))
_WINNER_NAMES = re.compile(r"winner|label|prefer|choice|better|chosen|vote|verdict|overall", re.IGNORECASE)
_FEW_VALUES = 8
_SYSTEMATIC = 0.1
"""Share of the first rows from which labels out of range are a column of another meaning, not mistakes."""


def no_format(
    path: str, rows: Sequence[Row], columns: Columns, forms: Iterable[RowFormat], spelling: Spelling
) -> DataError:
    """The error for rows that look like no format.

    Args:
        path: the source as it was named.
        rows: its first rows under our names.
        columns: the mapping that gave them these names.
        forms: formats that were looked for.
        spelling: form of option names in messages.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    looked_for = "; or ".join(f"{form.expects} ({form.name})" for form in forms)
    hint = _hint(rows, names, columns, spelling)
    return DataError(f"{path}: expected {looked_for}; got columns {', '.join(names)}; {hint}")


def _hint(rows: Sequence[Row], names: Sequence[str], columns: Columns, spelling: Spelling) -> str:
    known = _known_names(names, rows)
    if known and detect_format([row for _, row in renamed(enumerate(rows), known)]):
        return f"did you mean {spelling.columns({**_given(columns), **known})}?"
    scores = [name for name in names if name not in known.values() and _is_number(rows, name)]
    if "prompt" in names and any(isinstance(row.get("response"), str) for row in rows) and scores:
        return f"name the column that scores each response, such as {spelling.columns({'score': scores[0]})}"
    if names_of_sides := _preferred_hint(rows, names, columns, spelling):
        return names_of_sides
    only_responses = not any(_WINNER_NAMES.search(name) for name in names)
    if "prompt" in names and only_responses and any(_are_responses(row) for row in rows):
        return "these are responses to score, not comparisons: rm-opt score CHECKPOINT IN OUT takes them"
    return (
        _numbered_hint(rows, names, columns, spelling) or _nested_hint(rows, names, spelling) or _plain_hint(spelling)
    )


def _is_number(rows: Sequence[Row], name: str) -> bool:
    """True if a column holds numbers of more than one value."""
    values = [row[name] for row in rows if not is_empty(row.get(name))]
    return len(set(map(str, values))) > 1 and all(isinstance(value, int | float) for value in values)


def _preferred_hint(rows: Sequence[Row], names: Sequence[str], columns: Columns, spelling: Spelling) -> str | None:
    """The winner form for a column whose values are the names of the two columns of responses."""
    for name in names:
        sides = [value for value in _values(rows, name) if value in names and value != name]
        if len(sides) == 2:
            mapping = _given(columns) | {"response_a": sides[0], "response_b": sides[1], "winner": name}
            others = [value for value in _values(rows, name) if value not in sides]
            option = spelling.option("winner", ",".join([*sides, *others[:1]]))
            return f"{name} names the better of {sides[0]} and {sides[1]}: {spelling.columns(mapping)} {option}"
    return None


def _are_responses(row: Row) -> bool:
    several = row.get("responses")
    return isinstance(row.get("response"), str) or (
        isinstance(several, list) and all(isinstance(item, str) for item in several)
    )


def _plain_hint(spelling: Spelling) -> str:
    return f"name yours as {spelling.columns({'prompt': '…', 'chosen': '…', 'rejected': '…'})}"


def _given(columns: Columns) -> dict[str, str]:
    return {ours: "null" if theirs is None else theirs for ours, theirs in columns.items()}


def _known_names(names: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    by_lower = {name.lower(): name for name in names}
    found = {}
    for ours, others in _OTHER_NAMES.items():
        same = next((by_lower[name] for name in (ours, *others) if name in by_lower), None)
        if same is not None and ours not in names:
            found[ours] = same
    if "scores" in found and not all(isinstance(row.get(found["scores"]), list) for row in rows):
        del found["scores"]
    return found


def _numbered_hint(rows: Sequence[Row], names: Sequence[str], columns: Columns, spelling: Spelling) -> str | None:
    """The winner form for two numbered columns of text, such as `response_1` and `response_2`."""
    sides = _numbered_pair(rows, names)
    if sides is None:
        return None
    prompt = {} if "prompt" in names else {"prompt": _known_names(names, rows).get("prompt", "PROMPT")}
    told = [name for name in names if _WINNER_NAMES.search(name) and _values(rows, name)]
    winner = told[0] if len(told) == 1 else "winner" if told else "WHICH_IS_BETTER"
    mapping = _given(columns) | prompt | {"response_a": sides[0], "response_b": sides[1], "winner": winner}
    if all(isinstance(row.get(sides[0]), list) for row in rows):
        mapping.pop("prompt", None)
    if len(told) > 1:
        return (
            f"{sides[0]} and {sides[1]} are two responses, and {', '.join(told)} tell only together which is better; "
            f"write one column winner of them, then give {spelling.columns(mapping)} {_winner_option(spelling)}"
        )
    holds = f"; {winner} holds {', '.join(_values(rows, winner))}" if told else ""
    return (
        f"{sides[0]} and {sides[1]} are two responses of which another column names the better one: "
        f"{spelling.columns(mapping)} {_winner_option(spelling)}, with the values that say so for the first, the "
        f"second and, if there are any, ties{holds}"
    )


def _numbered_pair(rows: Sequence[Row], names: Sequence[str]) -> tuple[str, str] | None:
    texts = [name for name in names if any(isinstance(row.get(name), str | list) for row in rows)]
    by_stem: dict[str, dict[str, str]] = {}
    for name in texts:
        found = _SIDES.fullmatch(name)
        if found:
            by_stem.setdefault(found["stem"], {})[found["side"]] = name
    pairs = [
        (sides[a], sides[b]) for sides in by_stem.values() for a, b in _PAIRS_OF_SIDES if a in sides and b in sides
    ]
    return max(pairs, key=lambda pair: _total_length(rows, pair[0]), default=None)


def _total_length(rows: Sequence[Row], name: str) -> float:
    return sum(len(str(row.get(name))) for row in rows)


def _values(rows: Sequence[Row], name: str) -> list[str]:
    """The values of a column of few values; none if there are many."""
    values = {str(row[name]) for row in rows if isinstance(row.get(name), str | int | float)}
    return sorted(values) if len(values) <= _FEW_VALUES and all(len(value) < 40 for value in values) else []


def _nested_hint(rows: Sequence[Row], names: Sequence[str], spelling: Spelling) -> str | None:
    """Paths into columns that hold objects."""
    parts: dict[str, list[str]] = {}
    for name in names:
        value: Any = next((row[name] for row in rows if not is_empty(row.get(name))), None)
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, Mapping) and not is_message(inner):
            parts[name] = [f"{name}.{part}" for part in inner]
    if not parts:
        return None
    listed = "; ".join(f"{name} holds {', '.join(paths[:8])}" for name, paths in parts.items())
    example = spelling.columns({"chosen": next(iter(parts.values()))[0]})
    return f"{listed}: map the parts that are prompt, chosen and rejected, or responses and scores, such as {example}"


def winner_untold(path: str, rows: Sequence[Row], columns: Columns, spelling: Spelling) -> DataError:
    """Error for a winner column without an option that defines its values."""
    theirs = columns.get("winner") or "winner"
    values = ", ".join(_values(rows, "winner")) or "many values"
    option = _winner_option(spelling)
    return DataError(
        f"{path}: expected the values of {theirs} that name the better response, as {option} (values for response_a, "
        f"for response_b and, if there are any, for ties; | between values that mean the same); {theirs} holds {values}"
    )


def _winner_option(spelling: Spelling) -> str:
    return spelling.option("winner", "FIRST,SECOND,TIE" if spelling == Spelling.flags else "[FIRST,SECOND,TIE]")


def require_readable(path: str, rows: Sequence[Row], columns: Columns, spelling: Spelling) -> None:
    """Refuse columns whose values would be lost or misread, seen on the first rows.

    Args:
        path: the source as it was named.
        rows: its first rows under our names.
        columns: the mapping that gave them these names.
        spelling: form of option names in messages.

    Raises:
        DataError: if a column would change what the model reads, labels are no probabilities, or no column has prompts.
    """
    _require_prompts(path, rows, spelling)
    _require_probabilities(path, rows, columns, spelling)
    _require_all_read(path, rows, columns, spelling)


def _require_all_read(path: str, rows: Sequence[Row], columns: Columns, spelling: Spelling) -> None:
    """Refuse a column that is part of the conversation and that no format reads."""
    lost = next((name for row in rows if (name := unread_column(row, columns)) is not None), None)
    if lost is None:
        return
    use = f"append it to the prompt with {spelling.columns({'input': lost})}, " if lost in ("input", "context") else ""
    use = f"use it as the system turn with {spelling.columns({'system': lost})}, " if "system_" in lost else use
    raise DataError(
        f"{path}: the column {lost} is not read and would be lost; write it into the prompt, {use}or leave it out "
        f"with {spelling.columns({lost: 'null'})}"
    )


def _require_prompts(path: str, rows: Sequence[Row], spelling: Spelling) -> None:
    """Refuse rows whose `chosen` is the response's message alone, as LLaMA-Factory's are, without a prompt column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    sides = [row["chosen"] for row in rows if isinstance(row.get("chosen"), list)]
    if "prompt" in names or not sides or not all(len(side) == 1 and is_message(side[0]) for side in sides):
        return
    prompt = _known_names(names, rows).get("prompt", "…")
    raise DataError(
        f"{path}: chosen has no prompt before its response; name the column that holds the prompt with "
        f"{spelling.columns({'prompt': prompt})}; got columns {', '.join(names)}"
    )


def _require_probabilities(path: str, rows: Sequence[Row], columns: Columns, spelling: Spelling) -> None:
    labels = [row["label"] for row in rows if not is_empty(row.get("label"))]
    wrong = [label for label in labels if not _is_probability(label)]
    if len(wrong) <= max(1, _SYSTEMATIC * len(labels)):
        return
    theirs = columns.get("label") or "label"
    values = sorted({str(label) for label in labels})
    sides = {"response_a": columns.get("chosen") or "chosen", "response_b": columns.get("rejected") or "rejected"}
    raise DataError(
        f"{path}: label must be the probability, in [0, 1], that chosen is the better response, but {theirs} holds "
        f"{', '.join(values[:_FEW_VALUES])} ({len(wrong)} of the first {len(labels)} are no probability); if it names "
        f"the better one of two responses, map {spelling.columns(sides | {'winner': theirs})} "
        f"{_winner_option(spelling)} with the values that name the first, the second and ties; if it means something "
        f"else, leave it out with {spelling.columns({'label': 'null'})}"
    )


def _is_probability(label: object) -> bool:
    try:
        return 0 <= float(label) <= 1  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False

"""Hints for columns that fit no format: a proposed mapping, without a guess at the meaning of values.

A mapping is proposed only if the name itself is known and the mapped rows have a format. A merely similar name is never
proposed, nor is a column of ranks, winners or other numbers as a score or label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rm_optimizer.core.pairs.formats import RowFormat, detect_format
from rm_optimizer.core.rows.columns import Columns, read_number, renamed, unread_column
from rm_optimizer.core.rows.messages import is_empty, is_message
from rm_optimizer.core.rows.readers import Row
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
_MARK = re.compile(r"(?<!\d)(\d+|[A-Za-z])(?![^\W_])", re.ASCII)
_SIDES = ({"1", "2"}, {"0", "1"}, {"a", "b"}, {"A", "B"}, {"j", "k"})
_WINNER_NAMES = re.compile(
    r"winner|label|prefer|choice|better|chosen|(?<![a-z])votes?(?![a-z])|verdict|overall|annotator|(?<![a-z])wins?$",
    re.IGNORECASE,
)
_SCORE_NAMES = re.compile(r"score|rating|reward|grade|quality|helpful|overall", re.IGNORECASE)
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
    if form := detect_format(rows):
        hint = f"the rows fit the format {form.name}; name it, or leave {spelling.option('format', 'NAME')} out"
    else:
        hint = _unusable(rows) or _hint(rows, names, columns, spelling)
    return DataError(f"{path}: {hint}; got columns {', '.join(names)}; expected {looked_for}")


def _unusable(rows: Sequence[Row]) -> str | None:
    """Columns of the right names with values that no format reads."""
    wrong = []
    for name in ("prompt", "chosen", "rejected"):
        if not all(name in row for row in rows):
            return None
        kinds = {"empty" if is_empty(row[name]) else type(row[name]).__name__ for row in rows}
        if not kinds & {"str", "list", "dict"}:
            wrong.append(f"{name} is {' or '.join(sorted(kinds))}")
    told = f"{' and '.join(wrong)} in each of the first {len(rows)} rows" if wrong else None
    return told and f"{told}, where text or messages are expected; repair these values"


def _hint(rows: Sequence[Row], names: Sequence[str], columns: Columns, spelling: Spelling) -> str:
    if names_of_sides := _preferred_hint(rows, names, columns, spelling):
        return names_of_sides
    known = _known_names(names, rows)
    if known and (form := detect_format([row for _, row in renamed(enumerate(rows), known)])):
        read = {ours: theirs for ours, theirs in known.items() if ours in form.columns}
        return f"did you mean {spelling.columns({**_given(columns), **read})}?"
    if "prompt" in names and any(isinstance(row.get("response"), str) for row in rows):
        numbers = [name for name in names if len(set(_numbers(rows, name))) > 1]
        if scores := [name for name in numbers if _SCORE_NAMES.search(name)] or numbers:
            example = spelling.columns({"score": scores[0] if _SCORE_NAMES.search(scores[0]) else "…"})
            return f"name the column that scores each response (one of {', '.join(scores)}), such as {example}"
    if hint := _numbered_hint(rows, names, columns, spelling):
        return hint
    has_responses = any(isinstance(row.get("response"), str) or _are_texts(row.get("responses")) for row in rows)
    if has_responses and "prompt" in names and not any(map(_WINNER_NAMES.search, names)):
        return "these are responses to score, not comparisons: rm-opt score CHECKPOINT IN OUT takes them"
    return _nested_hint(rows, names, spelling) or _plain_hint(spelling)


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a column of numbers, which may be text as in CSV; none for any other column."""
    try:
        return [read_number(name, row[name]) for row in rows if not is_empty(row.get(name))]
    except ValueError:
        return []


def _preferred_hint(rows: Sequence[Row], names: Sequence[str], columns: Columns, spelling: Spelling) -> str | None:
    """The winner form for a column whose values are the names of the two columns of responses."""
    for name in names:
        sides = [value for value in _values(rows, name) if value in names and value != name]
        if len(sides) == 2:
            mapping = _given(columns) | {"response_a": sides[0], "response_b": sides[1], "winner": name}
            option = spelling.option(
                "winner", ",".join(sides) if spelling == Spelling.flags else f"[{','.join(sides)}]"
            )
            others = ", ".join(value for value in _values(rows, name) if value not in sides)
            tie = f"; {name} also holds {others}: add the value of a tie as a third" if others else ""
            return f"{name} names the better of {sides[0]} and {sides[1]}: {spelling.columns(mapping)} {option}{tie}"
    return None


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


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
    """The winner form for two columns of text, such as `response_1` and `response_2`, or for a list of two texts.

    One column that names the better one is proposed. Several columns, and numbers of each side, are only described,
    since none of them alone means the same.
    """
    families, known = _families(names), _known_names(names, rows)
    numbers = [stem for stem, family in families.items() if all(_numbers(rows, name) for name in family)]
    texts = [
        family
        for stem, family in families.items()
        if stem not in numbers and all(any(isinstance(row.get(name), str | list) for row in rows) for name in family)
    ]
    sides = max(texts, key=lambda family: sum(len(str(row.get(family[0]))) for row in rows), default=[])
    told = [name for name in names if _WINNER_NAMES.search(name) and _values(rows, name) and name not in sides]
    alone = [name for name in told if not name.startswith(tuple(stem[0].split("_")[0] for stem in numbers if stem[0]))]
    listed = known.get("responses", "responses")
    if not sides and len(alone) == 1 and all(_are_texts(row.get(listed)) and len(row[listed]) == 2 for row in rows):
        sides = [f"{listed}.0", f"{listed}.1"]
    if len(sides) > 2:
        return (
            f"{', '.join(sides)} are {len(sides)} responses of a row; write them as one list in a column responses and "
            "their scores as one in a column scores, or write pairs as chosen and rejected"
        )
    if not sides:
        return None
    prompt = {} if "prompt" in names else {"prompt": known.get("prompt", "PROMPT")}
    winner = alone[0] if len(alone) == 1 else "winner" if told or numbers else "WHICH_IS_BETTER"
    mapping = _given(columns) | prompt | {"response_a": sides[0], "response_b": sides[1], "winner": winner}
    if all(isinstance(row.get(sides[0]), list) for row in rows):
        mapping.pop("prompt", None)
    typed = f"{spelling.columns(mapping)} {_winner_option(spelling)}"
    if len(alone) != 1 and (told or numbers):
        each = ", ".join(dict.fromkeys([*(name for stem in numbers for name in families[stem]), *told]))
        return (
            f"{sides[0]} and {sides[1]} are two responses of which no column alone names the better; if {each} tell "
            "it together (one-hot winners, votes, a score for each side), write the better one as chosen and the other "
            f"as rejected, or write one column winner, which {typed} reads"
        )
    holds = f"; {winner} holds {', '.join(_values(rows, winner))}" if told else ""
    return (
        f"{sides[0]} and {sides[1]} are two responses of which another column names the better one: {typed}, with the "
        f"values that say so for the first, the second and, if there are any, ties{holds}"
    )


def _families(names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Names that differ by the mark of a side alone, such as `answer_a` and `answer_b`, by the text that they share."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        for mark in _MARK.finditer(name):
            found.setdefault((name[: mark.start()], name[mark.end() :]), {})[mark[0]] = name
    return {
        shared: [name for _, name in sorted(marked.items(), key=lambda item: (len(item[0]), item[0]))]
        for shared, marked in found.items()
        if any(sides <= marked.keys() for sides in _SIDES)
    }


def _values(rows: Sequence[Row], name: str) -> list[str]:
    """The values of a column of few values; none if there are many."""
    values = {str(row[name]) for row in rows if isinstance(row.get(name), str | int | float)}
    return sorted(values) if len(values) <= _FEW_VALUES and all(len(value) < 40 for value in values) else []


def _nested_hint(rows: Sequence[Row], names: Sequence[str], spelling: Spelling) -> str | None:
    """Paths into columns that hold objects; the longest texts in columns of our names are an example."""
    listed, example = [], {}
    for name in names:
        value: Any = next((row[name] for row in rows if not is_empty(row.get(name))), None)
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, Mapping) and not is_message(inner):
            if all(str(part).isdigit() for part in inner):
                return "the file lists its values by column; write it by row, in pandas with orient='records'"
            listed.append(f"{name} holds {', '.join(f'{name}.{part}' for part in list(inner)[:8])}")
            texts = [part for part, text in inner.items() if isinstance(text, str)]
            if name in ("prompt", "chosen", "rejected") and texts:
                example[name] = f"{name}.{max(texts, key=lambda part: len(inner[part]))}"
    such = f", such as {spelling.columns(example)}" if example else f" with {spelling.columns({'OURS': 'PATH'})}"
    parts = "; ".join(listed)
    return (
        f"{parts}: map the parts that are prompt, chosen and rejected, or responses and scores{such}" if parts else None
    )


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
    last = lost.rpartition(".")[2]
    use = f"append it to the prompt with {spelling.columns({'input': lost})}, " if last in ("input", "context") else ""
    use = f"use it as the system turn with {spelling.columns({'system': lost})}, " if "system" in last else use
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

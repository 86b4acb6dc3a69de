"""Columns that are not read as they are meant: refused, with a mapping to type, or named in a note.

A mapping is proposed only if the name itself is known and the mapped rows have a format. A merely similar name is never
proposed, nor is a column of ranks, winners or other numbers as a score or label.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from statistics import median
from typing import Any, TypeGuard

from rm_optimizer.core.pairs.formats import FORMATS, RowFormat, described, detect_format
from rm_optimizer.core.pairs.layouts import Layout
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.pairs.winner import TODO, few_values, named_side, named_values
from rm_optimizer.core.rows.columns import (
    UNREAD_COLUMNS,
    Columns,
    columns_of,
    folded,
    read_number,
    texts_in,
    unread_column,
    with_lists,
)
from rm_optimizer.core.rows.messages import TEMPLATE_COLUMNS, are_texts, is_assistant, is_empty, is_message
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import Spelling

_OTHER_NAMES: Mapping[str, Sequence[str]] = described("general/names.yaml")
"""Column names of other data sets, by the equivalent names here."""
_MARK = re.compile(r"(?<!\d)(\d+|[A-Za-z])(?![^\W_])", re.ASCII)
_SIDES = ({"1", "2"}, {"0", "1"}, {"a", "b"}, {"A", "B"}, {"j", "k"})
_WINNER_NAMES = re.compile(
    r"winner|label|prefer|choice|better|chosen|(?<![a-z])votes?(?![a-z])|verdict|overall|annotator|(?<![a-z])wins?$",
    re.IGNORECASE,
)
_SCORE_NAMES = re.compile(r"score|rating|reward|grade|quality|helpful|overall", re.IGNORECASE)
_TEXT_NAMES = (".text", ".response", ".answer", ".completion", ".content")
_READABLE = {"str", "list", "dict"}
_RESPONSES = ("response_a", "response_b")
_MEANT = ", with values for the first, the second and, if there are any, ties (| between values that mean the same)"
_SYSTEMATIC = 0.1
"""Share of the first rows from which labels out of range are a column of another meaning, not mistakes."""


def no_format(source: DataSource, rows: Sequence[Row], near: Sequence[str] = ()) -> DataError:
    """The error for rows that look like no format, or not like the one that the source names.

    Args:
        source: the source.
        rows: its first rows under our names.
        near: layouts whose columns the rows have, and why they do not read them.
    """
    forms = FORMATS.values() if source.layout.named_format is None else [source.layout.named_format]
    looked_for = "; expected " + "; or ".join(f"{form.expects} ({form.name})" for form in forms)
    if form := detect_format(rows):
        option = Spelling.current().option("format", "NAME")
        hint = f"the rows fit the format {form.name}; name it, or leave {option} out"
    else:
        found = suggestion(rows, source.layout.columns)
        hint = found.text
        if TODO not in f"{found.columns} {found.winner}":
            looked_for = ""
    nearest = f"; nearest is {near[0]}" if near else ""
    got = ", ".join(name or "''" for name in columns_of(rows))
    return DataError(f"{source.path}: {hint}{nearest}; got columns {got}{looked_for}")


@dataclass(frozen=True)
class Suggestion:
    """Options that may read rows without a format.

    Args:
        told: a sentence on the rows, in which `{}` stands for the options; without them nothing reads the rows.
        columns: mapping of columns, with `TODO` where only a person can tell.
        winner: values of the winner column in the same way, or `TODO` for a meaning of several columns.
    """

    told: str
    columns: Columns = field(default_factory=dict)
    winner: Any = None

    @property
    def text(self) -> str:
        """The sentence, with the options as the user types them."""
        mapping = {ours: "null" if theirs is None else theirs for ours, theirs in self.columns.items()}
        typed = [Spelling.current().columns(mapping)] if mapping else []
        if isinstance(self.winner, list):
            places = zip(("FIRST", "SECOND", "TIE"), self.winner, strict=False)
            typed.append(Spelling.current().winner([place if value == TODO else value for place, value in places]))
        elif self.winner is not None:
            typed.append(Spelling.current().option("winner", "one_hot"))
        return self.told.replace("{}", " ".join(typed))


def suggestion(rows: Sequence[Row], columns: Columns) -> Suggestion:
    """Options that may read rows without a format, or with unknown values of the winner, or why none can.

    Args:
        rows: the first rows of a source under our names.
        columns: its mapping of columns.
    """
    names, ours = columns_of(rows), ("prompt", "chosen", "rejected")
    if tokens := [name for name in names if name.endswith("input_ids")]:
        told = "token ids do not tell by which template the model will be asked; give the texts or messages"
        return Suggestion(f"{' and '.join(tokens)} cannot be read: {told}")
    if detect_format(rows) is not None:
        theirs, winner = columns.get("winner") or "winner", named_values(rows, "winner", _RESPONSES)
        told = f"{theirs} holds {', '.join(few_values(rows, 'winner')) or 'many values'}"
        return Suggestion(
            f"name the values of {theirs} that tell the better response with {{}}{_MEANT}; {told}", {}, winner
        )
    if all({*ours} <= row.keys() for row in rows):
        kinds = {name: {"empty" if is_empty(row[name]) else type(row[name]).__name__ for row in rows} for name in ours}
        wrong = [f"{name} is {' or '.join(sorted(each))}" for name, each in kinds.items() if not each & _READABLE]
        if wrong:
            told = f"{' and '.join(wrong)} in each of the first {len(rows)} rows"
            return Suggestion(f"{told}, where text or messages are expected; repair these values")
    known = _known_names(names, rows)
    given = {**columns, **({} if "prompt" in names else {"prompt": known.get("prompt", TODO)})}
    for name in names:
        if len(sides := [value for value in few_values(rows, name) if value in names and value != name]) == 2:
            return _of_two(rows, given, sides, name)
    if known and (form := detect_format([with_lists(Layout(columns=known).ours(row)) for row in rows])):
        read = {name: theirs for name, theirs in known.items() if name in form.columns}
        return Suggestion("did you mean {}?", {**columns, **read})
    has_response = any(isinstance(row.get("response"), str) for row in rows)
    numbers = [name for name in names if has_response and len({*_numbers(rows, name)}) > 1]
    if scores := [name for name in numbers if _SCORE_NAMES.search(name)] or numbers:
        score = scores[0] if len(scores) == 1 and _SCORE_NAMES.search(scores[0]) else TODO
        told = f"name the column that scores each response (one of {', '.join(scores)}) as {{}}"
        return Suggestion(told, {**given, "score": score})
    if found := _of_sides(rows, names, given, known.get("responses", "responses")):
        return found
    has_responses = has_response or any(are_texts(row.get("responses")) for row in rows)
    if has_responses and "prompt" in names and not any(map(_WINNER_NAMES.search, names)):
        return Suggestion("these are responses to score, not comparisons: rm-opt score CHECKPOINT IN OUT takes them")
    lacking = {name: known.get(name, TODO) for name in ours if name not in names} or dict.fromkeys(ours, TODO)
    return _of_parts(rows, names, given) or Suggestion("name yours as {}", {**columns, **lacking})


def _numbers(rows: Sequence[Mapping[str, Any]], *names: str) -> list[float]:
    """The values of columns of numbers, which may be text as in CSV; none for any other column."""
    try:
        return [read_number(name, row[name]) for row in rows for name in names if not is_empty(row.get(name))]
    except ValueError:
        return []


def _known_names(names: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    by_lower = {name.lower(): name for name in names if not any(_is_object(row.get(name)) for row in rows)}
    found = {}
    for ours, others in _OTHER_NAMES.items():
        same = next((by_lower[name] for name in (ours, *others) if name in by_lower), None)
        if same is not None and ours not in names:
            found[ours] = same
    if "scores" in found and not all(isinstance(row.get(found["scores"]), list) for row in rows):
        del found["scores"]
    return found


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and not is_message(value)


def _of_sides(rows: Sequence[Row], names: Sequence[str], given: Columns, listed: str) -> Suggestion | None:
    """The winner form for two columns of text, such as `response_1` and `response_2`, or for a list of two texts.

    One column that names the better one is proposed. Several columns, and numbers of each side, are only described,
    since none of them alone means the same.
    """
    marked: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        for mark in _MARK.finditer(name):
            marked.setdefault((name[: mark.start()], name[mark.end() :]), {})[mark[0]] = name
    # Names that differ by the mark of a side alone, such as `answer_a` and `answer_b`.
    families = [
        [each[mark] for mark in sorted(each, key=lambda mark: (len(mark), mark))]
        for each in marked.values()
        if any(sides <= each.keys() for sides in _SIDES)
    ]
    numbers = [family for family in families if all(_numbers(rows, name) for name in family)]
    texts = [
        family
        for family in families
        if family not in numbers and all(any(isinstance(row.get(name), str | list) for row in rows) for name in family)
    ]
    sides = max(texts, key=lambda family: sum(len(str(row.get(family[0]))) for row in rows), default=[])
    told = [name for name in names if _WINNER_NAMES.search(name) and few_values(rows, name) and name not in sides]
    stems = tuple(stem.split("_")[0] for stem in map(commonprefix, numbers) if stem)
    alone = [name for name in told if not name.startswith(stems)]
    if not sides and len(alone) == 1 and all(are_texts(row.get(listed)) and len(row[listed]) == 2 for row in rows):
        sides = [f"{listed}.0", f"{listed}.1"]
    if not sides:
        return None
    if len(sides) > 2:
        scores = {} if "scores" in names else {"scores": TODO}
        of_row = (
            f"{', '.join(sides)} are {len(sides)} responses of a row: {{}} reads them with their scores in one list"
        )
        return Suggestion(of_row, {**given, "responses": sides, **scores})
    both = [*dict.fromkeys([*(name for family in numbers for name in family), *told])]
    if len(alone) == 1 or not both:
        return _of_two(rows, given, sides, *alone)
    columns = _of_two(rows, given, sides).columns
    of_row = (
        f"{sides[0]} and {sides[1]} are two responses of which no column alone names the better; if {', '.join(both)} "
        "tell it together, {} reads them, or votes (counts) or scores in place of one_hot"
    )
    return Suggestion(of_row, {**columns, "winner": both}, TODO)


def _of_two(rows: Sequence[Row], given: Columns, sides: Sequence[str], winner: str = TODO) -> Suggestion:
    """The winner form of two columns of responses."""
    columns = {**given, "response_a": sides[0], "response_b": sides[1], "winner": winner}
    are_lists = [isinstance(row.get(sides[0]), list) for row in rows]
    if all(are_lists):
        columns.pop("prompt", None)
    elif _unread_content(rows, {*map(str, columns.values())}):
        columns |= {"prompt": TODO} if "prompt" in given else {}
    values = named_values(rows, winner, sides)
    if any(are_lists) and any(row[sides[0]][:-1] != row[sides[1]][:-1] for row in rows):
        values = [TODO] * 3  # a verdict may be about the turn at which they part
    told = "another column" if winner == TODO else winner
    of_row = f"{sides[0]} and {sides[1]} are two responses of which {told} names the better one: {{}}"
    if TODO in values:
        of_row += f"{_MEANT}; {winner} holds {', '.join(few_values(rows, winner))}" if winner != TODO else _MEANT
    return Suggestion(of_row, columns, values)


def _of_parts(rows: Sequence[Row], names: Sequence[str], given: Columns) -> Suggestion | None:
    """Paths into columns that hold objects; the longest texts beside numbers, or in columns of our names, are read."""
    parts, inside = list[str](), dict[str, Any]()
    for name in names:
        value: Any = next((row[name] for row in rows if not is_empty(row.get(name))), None)
        inner = value[0] if isinstance(value, list) and value else value
        if not _is_object(inner):
            continue
        if all(str(part).isdigit() for part in inner):
            return Suggestion("the file lists its values by column; write it by row, in pandas with orient='records'")
        parts.append(f"{name} holds {', '.join(f'{name}.{part}' for part in list(inner)[:8])}")
        texts = {f"{name}.{part}": len(text) for part, text in inner.items() if isinstance(text, str)}
        longest = max(texts, key=lambda path: (path.endswith(_TEXT_NAMES), texts[path]), default=None)
        numbers = [part for part, each in inner.items() if isinstance(each, int | float) and not part.endswith("id")]
        if longest and numbers and inner is not value and "responses" not in inside:
            told = f"{name}.{numbers[0]}" if len(numbers) == 1 else TODO
            inside |= {**given, "responses": longest, "ranks" if "rank" in numbers[0] else "scores": told}
        elif longest and name in ("prompt", "chosen", "rejected"):
            inside[name] = longest
    if not parts:
        return None
    told = (
        f"{'; '.join(parts)}: map the parts that are prompt, chosen and rejected, or responses and scores, such as {{}}"
    )
    return Suggestion(told, inside or {**given, "responses": TODO, "scores": TODO})


def require_readable(source: DataSource, form: RowFormat, rows: Sequence[Row]) -> None:
    """Refuse columns whose values would be lost or misread.

    Args:
        source: the source.
        form: format of its rows.
        rows: its first rows under our names.

    Raises:
        DataError: if no option defines the values of the winner column, no column has prompts, labels are no
            probabilities, or a column would change what the model reads.
    """
    typed, columns = Spelling.current().columns, source.layout.columns
    if form.name == "winner" and source.layout.winner is None:
        raise DataError(f"{source.path}: {suggestion(rows, columns).text}")
    names = columns_of(rows)
    lists = [row["chosen"] for row in rows if isinstance(row.get("chosen"), list)]
    # Responses alone and no prompt column, as in files for LLaMA-Factory.
    if "prompt" not in names and lists and all(side and is_assistant(side[0]) for side in lists):
        option = typed({"prompt": _known_names(names, rows).get("prompt", "…")})
        raise DataError(
            f"{source.path}: chosen has no prompt before its response; name the column that holds the prompt with "
            f"{option}; got columns {', '.join(names)}"
        )
    labels = [row["label"] for row in rows if not is_empty(row.get("label"))]
    num_wrong = sum(not any(0 <= number <= 1 for number in _numbers([{"label": label}], "label")) for label in labels)
    if num_wrong > max(1, _SYSTEMATIC * len(labels)):
        theirs = columns.get("label") or "label"
        values = ", ".join(sorted({str(label) for label in labels})[:8])
        sides = [columns.get(name) or name for name in ("chosen", "rejected")]
        winner = Suggestion("{}", dict(zip((*_RESPONSES, "winner"), (*sides, theirs), strict=True)), [TODO] * 3).text
        raise DataError(
            f"{source.path}: label must be the probability, in [0, 1], that chosen is the better response, but "
            f"{theirs} holds {values}; if it names the better one of two responses, map {winner}{_MEANT}; if it means "
            f"something else, leave it out with {typed({'label': 'null'})}"
        )
    lost = next((name for row in rows if (name := unread_column(row, columns)) is not None), None)
    if lost is not None:
        last = lost.rpartition(".")[2]
        use = f"append it to the prompt with {typed({'input': lost})}, " if last in ("input", "context") else ""
        use = f"use it as the system turn with {typed({'system': lost})}, " if "system" in last else use
        use = f"give it to the chat template with {typed({last: lost})}, " if last in TEMPLATE_COLUMNS else use
        raise DataError(
            f"{source.path}: the column {lost} is not read and would be lost; write it into the prompt, {use}or leave "
            f"it out with {typed({lost: 'null'})}"
        )


_WORD = re.compile(r"[^\W\d_]{2,}")
_OF_PROMPTS = re.compile(
    r"persona|profile|context|document|passage|instruction|background|scenario|knowledge|evidence|article|story|"
    r"reference|rubric|constraint|system|history",
    re.IGNORECASE,
)
_OF_METADATA = re.compile(
    r"(^|[_ .-])(ids?|type|kind|source|category|class|name|title|url|lang|language|length|count|score|label|split|"
    r"subset|model|date|time|hash|licen[sc]e|copyright|citation|author|version)$",
    re.IGNORECASE,
)
_OF_SCORES = re.compile(r"score|rating|reward|rank|vote|win|prefer", re.IGNORECASE)
_OF_PREFERENCES = re.compile(r"winner|prefer|choice|better|verdict|label|vote", re.IGNORECASE)
_OF_CHOSEN = re.compile(r"chosen|better|best|prefer|accept|positive|correct|good|win|_w$", re.IGNORECASE)
_LONG = 80
"""Characters from which a text is content although other rows repeat it."""
_SENTENCE = 5
"""Words from which a text that few rows share is content."""


def unread_note(path: str, rows: Sequence[Row], read: frozenset[str]) -> str | None:
    """A sentence that names the columns of text that no format reads; None if there are none.

    Ids, sources, numbers and short text of few values are metadata. A text that also stands in a column that is read is
    not lost.

    Args:
        path: the source as it was named.
        rows: its first rows under our column names.
        read: columns that are read.
    """
    unread = _unread_content(rows, read)
    if not unread:
        return None
    option = Spelling.current().columns(dict.fromkeys(unread, "null"))
    return (
        f"{path}: {', '.join(unread)} look like content but are not read; write into the prompt what the responses "
        f"answer to, or leave such columns out with {option}"
    )


def _unread_content(rows: Sequence[Row], read: Collection[str]) -> list[str]:
    texts_read = ["\0".join(folded(text) for name in read for text in texts_in(row.get(name))) for row in rows]
    passed = {*read, *UNREAD_COLUMNS, "metadata"}
    return [name for name in columns_of(rows) if name not in passed and _is_content(name, rows, texts_read)]


def contrary_notes(source: DataSource, pairs: Sequence[PreferencePair]) -> Iterator[str]:
    """Sentences on unread columns by which the other response is the better one.

    These are scores of both sides, and columns whose values name a side. If the names of the sides tell nothing, such
    as `left` and `right`, a column that may name the better one by values of its own is named as well.

    Args:
        source: the source.
        pairs: its pairs, whose metadata are the unread columns.
    """
    path, columns = source.path, source.layout.columns
    sides = (columns.get("chosen") or "chosen", columns.get("rejected") or "rejected")
    decided = [(pair.metadata, 1 if pair.label > 0.5 else -1) for pair in pairs if pair.label != 0.5]
    rows = [row for row, _ in decided]
    names = columns_of(rows)
    words = [re.findall(r"[A-Za-z]+|\d+", side) for side in sides]
    differing = [both for both in zip(*words, strict=False) if both[0] != both[1]]
    marks = [("chosen", "rejected"), *(differing if len(differing) == 1 else [])]
    seconds = set[str | None]()
    for name in names:
        told = [*marks, sides] if _OF_PREFERENCES.search(name) else [sides]
        others = []
        for first, second in marks if _OF_SCORES.search(name) else []:
            edge = r"\d" if first.isdigit() else "[A-Za-z]"  # the word of the second side in place of the first's
            others.append(re.sub(rf"(?<!{edge}){re.escape(first)}(?!{edge})", second, name))
        other = next((each for each in others if each != name and each in names), None)
        seconds.add(other)
        values = few_values(rows, name)
        if other is None:
            named = {value: float(named_side(value, told)) for value in values}
            found = [sign * named.get(str(row.get(name)), 0.0) for row, sign in decided]
        else:
            better = -1 if "rank" in name.lower() else 1
            both_of_each = [(_numbers([row], name, other), sign) for row, sign in decided]
            found = [sign * better * (both[0] - both[1]) for both, sign in both_of_each if len(both) == 2]
        against, among = sum(value < 0 for value in found), sum(abs(value) > 0 for value in found)
        if against:
            by = name if other is None else f"{name} beside {other}"
            said = f"{by} prefers the other response in {against} of {among} pairs"
            yield f"{path}: {said} and is not read: are the columns swapped, or is it the winner of two responses?"
        elif among or name in seconds or len(told) == 1 or _OF_CHOSEN.search(sides[0]):
            continue
        elif len(values) > 1:
            said = f"{name}, which holds {', '.join(values)}, may name the better of {' and '.join(sides)}"
            yield f"{path}: {said} and is not read: map it as the winner of response_a and response_b, or to null"


def _is_content(name: str, rows: Sequence[Row], texts_read: Sequence[str]) -> bool:
    found = [max(texts_in(row.get(name)), key=len, default="") for row in rows]
    texts = [text for text in found if text.strip()]
    lost = [text for text, others in zip(found, texts_read, strict=True) if text.strip() and folded(text) not in others]
    if not lost or len(lost) < len(texts) / 2:
        return False
    is_metadata = _OF_METADATA.search(name) is not None
    if _OF_PROMPTS.search(name) and not is_metadata:
        return median(len(text.split()) for text in lost) > 1
    if median(len(_WORD.findall(text)) for text in lost) < _SENTENCE:
        return False
    return median(map(len, lost)) >= _LONG or (not is_metadata and len(set(lost)) > len(lost) / 2)

"""Refusals and notes for columns that are not read as they are meant, with a mapping to type.

A mapping is proposed only if the name itself is known and the mapped rows have a format. A merely similar name is never
proposed, nor is a column of ranks, winners or other numbers as a score or label.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from os.path import commonprefix
from statistics import median
from typing import Any, TypeGuard

from rm_optimizer.core.pairs.formats import FORMATS, READ_COLUMNS, RowFormat, detect_format
from rm_optimizer.core.pairs.layouts import ALWAYS_READ, Layout, is_undecided
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.pairs.winner import TODO, few_values, named_side, named_values
from rm_optimizer.core.rows.columns import (
    TOOLS,
    UNREAD_COLUMNS,
    Columns,
    columns_of,
    folded,
    paths_of,
    read_number,
    texts_in,
    unread_column,
)
from rm_optimizer.core.rows.gathering import SINGLE_RESPONSE
from rm_optimizer.core.rows.messages import (
    TEMPLATE_COLUMNS,
    are_texts,
    has_messages,
    is_assistant,
    is_empty,
    is_message,
    parsed,
)
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.errors import DataError
from rm_optimizer.schema.composition import described
from rm_optimizer.schema.data import Spelling

_HINTS: Mapping[str, Mapping[str, Any]] = described("layout/general/hints.yaml")
_NAMES = {name: re.compile(pattern, re.IGNORECASE).search for name, pattern in _HINTS["patterns"].items()}
"""Searches for names of columns by what such columns hold."""
_MARK = re.compile(r"(?<!\d)(\d+|[A-Za-z])(?![^\W_])", re.ASCII)
_MARKS = ({"1", "2"}, {"0", "1"}, {"a", "b"}, {"A", "B"}, {"j", "k"})
_READABLE = {"str", "list", "dict"}
_PAIR, _RESPONSES = ("chosen", "rejected"), ("response_a", "response_b")
_TEXTS = (("prompt",), _PAIR, _RESPONSES)
"""Columns that may be text or messages; text spells messages on both sides or on none."""
_LISTS = ("responses", "scores", "ranks")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")
"""Begin of a text that looks like a list of messages in some notation."""
_SYSTEMATIC = 0.1
"""Share of the first rows from which labels out of range are a column of another meaning, not mistakes."""


def _said(sentence: str, **parts: object) -> str:
    """A sentence of the hints with its parts, lists joined; options that are not given stay a placeholder."""
    words = {name: ", ".join(map(str, part)) if isinstance(part, list) else part for name, part in parts.items()}
    text: str = _HINTS["sentences"][sentence]
    return text.format(**{"options": "{options}", "meant": _HINTS["sentences"]["meant"], **words})


def no_format(source: DataSource, rows: Sequence[Row], near: Sequence[str] = ()) -> DataError:
    """The error for rows that look like no format, or not like the one that the source names.

    Args:
        source: the source.
        rows: its first rows under our names.
        near: layouts whose columns the rows have, and why they do not read them.
    """
    forms = FORMATS.values() if source.layout.named_format is None else [source.layout.named_format]
    looked_for = "; expected " + "; or ".join(f"{form.expects} ({form.name})" for form in forms)
    if (form := detect_format(rows)) and not text_hint(rows, source.layout):
        hint = _said("format", name=form.name, option=Spelling.current().option("format", "NAME"))
    else:
        found = suggestion(rows, source.layout)
        hint, looked_for = found.text, looked_for if TODO in f"{found.columns} {found.winner}" else ""
    nearest = f"; nearest is {near[0]}" if near else ""
    got = ", ".join(name or "''" for name in columns_of(rows))
    return DataError(f"{source.path}: {hint}{nearest}; got columns {got}{looked_for}")


@dataclass(frozen=True)
class Suggestion:
    """Options that may read rows without a format.

    Args:
        told: a sentence on the rows, with `{options}` for the options; without them nothing reads the rows.
        columns: mapping of columns, with `TODO` where only a person can tell.
        winner: values of the winner column in the same way, or `TODO` for a meaning of several columns.
        parse: columns of the source whose text is to be parsed.
    """

    told: str
    columns: Columns = field(default_factory=dict)
    winner: Any = None
    parse: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The sentence, with the options as the user types them."""
        typed = [Spelling.current().columns(self.columns)] if self.columns else []
        typed += [Spelling.current().parse(self.parse)] if self.parse else []
        if isinstance(self.winner, list):
            places = zip(("FIRST", "SECOND", "TIE"), self.winner, strict=False)
            typed.append(Spelling.current().winner([place if value == TODO else value for place, value in places]))
        elif self.winner is not None:
            typed.append(Spelling.current().option("winner", "one_hot"))
        return self.told.replace("{options}", " ".join(typed))


def suggestion(rows: Sequence[Row], layout: Layout) -> Suggestion:
    """Options that may read rows without a format, or with unknown values of the winner, or why none can.

    Args:
        rows: the first rows of a source under our names.
        layout: its options.
    """
    names, ours, columns = columns_of(rows), ("prompt", *_PAIR), layout.columns
    if found := text_hint(rows, layout):
        return found
    if tokens := [name for name in names if re.search(r"input_ids|(chosen|rejected)_ids$", name)]:
        return Suggestion(_said("tokens", names=" and ".join(tokens)))
    if detect_format(rows) is not None:
        theirs, values = columns.get("winner") or "winner", few_values(rows, "winner") or ["many values"]
        return Suggestion(_said("winner", theirs=theirs, values=values), {}, named_values(rows, "winner", _RESPONSES))
    if all({*ours} <= row.keys() for row in rows):
        kinds = {name: {"empty" if is_empty(row[name]) else type(row[name]).__name__ for row in rows} for name in ours}
        wrong = [f"{name} is {' or '.join(sorted(each))}" for name, each in kinds.items() if not each & _READABLE]
        if wrong:
            return Suggestion(_said("kinds", kinds=" and ".join(wrong), num=len(rows)))
    known = _known_names(names, rows)
    given = {**columns, **({} if "prompt" in names else {"prompt": known.get("prompt", TODO)})}
    for name in names:
        sides = [value for value in few_values(rows, name) if value in names and value != name]
        if len(sides) == 2 and "model" not in sides[0]:  # such a column may hold the name of a model
            return _of_two(rows, given, sides, name)
    if known and (form := detect_format([Layout(columns=known).ours(row) for row in rows])):
        read = {name: theirs for name, theirs in known.items() if name in form.columns}
        return Suggestion(_said("known"), {**columns, **read})
    has_response = any(isinstance(row.get("response"), str) for row in rows)
    numbers = [name for name in names if has_response and len({*_numbers(rows, name)}) > 1]
    if scores := [*filter(_NAMES["ratings"], numbers)] or numbers:
        score = scores[0] if len(scores) == 1 and _NAMES["ratings"](scores[0]) else TODO
        return Suggestion(_said("score", scores=scores), {**given, "score": score})
    if found := _of_sides(rows, names, given, known.get("responses", "responses")):
        return found
    has_responses = has_response or any(are_texts(row.get("responses")) for row in rows)
    if has_responses and "prompt" in names and not any(map(_NAMES["winners"], names)):
        return Suggestion(_said("score_file"))
    lacking = {name: known.get(name, TODO) for name in ours if name not in names} or dict.fromkeys(ours, TODO)
    return _of_parts(rows, names, given) or Suggestion(_said("unknown"), {**columns, **lacking})


def _kinds(rows: Sequence[Row], layout: Layout) -> dict[str, Counter[str]]:
    """Kinds of the cells of each column.

    Messages are a kind, lists of texts, and text that spells messages, texts or other values, or looks like messages
    and cannot be read. Text is nothing of this kind where the layout tells what is parsed.
    """

    def kind(value: Any, theirs: Any) -> str:
        if isinstance(theirs, Mapping) and layout.parse is None and value is not None:  # texts of speakers, or lists
            return "messages" if all(are_texts(parsed(turn["content"])) for turn in value) else "given"
        if not isinstance(value, str):
            return "given" if has_messages(value) else "list" if are_texts(value) else "other"
        if (found := parsed(value) if layout.parse is None else value) is value:
            return "unreadable" if layout.parse is None and _MESSAGES.match(value) else "other"
        if is_assistant(found) or (isinstance(found, list) and has_messages(found)):
            return "messages"
        return "texts" if are_texts(found) else "values" if isinstance(found, list) else "other"

    given = {name: [row[name] for row in rows if not is_empty(row.get(name))] for name in columns_of(rows)}
    return {name: Counter(kind(cell, layout.columns.get(name)) for cell in cells) for name, cells in given.items()}


def text_hint(rows: Sequence[Row], layout: Layout) -> Suggestion | None:
    """Options for columns of which most first cells are text that spells messages, or lists where those are needed.

    An answer in JSON among other text is text, and so are messages or lists on one side alone.
    """
    kinds, plain = _kinds(rows, layout), Spelling.current().parse(())
    most = {name: max(counts, key=counts.__getitem__, default="") for name, counts in kinds.items()}
    if lost := [name for name in chain(*_TEXTS) if most.get(name) == "unreadable"]:
        return Suggestion(_said("unreadable", names=lost, plain=plain))
    theirs = {ours: layout.columns.get(ours, ours) for ours in most}
    if most.get("prompt") in ("texts", "list"):
        turns = [ours for ours in chain(*_TEXTS) if most.get(ours) in ("texts", "list") and type(theirs[ours]) is str]
        return Suggestion(_said("turns"), {ours: f"{theirs[ours]}.0" for ours in turns})
    form, must = layout.named_format or detect_format(rows), {*_LISTS, *(_PAIR if layout.format == "lists" else ())}
    found = [name for name in most if most[name] == "messages" or (name in must and most[name] in ("texts", "values"))]
    if form is not None and any(map(form.fits, rows)):
        both = [names for names in _TEXTS if {most.get(name) for name in names} <= {"messages", "given"}]
        lists = {*_PAIR} if {most.get(name) for name in _PAIR} == {"texts"} else set()
        found = [name for name in most if (name in chain(*both) and most[name] == "messages") or name in lists]
    paths = [*dict.fromkeys(path for name in found for path in paths_of(theirs[name]))]
    sentence = "spelled" if must.isdisjoint(found) else "needed"
    return Suggestion(_said(sentence, names=paths, plain=plain), parse=paths) if paths else None


def odd_notes(rows: Sequence[Row], layout: Layout, columns: Iterable[Sequence[str]] = _TEXTS) -> Iterator[str]:
    """Sentences on cells of columns that look like messages and are read as text."""
    kinds = _kinds(rows, layout)
    for names in columns:
        found = sum((counts for name, counts in kinds.items() if name in names), Counter[str]())
        if odd := found["messages"]:
            yield _said("odd", odd=odd, num=found.total(), names=[*names])


def _numbers(rows: Sequence[Mapping[str, Any]], *names: str) -> list[float]:
    """The values of columns of numbers, which may be text as in CSV; none for any other column."""
    try:
        return [read_number(name, row[name]) for row in rows for name in names if not is_empty(row.get(name))]
    except ValueError:
        return []


def _known_names(names: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    by_lower = {name.lower(): name for name in names if not any(_is_object(row.get(name)) for row in rows)}
    found: dict[str, str] = {}
    for ours, others in _HINTS["names"].items():
        theirs = next((by_lower[name] for name in (ours, *others) if name in by_lower and ours not in names), None)
        if theirs and (ours != "scores" or all(isinstance(row.get(theirs), list) for row in rows)):
            found[ours] = theirs
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
        if any(sides <= each.keys() for sides in _MARKS)
    ]
    numbers = [family for family in families if all(_numbers(rows, name) for name in family)]
    are_read = {name: any(isinstance(row.get(name), str | list) for row in rows) for name in names}
    texts = [family for family in families if family not in numbers and all(map(are_read.get, family))]
    sides = max(texts, key=lambda family: sum(len(str(row.get(family[0]))) for row in rows), default=[])
    told = [name for name in names if _NAMES["winners"](name) and few_values(rows, name) and name not in sides]
    stems = tuple(stem.split("_")[0] for stem in map(commonprefix, numbers) if stem)
    alone = [name for name in told if not name.startswith(stems)]
    if not sides and len(alone) == 1 and all(are_texts(row.get(listed)) and len(row[listed]) == 2 for row in rows):
        sides = [f"{listed}.0", f"{listed}.1"]
    if not sides:
        return None
    if len(sides) > 2:
        scores = {} if "scores" in names else {"scores": TODO}
        return Suggestion(_said("many", sides=sides, num=len(sides)), {**given, "responses": sides, **scores})
    both = [*dict.fromkeys([*chain(*numbers), *told])]
    if len(alone) == 1 or not both:
        return _of_two(rows, given, sides, *alone)
    columns = {**_of_two(rows, given, sides).columns, "winner": both}
    return Suggestion(_said("together", first=sides[0], second=sides[1], both=both), columns, TODO)


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
    of_row = _said("two", first=sides[0], second=sides[1], told="another column" if winner == TODO else winner)
    if TODO in values:
        held = "" if winner == TODO else f"; {winner} holds {', '.join(few_values(rows, winner))}"
        of_row += _HINTS["sentences"]["meant"] + held
    return Suggestion(of_row, columns, values)


def _of_parts(rows: Sequence[Row], names: Sequence[str], given: Columns) -> Suggestion | None:
    """Paths into columns that hold objects, which read the longest texts next to numbers or in columns of our names."""
    parts, inside = list[str](), dict[str, Any]()
    for name in names:
        value: Any = next((row[name] for row in rows if not is_empty(row.get(name))), None)
        inner = value[0] if isinstance(value, list) and value else value
        if not _is_object(inner):
            continue
        if all(str(part).isdigit() for part in inner):
            return Suggestion(_said("by_column"))
        parts.append(f"{name} holds {', '.join(f'{name}.{part}' for part in list(inner)[:8])}")
        texts = {f"{name}.{part}": len(text) for part, text in inner.items() if isinstance(text, str)}
        longest = max(texts, key=lambda path: (_NAMES["texts"](path) is not None, texts[path]), default=None)
        numbers = [part for part, each in inner.items() if isinstance(each, int | float) and not part.endswith("id")]
        if longest and numbers and inner is not value and "responses" not in inside:
            told = f"{name}.{numbers[0]}" if len(numbers) == 1 else TODO
            inside |= {**given, "responses": longest, "ranks" if "rank" in numbers[0] else "scores": told}
        elif longest and name in ("prompt", *_PAIR):
            inside[name] = longest
    if not parts:
        return None
    told = _said("parts", parts="; ".join(parts))
    return Suggestion(told, inside or {**given, "responses": TODO, "scores": TODO})


def objection(source: DataSource, form: RowFormat, rows: Sequence[Row]) -> str | None:
    """Reason why columns would be lost or misread; None if all are read as they are meant.

    No option defines the values of the winner column, no column has prompts, labels are no probabilities, or a column
    would change what the model reads.

    Args:
        source: the source.
        form: format of its rows.
        rows: its first rows under our names.
    """
    typed, columns, names = Spelling.current().columns, source.layout.columns, columns_of(rows)
    if (hint := text_hint(rows, source.layout)) or (form.name == "winner" and source.layout.winner is None):
        return (hint or suggestion(rows, source.layout)).text
    lists = [row["chosen"] for row in rows if isinstance(row.get("chosen"), list)]
    # Responses alone and no prompt column, as in files for LLaMA-Factory.
    if "prompt" not in names and lists and all(side and is_assistant(side[0]) for side in lists):
        option = typed({"prompt": _known_names(names, rows).get("prompt", "…")})
        return _said("no_prompt", options=option, names=names)
    labels = [row["label"] for row in rows if not is_empty(row.get("label"))]
    num_wrong = sum(not any(0 <= number <= 1 for number in _numbers([{"label": label}], "label")) for label in labels)
    if num_wrong > max(1, _SYSTEMATIC * len(labels)):
        sides = [columns.get(name) or name for name in (*_PAIR, "label")]
        told = _said("labels", theirs=sides[2], values=sorted({*map(str, labels)})[:8], without=typed({"label": None}))
        return Suggestion(told, dict(zip((*_RESPONSES, "winner"), sides, strict=True)), [TODO] * 3).text
    if (lost := next(filter(None, (unread_column(row, columns) for row in rows)), None)) is None:
        return None
    last = lost.rpartition(".")[2]
    ours = "system" if "system" in last else "input" if last in ("input", "context") else last
    ours = "tools" if TOOLS(last) and last != "tool_calls" else ours
    kind = "lost_template" if ours in TEMPLATE_COLUMNS else f"lost_{ours}"
    use = _said(kind, options=typed({ours: lost})) if kind in _HINTS["sentences"] else ""
    return _said("lost", name=lost, use=use, without=typed({lost: None}))


_WORD = re.compile(r"[^\W\d_]{2,}")
_LONG = 80
"""Characters from which a text is content although other rows repeat it."""
_SENTENCE = 5
"""Words from which a text that few rows share is content."""


def unread_notes(source: DataSource, form: RowFormat, rows: Sequence[Row]) -> Iterator[str]:
    """Sentences on text that spells messages or lists, on options and on columns of text that the format does not read.

    Ids, sources, numbers and short text of few values are metadata. A text that is also in a column that is read is
    not lost.

    Args:
        source: the source.
        form: format of its rows.
        rows: its first rows under our names.

    Raises:
        DataError: if the source brings options without effect, which are not defaults of all sources.
    """
    entrance, layout, kinds = Spelling.current(), source.layout, _kinds(rows, source.layout)
    yield from odd_notes(rows, layout)
    if listed := [name for name, of in kinds.items() if name in (*_PAIR, *_RESPONSES) and of["texts"] > of.total() / 2]:
        yield _said("listed", names=listed, options=entrance.parse(listed))
    unread = {ours: theirs for ours, theirs in layout.columns.items() if theirs and ours in READ_COLUMNS - form.columns}
    options = {"columns": entrance.columns(unread)} if unread else {}
    if layout.winner is not None and form.name != "winner":
        options["winner"] = entrance.option("winner", str(layout.winner))
    if options:
        option, named = entrance.option("format", "NAME"), " and ".join(options.values())
        text = _said("no_effect", options=named, form=form.name, expects=form.expects, option=option)
        if not options.keys() <= source.inherited:
            raise DataError(f"{source.path}: {text}")
        yield text
    if lost := _unread_content(rows, form.columns | SINGLE_RESPONSE | ALWAYS_READ):
        yield _said("content", names=lost, without=entrance.columns(dict.fromkeys(lost)))


def _unread_content(rows: Sequence[Row], read: Collection[str]) -> list[str]:
    texts_read = ["\0".join(folded(text) for name in read for text in texts_in(row.get(name))) for row in rows]
    passed = {*read, *UNREAD_COLUMNS, "metadata"}
    return [name for name in columns_of(rows) if name not in passed and _is_content(name, rows, texts_read)]


def contrary_notes(source: DataSource, pairs: Sequence[PreferencePair]) -> Iterator[str]:
    """Sentences on unread columns by which the other response is the better one.

    These are scores of both sides, and columns whose values name a side. If the names of the sides tell nothing, such
    as `left` and `right`, a column that may name the better one by other values is named as well.

    Args:
        source: the source.
        pairs: its pairs, whose metadata are the unread columns.
    """
    if losing := sum(pair.label < 0.5 for pair in pairs):
        yield f"{source.path}: {_said('losing', losing=losing, num=len(pairs))}"
    columns = source.layout.columns
    sides = (columns.get("chosen") or "chosen", columns.get("rejected") or "rejected")
    decided = [(pair.metadata, 1 if pair.label > 0.5 else -1) for pair in pairs if pair.label != 0.5]
    names = columns_of(rows := [row for row, _ in decided])
    words = (re.findall(r"[A-Za-z]+|\d+", side) for side in sides)
    differing = [both for both in zip(*words, strict=False) if both[0] != both[1]]
    marks = [_PAIR, *(differing if len(differing) == 1 else [])]
    seconds = set[str | None]()
    for name in names:
        told = [*marks, sides] if _NAMES["preferences"](name) else [sides]
        others = [_of_other_side(name, *mark) for mark in marks if _NAMES["numbers_of_sides"](name)]
        seconds.add(other := next((each for each in others if each != name and each in names), None))
        values = few_values(rows, name)
        if other is None:
            named = {value: float(named_side(value, *told)) for value in values}
            found = [sign * named.get(str(row.get(name)), 0.0) for row, sign in decided]
        else:
            better = -1 if "rank" in name.lower() else 1
            both_of_each = [(_numbers([row], name, other), sign) for row, sign in decided]
            found = [sign * better * (both[0] - both[1]) for both, sign in both_of_each if len(both) == 2]
        against, among = sum(value < 0 for value in found), sum(abs(value) > 0 for value in found)
        if against:
            by = name if other is None else f"{name} beside {other}"
            yield f"{source.path}: {_said('contrary', by=by, against=against, among=among)}"
        elif undecided := [value for value in values if is_undecided(name, value)]:
            num = sum(str(row.get(name)) in undecided for row in rows)
            told_of = {"name": name, "values": undecided, "num": num, "among": len(rows)}
            yield f"{source.path}: {_said('undecided', **told_of)}"
        elif not (among or name in seconds or len(told) == 1 or _NAMES["better"](sides[0])) and len(values) > 1:
            yield f"{source.path}: {_said('own_values', name=name, values=values, sides=' and '.join(sides))}"


def _of_other_side(name: str, first: str, second: str) -> str:
    """The name with the word of the second side in place of the first's."""
    edge = r"\d" if first.isdigit() else "[A-Za-z]"
    return re.sub(rf"(?<!{edge}){re.escape(first)}(?!{edge})", second, name)


def _is_content(name: str, rows: Sequence[Row], texts_read: Sequence[str]) -> bool:
    found = [max(texts_in(row.get(name)), key=len, default="") for row in rows]
    texts = [text for text in found if text.strip()]
    lost = [text for text, others in zip(found, texts_read, strict=True) if text.strip() and folded(text) not in others]
    if not lost or len(lost) < len(texts) / 2:
        return False
    is_metadata = _NAMES["metadata"](name) is not None
    if _NAMES["prompts"](name) and not is_metadata:
        return median(len(text.split()) for text in lost) > 1
    if median(len(_WORD.findall(text)) for text in lost) < _SENTENCE:
        return False
    return median(map(len, lost)) >= _LONG or (not is_metadata and len(set(lost)) > len(lost) / 2)

"""Row formats: the kinds of their cells, and the comparisons that a row of each gives.

A row fits a format by the kinds of its cells. Its comparisons have the better response first; a `ValueError` gives the
reason why there are none. Prompts come out alike whatever form they had: an HH-style transcript becomes the messages it
holds, so that no source shows by its frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rm_optimizer.core.pairs.winner import Verdict
from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, UNREAD_COLUMNS, read_number
from rm_optimizer.core.rows.messages import (
    LAST_TURN,
    Message,
    Prompt,
    are_texts,
    as_messages,
    begins_with_turn,
    is_empty,
    is_message,
    messages_text,
    parse_transcript,
    read_messages,
    read_prompt,
    response_of,
    shown_kind,
)
from rm_optimizer.core.rows.readers import Report, Row
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.schema.compose import config_root
from rm_optimizer.schema.data import KwiseRule

OPTIONAL_COLUMNS = ("margin", "label", "weight")
"""Columns of numbers that a pair of any format may have."""
SINGLE_RESPONSE = frozenset({"response", "score"})
"""Columns of a table with one response a row, which `gather_responses` turns into lists."""
VOTES = ("votes_chosen", "votes_rejected")
"""Metadata of a pair whose label is the share of votes for `chosen`, which the agreement of annotators is read from."""
PER_RESPONSE = "(per response)"
"""Name of the values of each response in a gathered row, which no column of a file has."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two responses to one prompt, the better one first.

    Args:
        prompt: text, or the messages before the response.
        chosen: the preferred response.
        rejected: the other one.
        margin: strength of the preference, if the format has one.
        extra: further metadata that the format gives the pair.
        label: probability that `chosen` is the better one, if the format has one.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    label: float | None = None


@dataclass(frozen=True)
class RowFormat:
    """One way to write comparisons in rows, as `configs/layout/general/formats.yaml` describes it.

    Args:
        name: the value of `data.format`.
        compare: comparisons of a row; raises `ValueError` with the reason where there are none.
        expects: the columns it reads, in words.
        cells: kinds of cell that a column may have, for each column of one or several forms of a row.
        makes_groups: True if a row may give several comparisons, which then share a group id.
    """

    name: str
    compare: Callable[[Row, KwiseRule], list[Comparison]]
    expects: str
    cells: Sequence[Mapping[str, Sequence[str]]]
    makes_groups: bool = False

    @cached_property
    def columns(self) -> frozenset[str]:
        """All columns it reads."""
        return frozenset(name for form in self.cells for name, kinds in form.items() if {*kinds} != {"absent"})

    @cached_property
    def required(self) -> tuple[frozenset[str], ...]:
        """Sets of columns of which one must be there."""
        return tuple(frozenset(name for name in form if "absent" not in form[name]) for form in self.cells)

    def fits(self, row: Row) -> bool:
        """True for a row of this format."""
        return any(all(not _kinds(row, name).isdisjoint(form[name]) for name in form) for form in self.cells)


def _kinds(row: Row, name: str) -> set[str]:
    """The words that a description of formats has for a cell."""
    value = row.get(name)
    if isinstance(value, str):
        return {"present", "text"} | ({"transcript"} if begins_with_turn(value) else set())
    if isinstance(value, list):
        are_responses = any(isinstance(item, list) for item in value)
        return {"present", "list", "texts" if are_texts(value) else "responses" if are_responses else "messages"}
    return {"present", "other"} if name in row else {"absent"}


def row_format(name: str) -> RowFormat:
    """The format of that name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in FORMATS:
        raise ConfigError(did_you_mean("data.format", name, ["auto", *FORMATS]))
    return FORMATS[name]


def detect_format(rows: Sequence[Row]) -> RowFormat | None:
    """The format that most of the first rows look like, or None if none of them looks like any.

    Example:
        >>> detect_format([{"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}]).name
        'explicit'
    """
    votes = {name: sum(map(form.fits, rows)) for name, form in FORMATS.items()}
    best = max(votes, key=votes.__getitem__)
    return FORMATS[best] if votes[best] else None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown_kind(value)}")
    return value


def _compare_texts(row: Row, rule: KwiseRule) -> list[Comparison]:
    prompt = read_prompt(row.get("prompt"))
    chosen, rejected = (_text(name, row.get(name)) for name in ("chosen", "rejected"))
    if not all(begins_with_turn(text) and LAST_TURN in text for text in (chosen, rejected)):
        return [Comparison(prompt, chosen, rejected)]
    (comparison,) = _compare_transcripts(row, rule)
    _require_agreement(prompt, as_messages(comparison.prompt))
    return [comparison]


def _require_agreement(prompt: Prompt, messages: Sequence[Message]) -> None:
    """Refuse a prompt column that is not the prompt of the conversations beside it; case and blanks do not count."""
    given, own = (
        [(message.role, message.content.casefold().split()) for message in turns]
        for turns in (as_messages(prompt), messages)
    )
    if given != own and not (len(given) == 1 and given[0] in own):
        raise ValueError(
            "the prompt column says otherwise than the conversations in chosen and rejected; map the right column, or "
            "leave the prompt column out by mapping it to null"
        )


def _compare_lists(row: Row, rule: KwiseRule) -> list[Comparison]:
    """Every chosen response against every rejected one; equal responses make no pair."""
    sides = list[list[Any]]()
    for name in ("chosen", "rejected"):
        value = row.get(name)
        listed = value if isinstance(value, list) and not any(map(is_message, value)) else [value]
        if not listed or not all(isinstance(each, str) or _has_messages(each) for each in listed):
            raise ValueError(f"{name} must be a text or messages, or a list of them, got {shown_kind(value)}")
        sides.append(listed)
    prompt, responses = _candidates(row, [*sides[0], *sides[1]])
    places = itertools.product(range(len(sides[0])), range(len(sides[0]), len(responses)))
    return [
        Comparison(
            *(prompt, responses[better], responses[worse]),
            extra={"chosen_index": better, "rejected_index": worse - len(sides[0])},
        )
        for better, worse in places
        if responses[better] != responses[worse]
    ]


def _compare_winner(row: Row, rule: KwiseRule) -> list[Comparison]:
    """The better response first; `winner` is a `Verdict`, or the probability that `response_a` is the better one."""
    if row.get("label") not in (None, ""):
        raise ValueError("a row has both a label and a winner; leave one out")
    verdict: Verdict = row["winner"] if isinstance(row["winner"], Verdict) else Verdict(float(row["winner"]))
    sides = row | {"chosen": row.get("response_a"), "rejected": row.get("response_b")}
    form = next((FORMATS[name] for name in ("explicit", "hh", "messages") if FORMATS[name].fits(sides)), None)
    if form is None:
        raise ValueError("response_a and response_b must both be texts beside a prompt, or both conversations")
    (comparison,) = form.compare(sides, rule)
    votes = verdict.votes
    if is_second := verdict.label < 0.5:
        comparison = replace(comparison, chosen=comparison.rejected, rejected=comparison.chosen)
    extra = {} if votes is None else dict(zip(VOTES, reversed(votes) if is_second else votes, strict=True))
    return [replace(comparison, label=max(verdict.label, 1 - verdict.label), margin=verdict.margin, extra=extra)]


def _compare_transcripts(row: Row, rule: KwiseRule) -> list[Comparison]:
    # Texts that begin a turn inside an answer would pass for turns, so transcripts part at their end alone.
    sides = [_transcript(name, _text(name, row.get(name))) for name in ("chosen", "rejected")]
    prompt, (chosen, rejected) = _parted(sides, responses_begin=())
    return [Comparison(prompt, chosen, rejected)]


def _transcript(name: str, text: str) -> tuple[Message, ...]:
    before, last, response = text.rpartition(LAST_TURN)
    if not last:
        raise ValueError(f"{name} must be a transcript with an 'Assistant:' turn")
    if "\n\nHuman:" in response:
        raise ValueError(f"{name} must end with an 'Assistant:' turn, not a 'Human:' one")
    try:
        return (*parse_transcript(before), Message("assistant", response.strip()))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _compare_messages(row: Row, rule: KwiseRule) -> list[Comparison]:
    prompt, (chosen, rejected) = _parted([_conversation(row, "chosen"), _conversation(row, "rejected")])
    return [Comparison(prompt, chosen, rejected)]


def _conversation(row: Row, name: str) -> tuple[Message, ...]:
    """Prompt and response: a text or a list that begins with the assistant is a completion, any other list is both."""
    value, prompt = row.get(name), row.get("prompt")
    if isinstance(value, str) and not messages_text(value):
        value = (Message("assistant", value),)
    turns = read_messages(name, value)
    prompt = None if is_empty(prompt) else read_prompt(prompt)
    is_within = isinstance(prompt, str) and Message("user", prompt) in turns
    if prompt and turns[0].role == "assistant" and not is_within:
        turns = as_messages(prompt) + turns
    elif isinstance(prompt, str):
        _require_agreement(prompt, turns[:-1])
    elif prompt and turns[: len(prompt)] != prompt:
        raise ValueError(f"{name} must be a completion or begin with the prompt's messages")
    if turns[-1].role != "assistant":
        raise ValueError(f"{name} must end with a message of role assistant, got {turns[-1].role}")
    if len(turns) == 1:
        raise ValueError(f"{name} has no prompt before its response")
    return turns


def _parted(
    sides: Sequence[Sequence[Message]],
    named: str = "chosen and rejected",
    *,
    responses_begin: Collection[str] = ("assistant", "tool"),
) -> tuple[tuple[Message, ...], list[str]]:
    """The common beginning of conversations, which is their prompt, and the rest of each.

    They part at a turn that the model or its tools gave. A tool's result belongs to the response with its call.

    Args:
        sides: conversations, to their ends.
        named: their names, for the message.
        responses_begin: roles of the turns at which they may part; with none of them, at the last turn alone.

    Raises:
        ValueError: if they part at another turn.
    """
    first, *others = sides
    most = min(map(len, sides)) - 1
    same = next((place for place in range(most) if any(side[place] != first[place] for side in others)), most)
    if set(map(len, sides)) != {same + 1}:
        roles = {side[same].role for side in sides}
        start = same
        if "tool" in roles:
            start = max((place for place in range(1, same) if first[place].role == "assistant"), default=0)
        if not start or not roles <= {*responses_begin}:
            raise ValueError(f"the prompts of {named} differ, from turn {same + 1} on")
        same = start
    return tuple(first[:same]), [response_of(side[same:]) for side in sides]


def kwise_pairs(scores: Sequence[float], rule: KwiseRule) -> list[tuple[int, int]]:
    """Indices (better, worse) of the pairs that a rule makes of scored responses.

    `all` takes every two of different scores, `all_and_ties` every two, `best_worst` the highest and the lowest score,
    `adjacent` each response and the next in order of score.

    Example:
        >>> kwise_pairs([0.0, 2.0, 1.0], KwiseRule.adjacent)
        [(1, 2), (2, 0)]
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    candidates: dict[KwiseRule, Iterable[tuple[int, int]]] = {
        KwiseRule.all: itertools.combinations(order, 2),
        KwiseRule.all_and_ties: itertools.combinations(order, 2),
        KwiseRule.best_worst: [(order[0], order[-1])] if order else [],
        KwiseRule.adjacent: itertools.pairwise(order),
    }
    keeps_ties = rule == KwiseRule.all_and_ties
    return [(better, worse) for better, worse in candidates[rule] if scores[better] > scores[worse] or keeps_ties]


def _compare_kwise(row: Row, rule: KwiseRule) -> list[Comparison]:
    """Comparisons by scores, by ranks, of which the lowest is the best, or by edges; equal texts make no pair.

    Margins are gaps of scores or ranks. Edges are pairs of places in `responses` from 0, the better one first.
    """
    given = [name for name in ("scores", "ranks", "edges") if row.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"a row has both {' and '.join(given)}; leave one out")
    told = given[0] if given else "scores"
    responses: Any = row.get("responses")
    values: Any = row.get(told)
    if isinstance(responses, Mapping):
        responses, values = [*responses.values()], _ranks_by_name(values, responses)
    are_lists = isinstance(responses, list) and isinstance(values, list)
    if not are_lists or (told != "edges" and len(responses) != len(values)):
        raise ValueError(f"responses and {told} must be lists{' of the same length' if told != 'edges' else ''}")
    if told != "edges":
        values = [read_number(f"each of {told}", value) for value in values]
    prompt, texts = _candidates(row, responses)
    scores = [-value for value in values] if told == "ranks" else values
    places = [_edge(each, len(texts)) for each in values] if told == "edges" else kwise_pairs(scores, rule)
    of_each: dict[str, Sequence[Any]] = {"index": range(len(texts)), **(row.get(PER_RESPONSE) or {})}
    if told == "scores":
        of_each["score"] = scores
    return [
        Comparison(
            *(prompt, texts[better], texts[worse], None if told == "edges" else scores[better] - scores[worse]),
            extra={
                f"{side}_{name}": each[index]
                for name, each in of_each.items()
                for side, index in (("chosen", better), ("rejected", worse))
            },
            label=0.5 if told != "edges" and scores[better] == scores[worse] else None,
        )
        for better, worse in places
        if texts[better] != texts[worse]
    ]


def _edge(edge: Any, num_responses: int) -> tuple[int, int]:
    places = [*edge.values()] if isinstance(edge, Mapping) else edge
    if isinstance(places, list) and len(places) == 2:
        better, worse = places
        if all(type(place) is int and 0 <= place < num_responses for place in places):
            return better, worse
    raise ValueError(f"each of edges must be two places in {num_responses} responses, from 0, got {edge!r}")


def _candidates(row: Row, responses: Sequence[Any]) -> tuple[Prompt, list[str]]:
    """The prompt of a row, and its responses: texts, messages of the assistant, or conversations of one prompt."""
    if not any(map(_has_messages, responses)):
        return read_prompt(row.get("prompt")), [_text("each of responses", response) for response in responses]
    listed = [[response] if isinstance(response, Mapping) else response for response in responses]
    return _parted([_conversation({**row, "response": each}, "response") for each in listed], "the responses")


def _has_messages(value: object) -> bool:
    return is_message(value) or (isinstance(value, list) and bool(value) and is_message(value[0]))


def _ranks_by_name(ranking: Any, names: Iterable[str]) -> list[Any]:
    """Ranks of responses by name, from one annotator's list of `{value: name, rank: number}`."""
    while isinstance(ranking, list) and len(ranking) == 1 and isinstance(ranking[0], list):
        (ranking,) = ranking
    if not isinstance(ranking, list) or not all(isinstance(item, Mapping) for item in ranking):
        raise ValueError("ranks of named responses must be one list of {value, rank}; rankings of several are not read")
    ranks = {item.get("value"): item.get("rank") for item in ranking}
    return [ranks.get(name) for name in names]


def gather_responses(
    rows: Iterable[tuple[int, Row]], report: Report, by: Iterable[str] = ()
) -> Iterator[tuple[int, Row]]:
    """K-wise rows of a table with one response and score a row: rows of one prompt become one, at the first's number.

    A prompt is all that the model reads before the response, so columns of context decide beside `prompt` which rows
    belong together. Other columns that differ within a prompt go to `PER_RESPONSE`, so that each pair can tell both
    values.

    Args:
        rows: numbered rows with `prompt`, `response` and `score`.
        report: function called for rows without a usable response or score, of which the others of their prompt still
            count, and for the first row of a prompt whose rows differ in a number of the pair.
        by: further columns whose values rows of one prompt must share to belong together.
    """
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    context = ("prompt", *sorted({*CONTEXT_COLUMNS, *UNREAD_COLUMNS}), *by)
    for number, row in rows:
        try:
            if not _has_messages(row.get("response")):
                _text("response", row.get("response"))
            entry = row | {"score": read_number("score", row.get("score"))}
        except ValueError as error:
            report(number, str(error))
            continue
        whole = tuple("" if is_empty(row.get(name)) else repr(row[name]) for name in context)
        groups.setdefault(whole, []).append((number, entry))
    for members in groups.values():
        number, first = members[0]
        columns = {name: [row.get(name) for _, row in members] for name in first if name != "prompt"}
        listed = {"responses": columns.pop("response"), "scores": columns.pop("score")}
        differing = {name: each for name, each in columns.items() if each.count(each[0]) < len(each)}
        if of_pairs := differing.keys() & OPTIONAL_COLUMNS:
            report(number, f"the rows of its prompt differ in {min(of_pairs)}, which is one number for all of them")
        else:
            shared = {name: first[name] for name in columns if name not in differing}
            yield number, shared | {"prompt": first.get("prompt"), **listed, PER_RESPONSE: differing}


def described(file: str) -> Any:
    """Content of a file of `configs/layout`."""
    # OmegaConf takes 15 times as long, a quarter of a second for all of them.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((Path(config_root()) / "layout" / file).read_text(encoding="utf-8"), Loader=loader)


_COMPARE = {
    "explicit": _compare_texts,
    "hh": _compare_transcripts,
    "messages": _compare_messages,
    "lists": _compare_lists,
    "winner": _compare_winner,
    "kwise": _compare_kwise,
}
FORMATS: Mapping[str, RowFormat] = {
    name: RowFormat(name, _COMPARE[name], **options) for name, options in described("general/formats.yaml").items()
}
"""The row formats by name, in the order in which they are tried."""
READ_COLUMNS = frozenset[str]().union(*(form.columns for form in FORMATS.values()))
"""Columns that any format reads."""

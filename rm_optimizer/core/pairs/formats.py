"""Row formats: the kinds of their cells, and the comparisons that a row of each gives.

A row fits a format by the kinds of its cells. Its comparisons have the better response first; a `ValueError` gives the
reason why there are none. Prompts come out alike whatever form they had: an HH-style transcript becomes the messages it
holds, so that no source shows by its frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rm_optimizer.core.pairs.winner import Verdict
from rm_optimizer.core.rows.columns import read_number
from rm_optimizer.core.rows.gathering import PER_RESPONSE
from rm_optimizer.core.rows.messages import (
    Message,
    Prompt,
    are_texts,
    has_messages,
    is_empty,
    is_message,
    read_messages,
    require_text,
    response_of,
)
from rm_optimizer.core.rows.prompts import LAST_TURN, TURN, as_messages, parse_transcript, read_prompt
from rm_optimizer.core.rows.readers import Row
from rm_optimizer.schema.composition import described
from rm_optimizer.schema.data import KwiseRule

VOTES = ("votes_chosen", "votes_rejected")
"""Metadata of a pair whose label is the share of votes for `chosen`, which the agreement of annotators is read from."""
SCORES = ("chosen_score", "rejected_score")
"""Metadata of a pair whose responses have scores, which `PreferencePair.scores` reads."""


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
        weight: number of pairs that it counts for.
        is_second: True if `chosen` is the second response of a row with a winner.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    label: float | None = None
    weight: float = 1.0
    is_second: bool = False


@dataclass(frozen=True)
class RowFormat:
    """One way to write comparisons in rows, as `configs/layout/general/formats.yaml` describes it.

    Args:
        name: the value of `data.format`.
        expects: the columns it reads, in words.
        cells: kinds of cell that a column may have, for each column of one or several forms of a row.
        makes_groups: True if a row may give several comparisons, which then share a group id.
    """

    name: str
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

    def compare(self, row: Row, rule: KwiseRule) -> list[Comparison]:
        """Comparisons of a row, each with the better response first; equal responses are compared too.

        Raises:
            ValueError: if the row gives no comparison, with the reason.
        """
        if self.name == "winner":
            return _of_winner(row)
        return _of_responses(row, rule) if self.name == "kwise" else _of_sides(row, are_listed=self.makes_groups)


def _kinds(row: Row, name: str) -> set[str]:
    """The words that a description of formats has for a cell."""
    value = row.get(name)
    if isinstance(value, str):
        return {"present", "text"} | ({"transcript"} if TURN.match(value) else set())
    if isinstance(value, list):
        are_responses = any(isinstance(item, list) for item in value)
        return {"present", "list", "texts" if are_texts(value) else "responses" if are_responses else "messages"}
    return {"present", "other"} if name in row else {"absent"}


def detect_format(rows: Sequence[Row]) -> RowFormat | None:
    """The format that most of the first rows look like, or None if none of them looks like any.

    Example:
        >>> detect_format([{"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}]).name
        'explicit'
    """
    votes = {name: sum(map(form.fits, rows)) for name, form in FORMATS.items()}
    best = max(votes, key=votes.__getitem__)
    return FORMATS[best] if votes[best] else None


def _of_sides(row: Row, *, are_listed: bool) -> list[Comparison]:
    """Every chosen response against every rejected one."""
    sides = [row.get("chosen"), row.get("rejected")]
    listed = [
        value if are_listed and isinstance(value, list) and value and not any(map(is_message, value)) else [value]
        for value in sides
    ]
    named = [(name, each) for name, side in zip(("chosen", "rejected"), listed, strict=True) for each in side]
    first, second = map(range, map(len, listed))
    places = itertools.product(first, range(len(first), len(named)))
    return _comparisons(row, named, places, {"index": [*first, *second]} if are_listed else {})


def _of_winner(row: Row) -> list[Comparison]:
    """The better response first; `winner` is a `Verdict`."""
    if row.get("label") not in (None, ""):
        raise ValueError("a row has both a label and a winner; leave one out")
    verdict: Verdict = row["winner"]
    prompt, texts = _candidates(row, [(name, row.get(name)) for name in ("response_a", "response_b")])
    better = int(verdict.label < 0.5)
    extra: dict[str, Any] = {}
    for names, numbers in ((VOTES, verdict.votes), (SCORES, verdict.scores)):
        extra |= {} if numbers is None else zip(names, numbers[::-1] if better else numbers, strict=True)
    label = max(verdict.label, 1 - verdict.label)
    return [Comparison(prompt, texts[better], texts[1 - better], verdict.margin, extra, label, is_second=better == 1)]


def _of_responses(row: Row, rule: KwiseRule) -> list[Comparison]:
    """Comparisons by scores, by ranks, of which the lowest is the best, by edges, or of a winner with all others.

    Margins are gaps of scores or ranks. Edges are pairs of places in `responses` from 0, the better one first, or the
    one with the higher score in a row that has scores too. The winner is such a place.
    """
    given = [name for name in ("scores", "ranks", "edges", "winner") if row.get(name) is not None]
    if len(given) > 1 and given != ["scores", "edges"]:
        raise ValueError(f"a row has both {' and '.join(given)}; leave one out")
    told = given[-1] if given else "scores"
    responses: Any = row.get("responses")
    values: Any = row.get(told)
    if told == "winner" and isinstance(responses, list):
        if type(values) is not int or not 0 <= values < len(responses):
            raise ValueError(f"winner must be a place in {len(responses)} responses, from 0, got {values!r}")
        told, values = "edges", [[values, place] for place in range(len(responses)) if place != values]
    if isinstance(responses, Mapping):
        responses, values = [*responses.values()], _ranks_by_name(values, responses)
    are_edges = told == "edges"
    if not (isinstance(responses, list) and isinstance(values, list) and (are_edges or len(responses) == len(values))):
        raise ValueError(f"responses and {told} must be lists{'' if are_edges else ' of the same length'}")
    of_each: dict[str, Sequence[Any]] = {"index": range(len(responses)), **(row.get(PER_RESPONSE) or {})}
    sign = -1 if told == "ranks" else 1
    scores = [] if are_edges else [read_number(f"each of {told}", value) * sign for value in values]
    places = [_edge(each, responses, row.get("scores")) for each in values] if are_edges else kwise_pairs(scores, rule)
    of_each |= {"score": scores} if told == "scores" else {}
    return _comparisons(row, [("the responses", response) for response in responses], places, of_each, scores)


def _comparisons(
    row: Row,
    named: Sequence[tuple[str, Any]],
    places: Iterable[tuple[int, int]],
    of_each: Mapping[str, Sequence[Any]],
    scores: Sequence[float] = (),
) -> list[Comparison]:
    """Comparisons of named responses at pairs of places, the better one first, with the values of each response."""
    (prompt, texts), found = _candidates(row, named), list[Comparison]()
    for better, worse in places:
        sides = (("chosen", better), ("rejected", worse))
        extra = {f"{side}_{name}": values[place] for name, values in of_each.items() for side, place in sides}
        margin = scores[better] - scores[worse] if scores else None
        found.append(Comparison(prompt, texts[better], texts[worse], margin, extra, 0.5 if margin == 0 else None))
    return found


def _candidates(row: Row, named: Sequence[tuple[str, Any]]) -> tuple[Prompt, list[str]]:
    """The prompt of a row and its responses: texts, messages of the assistant, or conversations of one prompt.

    Args:
        row: the row.
        named: its responses, each with the name of its column.
    """
    given = row.get("prompt")
    prompt = None if is_empty(given) else read_prompt(given)
    if any(has_messages(value) for _, value in named):
        return _parted([_conversation(name, value, prompt) for name, value in named], named)
    texts = [require_text(name, value) for name, value in named]
    begun = [TURN.match(text) is not None and ("prompt" not in row or LAST_TURN in text) for text in texts]
    if not (all(begun) if "prompt" in row else any(begun)):
        return prompt or read_prompt(given), texts
    # Texts that begin a turn inside an answer would pass for turns, so transcripts part at their end alone.
    sides = [_transcript(name, text) for (name, _), text in zip(named, texts, strict=True)]
    common, responses = _parted(sides, named, responses_begin=())
    if prompt is not None:
        _require_agreement(prompt, common)
    return common, responses


def _conversation(name: str, value: Any, prompt: Prompt | None) -> tuple[Message, ...]:
    """Prompt and response: a text or a list that begins with the assistant is a completion, any other list is both."""
    if isinstance(value, str):
        value = Message("assistant", value)
    turns = read_messages(name, [value] if isinstance(value, Mapping | Message) else value)
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


def _require_agreement(prompt: Prompt, messages: Sequence[Message]) -> None:
    """Refuse a prompt column that differs from the prompt of the row's conversations; case and blanks do not count."""
    given, own = (
        [(message.role, message.content.casefold().split()) for message in turns]
        for turns in (as_messages(prompt), messages)
    )
    if given != own and not (len(given) == 1 and given[0] in own):
        told = "map the right column, or leave the prompt column out by mapping it to null"
        raise ValueError(f"the prompt column differs from the prompt of the conversations; {told}")


def _transcript(name: str, text: str) -> tuple[Message, ...]:
    before, last, response = text.rpartition(LAST_TURN)
    if not last or "\n\nHuman:" in response:
        raise ValueError(f"{name} must be a transcript that ends with an 'Assistant:' turn")
    try:
        return (*parse_transcript(before), Message("assistant", response.strip()))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _parted(
    sides: Sequence[Sequence[Message]],
    named: Iterable[tuple[str, Any]],
    *,
    responses_begin: Collection[str] = ("assistant", "tool"),
) -> tuple[tuple[Message, ...], list[str]]:
    """The common beginning of conversations, which is their prompt, and the rest of each.

    They part at a turn that the model or its tools gave. A tool's result belongs to the response with its call.

    Args:
        sides: conversations, to their ends.
        named: the responses with the names of their columns, for the message.
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
            names = " and ".join(dict.fromkeys(name for name, _ in named))
            raise ValueError(f"the prompts of {names} differ, from turn {same + 1} on")
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
    if rule == KwiseRule.best_worst:
        order = [order[0], order[-1]] if order else []
    pairs = itertools.pairwise(order) if rule == KwiseRule.adjacent else itertools.combinations(order, 2)
    return [pair for pair in pairs if scores[pair[0]] > scores[pair[1]] or rule == KwiseRule.all_and_ties]


def _edge(edge: Any, responses: Sequence[Any], scores: Any) -> tuple[int, int]:
    """The two places of an edge, the better one first, or the one with the higher score where the row has scores."""
    places = [*edge.values()] if isinstance(edge, Mapping) else edge if isinstance(edge, list) else []
    places = [place.get("response_id") if isinstance(place, Mapping) else place for place in places]
    if len(places) != 2 or not all(type(place) is int and 0 <= place < len(responses) for place in places):
        raise ValueError(f"each of edges must be two places in {len(responses)} responses, from 0, got {edge!r}")
    if scores is not None:
        if not isinstance(scores, list) or len(scores) != len(responses):
            raise ValueError("responses and scores must be lists of the same length")
        values = {place: read_number("each of scores", scores[place]) for place in places}
        if len({*values.values()}) < len(places):
            raise ValueError(f"the responses of each of edges must differ in scores, got {places}")
        places.sort(key=values.__getitem__, reverse=True)
    return places[0], places[1]


def _ranks_by_name(ranking: Any, names: Iterable[str]) -> list[Any]:
    """Ranks of responses by name, from one annotator's list of `{value: name, rank: number}`."""
    while isinstance(ranking, list) and len(ranking) == 1 and isinstance(ranking[0], list):
        (ranking,) = ranking
    if not isinstance(ranking, list) or not all(isinstance(item, Mapping) for item in ranking):
        raise ValueError("ranks of named responses must be one list of {value, rank}; rankings of several are not read")
    ranks = {item.get("value"): item.get("rank") for item in ranking}
    return [ranks.get(name) for name in names]


FORMATS: Mapping[str, RowFormat] = {
    name: RowFormat(name, **options) for name, options in described("layout/general/formats.yaml").items()
}
"""The row formats by name, in the order in which they are tried."""
READ_COLUMNS = frozenset[str]().union(*(form.columns for form in FORMATS.values()))
"""Columns that any format reads."""

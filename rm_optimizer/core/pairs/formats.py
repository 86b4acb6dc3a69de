"""Registry of row formats, which turn columns into comparisons of two responses.

A format turns one row into comparisons, or raises `ValueError` with the reason why it is no comparison. Prompts come
out alike whatever form they had: an HH-style transcript becomes the messages it holds, so that no source shows by its
frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, UNREAD_COLUMNS, read_number
from rm_optimizer.core.rows.messages import (
    LAST_TURN,
    Message,
    Prompt,
    are_texts,
    as_messages,
    begins_with_turn,
    is_empty,
    parse_transcript,
    read_messages,
    read_prompt,
    shown_kind,
)
from rm_optimizer.core.rows.readers import Report, Row
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.schema.data import KwiseRule
from rm_optimizer.schema.registry import Registry

OPTIONAL_COLUMNS = ("margin", "label", "weight")
"""Columns of numbers that a pair of any format may have."""
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
    """One way to write comparisons in rows.

    Args:
        name: the value of `data.format`.
        expects: the columns it reads, in words.
        required: sets of columns of which one must be there.
        columns: all columns it reads; the others become metadata.
        fits: function that returns True for a row of this format.
        compare: comparisons of a row; raises `ValueError` with the reason where there are none.
        makes_groups: True if a row may give several comparisons, which then share a group id.
    """

    name: str
    expects: str
    required: tuple[frozenset[str], ...]
    columns: frozenset[str]
    fits: Callable[[Row], bool]
    compare: Callable[[Row, KwiseRule], list[Comparison]]
    makes_groups: bool = False


def row_format(name: str) -> RowFormat:
    """The format of that name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in FORMATS:
        raise ConfigError(did_you_mean("data.format", name, ["auto", *FORMATS, *LAYOUTS]))
    return FORMATS[name]


def detect_format(rows: Sequence[Row]) -> RowFormat | None:
    """The format that most of the first rows look like, or None if none of them looks like any.

    Example:
        >>> detect_format([{"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}]).name
        'explicit'
    """
    votes = {name: sum(form.fits(row) for row in rows) for name, form in FORMATS.items()}
    best = max(votes, key=lambda name: votes[name])
    return FORMATS[best] if votes[best] else None


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown_kind(value)}")
    return value


def _compare_explicit(row: Row, rule: KwiseRule) -> list[Comparison]:
    prompt, chosen, rejected = read_prompt(row.get("prompt")), _text(row, "chosen"), _text(row, "rejected")
    if not all(begins_with_turn(text) and LAST_TURN in text for text in (chosen, rejected)):
        return [Comparison(prompt, chosen, rejected)]
    (comparison,) = _compare_transcripts(row, rule)
    _require_agreement(prompt, as_messages(comparison.prompt))
    return [comparison]


def _require_agreement(prompt: Prompt, messages: Sequence[Message]) -> None:
    """Refuse a prompt column that is not the prompt of the conversations beside it; case and blanks do not count."""
    given = [(message.role, message.content.casefold().split()) for message in as_messages(prompt)]
    own = [(message.role, message.content.casefold().split()) for message in messages]
    if given != own and not (len(given) == 1 and given[0] in own):
        raise ValueError(
            "the prompt column says otherwise than the conversations in chosen and rejected; map the right column, or "
            "leave the prompt column out by mapping it to null"
        )


def _compare_lists(row: Row, rule: KwiseRule) -> list[Comparison]:
    """Every chosen response against every rejected one; equal texts make no pair."""
    prompt = read_prompt(row.get("prompt"))
    chosen, rejected = (_texts(row, name) for name in ("chosen", "rejected"))
    return [
        Comparison(prompt, better, worse, extra=_both_sides({}, i, j))
        for i, better in enumerate(chosen)
        for j, worse in enumerate(rejected)
        if better != worse
    ]


def _texts(row: Row, name: str) -> list[str]:
    value = row.get(name)
    texts = [value] if isinstance(value, str) else value
    if not are_texts(texts):
        raise ValueError(f"{name} must be a text or a list of texts, got {shown_kind(value)}")
    return texts


def _compare_winner(row: Row, rule: KwiseRule) -> list[Comparison]:
    """The better response first; `winner` is the probability that `response_a` is the better one."""
    if row.get("label") not in (None, ""):
        raise ValueError("a row has both a label and a winner; leave one out")
    sides = row | {"chosen": row.get("response_a"), "rejected": row.get("response_b")}
    form = next((FORMATS[name] for name in _PAIR_FORMATS if FORMATS[name].fits(sides)), None)
    if form is None:
        raise ValueError("response_a and response_b must both be texts beside a prompt, or both conversations")
    (comparison,) = form.compare(sides, rule)
    if row["winner"] == 0:
        return [replace(comparison, chosen=comparison.rejected, rejected=comparison.chosen)]
    return [replace(comparison, label=float(row["winner"]))]


def _compare_transcripts(row: Row, rule: KwiseRule) -> list[Comparison]:
    prompt, chosen = _split_transcript(row, "chosen")
    other_prompt, rejected = _split_transcript(row, "rejected")
    _require_same_prompt(prompt, other_prompt)
    return [Comparison(prompt, chosen, rejected)]


def _split_transcript(row: Row, name: str) -> tuple[tuple[Message, ...], str]:
    """The messages before the last assistant turn, and that turn."""
    before, last, response = _text(row, name).rpartition(LAST_TURN)
    if not last:
        raise ValueError(f"{name} must be a transcript with an 'Assistant:' turn")
    if "\n\nHuman:" in response:
        raise ValueError(f"{name} must end with an 'Assistant:' turn, not a 'Human:' one")
    try:
        return parse_transcript(before), response.strip()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _require_same_prompt(first: Sequence[Message], second: Sequence[Message]) -> None:
    if first != second:
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        raise ValueError(f"the prompts of chosen and rejected differ, from turn {same + 1} on")


def _compare_messages(row: Row, rule: KwiseRule) -> list[Comparison]:
    chosen, rejected = _conversation(row, "chosen"), _conversation(row, "rejected")
    _require_same_prompt(chosen[:-1], rejected[:-1])
    return [Comparison(chosen[:-1], chosen[-1].content, rejected[-1].content)]


def _conversation(row: Row, name: str) -> tuple[Message, ...]:
    """Prompt and response: a list that begins with the assistant is a completion, any other the whole conversation."""
    turns, prompt = read_messages(name, row.get(name)), row.get("prompt")
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


def kwise_pairs(scores: Sequence[float], rule: KwiseRule) -> list[tuple[int, int]]:
    """Indices (better, worse) of the pairs that a rule makes of scored responses; equal scores never make a pair.

    `all` takes every two, `best_worst` the highest and the lowest score, `adjacent` each response and the next in order
    of score.

    Example:
        >>> kwise_pairs([0.0, 2.0, 1.0], KwiseRule.adjacent)
        [(1, 2), (2, 0)]
    """
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    candidates: dict[KwiseRule, Iterable[tuple[int, int]]] = {
        KwiseRule.all: itertools.combinations(order, 2),
        KwiseRule.best_worst: [(order[0], order[-1])] if order else [],
        KwiseRule.adjacent: itertools.pairwise(order),
    }
    return [(better, worse) for better, worse in candidates[rule] if scores[better] > scores[worse]]


def _compare_kwise(row: Row, rule: KwiseRule) -> list[Comparison]:
    """Margins are score or rank gaps; equal texts make no pair, whatever their scores."""
    prompt, responses, values = read_prompt(row.get("prompt")), row.get("responses"), _scores(row)
    if not isinstance(responses, list) or len(responses) != len(values):
        raise ValueError("responses and scores must be lists of the same length")
    for response in responses:
        _text({"each of responses": response}, "each of responses")
    per_response: Mapping[str, Sequence[Any]] = row.get(PER_RESPONSE) or {}
    pairs = [pair for pair in kwise_pairs(values, rule) if responses[pair[0]] != responses[pair[1]]]
    return [
        Comparison(prompt, responses[i], responses[j], values[i] - values[j], _both_sides(per_response, i, j))
        for i, j in pairs
    ]


def _scores(row: Row) -> list[float]:
    """Scores, or ranks, of which 1 is the best, with their sign turned."""
    if row.get("scores") is not None and row.get("ranks") is not None:
        raise ValueError("a row has both scores and ranks; leave one out")
    name = "scores" if row.get("scores") is not None else "ranks"
    values = row.get(name)
    if not isinstance(values, list):
        raise ValueError("responses and scores must be lists of the same length")
    sign = 1.0 if name == "scores" else -1.0
    return [sign * read_number(f"each of {name}", value) for value in values]


def _both_sides(per_response: Mapping[str, Sequence[Any]], better: int, worse: int) -> dict[str, Any]:
    """The values of both responses, and their positions in the row's list, or in the list of their side."""
    sides = (("chosen", better), ("rejected", worse))
    own = {f"{side}_{name}": values[index] for name, values in per_response.items() for side, index in sides}
    return {f"{side}_index": index for side, index in sides} | own


def gather_responses(rows: Iterable[tuple[int, Row]], report: Report) -> Iterator[tuple[int, Row]]:
    """K-wise rows of a table with one response and score a row: rows of one prompt become one, at the first's number.

    A prompt is all that the model reads before the response, so columns of context decide beside `prompt` which rows
    belong together. Other columns that differ within a prompt go to `PER_RESPONSE`, so that each pair can tell both
    values.

    Args:
        rows: numbered rows with `prompt`, `response` and `score`.
        report: function called for rows without a usable response or score, of which the others of their prompt still
            count, and for the first row of a prompt whose rows differ in a number of the pair.
    """
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    context = sorted({*CONTEXT_COLUMNS, *UNREAD_COLUMNS})
    for number, row in rows:
        try:
            entry = {**row, "response": _text(row, "response"), "score": read_number("score", row.get("score"))}
        except ValueError as error:
            report(number, str(error))
            continue
        whole = tuple("" if is_empty(row.get(name)) else repr(row[name]) for name in ("prompt", *context))
        groups.setdefault(whole, []).append((number, entry))
    for members in groups.values():
        gathered = _gathered([row for _, row in members])
        if of_pairs := gathered[PER_RESPONSE].keys() & OPTIONAL_COLUMNS:
            report(
                members[0][0], f"the rows of its prompt differ in {min(of_pairs)}, which is one number for all of them"
            )
        else:
            yield members[0][0], gathered


def _gathered(rows: Sequence[Row]) -> Row:
    names = [name for name in rows[0] if name not in ("prompt", "response", "score")]
    differing = [name for name in names if any(row.get(name) != rows[0][name] for row in rows)]
    return {name: rows[0][name] for name in names if name not in differing} | {
        "prompt": rows[0].get("prompt"),
        "responses": [row["response"] for row in rows],
        "scores": [row["score"] for row in rows],
        PER_RESPONSE: {name: [row.get(name) for row in rows] for name in differing},
    }


def _has_texts(row: Row, *names: str) -> bool:
    return all(isinstance(row.get(name), str) for name in names)


def _fits_explicit(row: Row) -> bool:
    return isinstance(row.get("prompt"), str | list) and _has_texts(row, "chosen", "rejected")


def _fits_transcripts(row: Row) -> bool:
    texts = (row.get("chosen"), row.get("rejected"))
    return "prompt" not in row and all(isinstance(text, str) and begins_with_turn(text) for text in texts)


def _fits_messages(row: Row) -> bool:
    sides = (row.get("chosen"), row.get("rejected"))
    return all(isinstance(side, list) and not are_texts(side) for side in sides)


def _fits_lists(row: Row) -> bool:
    sides = (row.get("chosen"), row.get("rejected"))
    are_sides = all(isinstance(side, str) or are_texts(side) for side in sides)
    return "prompt" in row and are_sides and any(isinstance(side, list) for side in sides)


def _fits_winner(row: Row) -> bool:
    return {"response_a", "response_b", "winner"} <= row.keys() and not {"chosen", "rejected"} & row.keys()


def _fits_kwise(row: Row) -> bool:
    values = row.get("scores") if row.get("scores") is not None else row.get("ranks")
    lists = isinstance(row.get("responses"), list) and isinstance(values, list)
    return "prompt" in row and (lists or {"response", "score"} <= row.keys())


_PAIR_FORMATS = ("explicit", "hh", "messages")
FORMATS: Mapping[str, RowFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            RowFormat(
                "explicit",
                "prompt, chosen and rejected texts",
                (frozenset({"prompt", "chosen", "rejected"}),),
                frozenset({"prompt", "chosen", "rejected"}),
                _fits_explicit,
                _compare_explicit,
            ),
            RowFormat(
                "hh",
                "chosen and rejected transcripts that begin with 'Human:'",
                (frozenset({"chosen", "rejected"}),),
                frozenset({"chosen", "rejected"}),
                _fits_transcripts,
                _compare_transcripts,
            ),
            RowFormat(
                "messages",
                "chosen and rejected lists of messages, with or without a prompt",
                (frozenset({"chosen", "rejected"}),),
                frozenset({"prompt", "chosen", "rejected"}),
                _fits_messages,
                _compare_messages,
            ),
            RowFormat(
                "lists",
                "prompt, and chosen and rejected of which one is a list of texts",
                (frozenset({"prompt", "chosen", "rejected"}),),
                frozenset({"prompt", "chosen", "rejected"}),
                _fits_lists,
                _compare_lists,
                makes_groups=True,
            ),
            RowFormat(
                "winner",
                "prompt, response_a, response_b and the winner of the two",
                (frozenset({"response_a", "response_b", "winner"}),),
                frozenset({"prompt", "response_a", "response_b", "winner"}),
                _fits_winner,
                _compare_winner,
            ),
            RowFormat(
                "kwise",
                "prompt, responses and scores lists, or ranks (1 is the best) for scores, or prompt, response and "
                "score with one response a row",
                (
                    frozenset({"prompt", "responses", "scores"}),
                    frozenset({"prompt", "responses", "ranks"}),
                    frozenset({"prompt", "response", "score"}),
                ),
                frozenset({"prompt", "responses", "scores", "ranks", PER_RESPONSE}),
                _fits_kwise,
                _compare_kwise,
                makes_groups=True,
            ),
        )
    }
)
"""The row formats by name, in the order in which they are tried."""
READ_COLUMNS = frozenset({name for form in FORMATS.values() for name in form.columns} - {PER_RESPONSE}) | {
    *("response", "score"),
}
"""Columns that any format reads, those of a table with one response a row included."""
LAYOUTS: Registry[Mapping[str, Any]] = Registry("layout")
"""Options of a source by the name that `register_layout` gave them, which `data.format` takes like a row format's."""

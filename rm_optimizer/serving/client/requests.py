"""Scoring requests of a client: their bodies, their answers, and the division of a batch into requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from rm_optimizer.core.pairs.pair import Message, Prompt
from rm_optimizer.errors import WrongAnswer

TEMPLATE_BYTES = 256
"""Bytes reserved for the chat template's additions to a text, where only the server tokenizes."""
Conversation: TypeAlias = tuple[Prompt, str]


@dataclass(frozen=True)
class Limits:
    """The most that one request may hold.

    Args:
        tokens: tokens of all its sequences.
        items: number of sequences.
    """

    tokens: int
    items: int


@dataclass(frozen=True)
class Form:
    """Form of a scoring request.

    Args:
        path: path of its route.
        size: function of a row that returns its tokens, or more.
        body: function of the rows and `use_activation` that returns the JSON body, less the model's name.
        numbers: function of an answer that returns its numbers in the order of the rows.
    """

    path: str
    size: Callable[[Any], int]
    body: Callable[[Sequence[Any], bool], dict[str, Any]]
    numbers: Callable[[Any], list[Any]]


def _token_body(rows: Sequence[Sequence[int]], use_activation: bool) -> dict[str, Any]:
    return {"input": [list(row) for row in rows], "use_activation": use_activation}


def _token_numbers(answer: Any) -> list[Any]:
    """`probs[0]` of each datum."""
    data = sorted(answer["data"], key=lambda datum: int(datum["index"]))
    if any(len(datum["probs"]) != 1 for datum in data):
        raise WrongAnswer(f"the server's model has {len(data[0]['probs'])} labels; serve a reward model, with one")
    return [datum["probs"][0] for datum in data]


def _conversation_size(row: Conversation) -> int:
    """Upper bound of a row's tokens: the bytes of its text, of which no tokenizer makes more tokens."""
    prompt, response = row
    texts = [prompt] if isinstance(prompt, str) else [part for m in prompt for part in (m.role, m.content)]
    return TEMPLATE_BYTES + sum(len(text.encode("utf-8", "replace")) for text in (*texts, response))


def _conversation_body(rows: Sequence[Conversation], use_activation: bool) -> dict[str, Any]:
    """Body in which adjacent rows with one prompt are one item."""
    items = [
        {
            "prompt": prompt if isinstance(prompt, str) else list(map(Message.to_dict, prompt)),
            "responses": [text for _, text in group],
        }
        for prompt, group in groupby(rows, key=lambda row: row[0])
    ]
    return {"items": items, "use_activation": use_activation}


def _conversation_numbers(answer: Any) -> list[Any]:
    return [number for item in answer["rewards"] for number in item]


TOKEN_FORM = Form("/classify", len, _token_body, _token_numbers)
"""`/classify` with token ids, rendered by the client and independent of the server's template."""
CONVERSATION_FORM = Form("/rm/score", _conversation_size, _conversation_body, _conversation_numbers)
"""`/rm/score` with prompts and responses: the server renders them as training did."""


def pieces(rows: Sequence[Any], size: Callable[[Any], int], limits: Limits) -> Iterator[range]:
    """Consecutive ranges of rows that each fit into one request; a row beyond the limits gets a request of its own.

    Example:
        >>> list(pieces(["aa", "a", "aaaa", "a"], len, Limits(tokens=4, items=2)))
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    start = total = 0
    for index, row in enumerate(rows):
        tokens = size(row)
        if index > start and (total + tokens > limits.tokens or index - start == limits.items):
            yield range(start, index)
            start, total = index, 0
        total += tokens
    if rows:
        yield range(start, len(rows))


def finite_numbers(form: Form, answer: Any, count: int) -> list[float]:
    """The rewards of an answer.

    Raises:
        WrongAnswer: if there are not `count` of them, or one is not finite.
    """
    try:
        numbers = [float(number) for number in form.numbers(answer)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise WrongAnswer(f"the answer of {form.path} has not the form of one: {error!r}") from error
    if len(numbers) != count:
        raise WrongAnswer(f"expected {count} rewards from {form.path}, got {len(numbers)}")
    if not all(map(math.isfinite, numbers)):
        raise WrongAnswer(f"the server gave a reward that is not finite: {numbers}")
    return numbers

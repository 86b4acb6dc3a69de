"""Files of questions for people who label pairs, and their answers as training pairs.

A question shows two responses in random order, so that a preference for the first place favors no side. Its file is
CSV, JSON Lines (also the records that Argilla logs), or tasks of Label Studio. Answers are read from all of these, and
from the exports of Argilla (`records.to_list(flatten=True)`) and Label Studio (JSON).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, digest, prompt_json
from rm_optimizer.core.pairs.winner import cells_in
from rm_optimizer.core.rows.columns import cell
from rm_optimizer.core.rows.messages import has_messages, parsed, read_messages, response_json, response_of
from rm_optimizer.core.rows.prompts import as_messages, read_prompt
from rm_optimizer.core.rows.readers import read_rows, refusing, row_unit
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.files import unquoted_formula, write_csv, write_json_lines, write_text
from rm_optimizer.records.ledger import read_ledger
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.composition import described

_log = logging.getLogger("rm_optimizer")

SUFFIXES = (".csv", ".jsonl", ".json")
"""Suffixes of files of questions: CSV, JSON Lines, and tasks of Label Studio."""
_WORDS = {"a": 1.0, "b": 0.0, "tie": 0.5, "left": 1.0, "right": 0.0, "skip": None, "": None}
_ANSWER = "label"
_TEXTS = ("prompt", "response_a", "response_b")
_EXPORTS: Mapping[str, Mapping[str, Any]] = described("layout/general/exports.yaml")
"""Exports of labeling tools, in the order in which they are tried."""
ANSWER_LOG_SUFFIX = ".labels.jsonl"
"""Suffix of the file of answers that the labeling page keeps next to a file of questions."""


@dataclass(frozen=True)
class Question:
    """Two responses to compare.

    Args:
        pair_id: identity of the prompt and both responses in either order; 16 hexadecimal digits.
        prompt: text or messages.
        response_a: response that is shown first.
        response_b: the other one.
        rank: rank in the rule's choice, from 1.
    """

    pair_id: str
    prompt: Prompt
    response_a: str
    response_b: str
    rank: int

    def row(self) -> dict[str, str | int]:
        """Cells of the question; messages are JSON text."""
        prompt = self.prompt
        if not isinstance(prompt, str):
            prompt = json.dumps(prompt_json(prompt), ensure_ascii=False)
        sides = {"response_a": str(self.response_a), "response_b": str(self.response_b)}
        return {"pair_id": self.pair_id, "rank": self.rank, "prompt": prompt, **sides, _ANSWER: ""}


@dataclass(frozen=True)
class Answers:
    """Training pairs of answered questions.

    Args:
        pairs: one pair for each question, whose label is the mean of the question's answers.
        num_answers: number of answers for a side or a tie.
        num_skipped: number of questions that all annotators skipped.
        num_open: number of questions without an answer.
        num_repeated: number of further answers to a question that agree with the first.
        num_contradicted: number of questions with different answers.
    """

    pairs: tuple[PreferencePair, ...]
    num_answers: int
    num_skipped: int
    num_open: int
    num_repeated: int
    num_contradicted: int


def question_id(prompt: Prompt, responses: Iterable[str]) -> str:
    """Identity of a question, the same for either order of the responses."""
    return digest([prompt_json(as_messages(prompt)), list(map(response_json, sorted(responses)))])


def asked_once(pairs: Iterable[PreferencePair]) -> dict[str, PreferencePair]:
    """Pairs by the identity of their question.

    The first one is kept of pairs that repeat one another, in either order.
    """
    found: dict[str, PreferencePair] = {}
    for pair in pairs:
        found.setdefault(question_id(pair.prompt, (pair.chosen, pair.rejected)), pair)
    return found


def questions_of(pairs: Sequence[PreferencePair], positions: NDArray[np.int64], *, seed: int) -> list[Question]:
    """Questions of the pairs at these positions, in this order, each with its responses in random order."""
    turned = np.random.default_rng([seed, len(pairs), 1]).random(len(positions)) < 0.5
    found = []
    for rank, (position, is_turned) in enumerate(zip(positions.tolist(), turned.tolist(), strict=True), start=1):
        pair = pairs[position]
        sides = (pair.rejected, pair.chosen) if is_turned else (pair.chosen, pair.rejected)
        found.append(Question(question_id(pair.prompt, sides), pair.prompt, *sides, rank))
    return found


def require_question_file(path: Path, option: str) -> None:
    """Require a valid name for a file of questions.

    Args:
        path: the file.
        option: option or column with the name, for error messages.

    Raises:
        ConfigError: if the suffix is not among `SUFFIXES`, or marks the labeling page's answers.
    """
    if path.name.endswith(ANSWER_LOG_SUFFIX):
        raise ConfigError(f"{option} must not end in {ANSWER_LOG_SUFFIX}, where rm-opt label keeps answers")
    require(path.suffix in SUFFIXES, option, f"end in {', '.join(SUFFIXES)}", f"'{path.name}'")


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """Write a file of questions in the format of its suffix, completely or not at all.

    Raises:
        ConfigError: if the name is not valid for a file of questions.
    """
    require_question_file(path, "path")
    rows = [question.row() for question in questions]
    if path.suffix == ".csv":
        write_csv(path, rows)
    elif path.suffix == ".jsonl":
        write_json_lines(path, [{"id": row["pair_id"], **row} for row in rows])
    else:
        write_text(path, json.dumps([{"data": row} for row in rows], ensure_ascii=False, indent=1))


def read_answers(path: Path) -> Answers:
    """Training pairs from a file of answered questions and from the labeling page's answers.

    An answer is `A`, `B`, `tie`, `skip` (or nothing), or the probability that response A is better.

    Raises:
        DataError: if the file cannot be read, an answer is something else, a question's texts were changed, or the
            answers of the page belong to other questions.
    """
    if path.name.endswith(ANSWER_LOG_SUFFIX):
        return merged_answers(_logged(path))
    read, log = read_questions(path), path.with_suffix(ANSWER_LOG_SUFFIX)
    logged = _logged(log) if log.exists() else []
    ids = {question.pair_id for question, _ in read}
    if any(question.pair_id not in ids for question, _ in logged):
        raise DataError(f"{log}: holds answers to questions that {path.name} does not ask; move it away")
    return merged_answers([*read, *logged])


def read_questions(path: Path) -> list[tuple[Question, list[float | None]]]:
    """Questions of a file, each with the probabilities of response A in the file's answers.

    A skip is None.

    Raises:
        DataError: if the file cannot be read, an answer is not valid, or a question's texts were changed.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, row in read_rows(path, refusing(path)):
        cells = row["data"] if isinstance(row.get("data"), Mapping) else row
        answers = exported_answers(row, f"{path}, {row_unit(path)} {number}")
        rows.append((number, {**cells} if answers is None else {**cells, _ANSWER: answers}))
    if not rows:
        raise DataError(f"{path}: there are no questions")
    if {str(one).strip() for _, row in rows for one in _given(row)} in ({"0", "1"}, {"0"}, {"1"}):
        _log.warning(
            f"{path}: every label is 0 or 1, which is read as the probability of A: 1 is A, 0 is B. If they mean "
            "something else, write A and B"
        )
    found = [_answered(row, f"{path}, {row_unit(path)} {number}") for number, row in rows]
    texts = [row[name] for _, row in rows if row.get("pair_id") in (None, "") for name in _TEXTS]
    if spelled := sum(isinstance(text, str) and has_messages(parsed(text)) for text in texts):
        told = "spell messages and are read as messages, since no pair_id tells; keep that column of rm-opt select"
        _log.warning(f"{path}: {spelled} of {len(texts)} texts {told}")
    return found


def standing_rows(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Last row of each question by its id, in the order of answering, without withdrawn answers."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.pop(row["pair_id"], None)
        if row[_ANSWER] is not None:
            found[row["pair_id"]] = row
    return found


def _logged(path: Path) -> list[tuple[Question, list[float | None]]]:
    """Questions and answers of the labeling page's file.

    A line cut by a kill was never confirmed.
    """
    rows = [*read_ledger(path)]
    if not all(isinstance(row, dict) and {"pair_id", _ANSWER} <= row.keys() for row in rows):
        raise DataError(f"{path}: expected the answers that rm-opt label keeps; name the file of questions instead")
    return [_answered(row, f"{path}, question {row['pair_id']}") for row in standing_rows(rows).values()]


def merged_answers(answered: Iterable[tuple[Question, Sequence[float | None]]]) -> Answers:
    """Training pairs from questions with the probabilities of response A in their answers.

    A skip is None.
    """
    found: dict[str, list[float]] = {}
    texts: dict[str, tuple[Prompt, str, str]] = {}
    seen: set[str] = set()
    for question, chances in answered:
        first = texts.setdefault(question.pair_id, (question.prompt, question.response_a, question.response_b))
        is_turned = first[1] != question.response_a
        given = [chance for chance in chances if chance is not None]
        found.setdefault(question.pair_id, []).extend(1 - chance if is_turned else chance for chance in given)
        seen |= {question.pair_id} if chances else set()
    decided = {key: chances for key, chances in found.items() if chances}
    pairs = []
    for key, chances in decided.items():
        prompt, *sides = texts[key]
        chance, metadata = fmean(chances), {"id": key, "num_answers": len(chances)}
        better, worse = sides if chance >= 0.5 else sides[::-1]
        pairs.append(PreferencePair(prompt, better, worse, label=max(chance, 1 - chance), metadata=metadata))
    return Answers(
        tuple(pairs),
        num_answers=sum(map(len, decided.values())),
        num_skipped=len(seen) - len(decided),
        num_open=len(found) - len(seen),
        num_repeated=sum(len(chances) - 1 for chances in decided.values() if len(set(chances)) == 1),
        num_contradicted=sum(len(set(chances)) > 1 for chances in decided.values()),
    )


def _answered(row: Mapping[str, Any], where: str) -> tuple[Question, list[float | None]]:
    """The question of a row, and the probabilities of response A in its answers.

    A skip is None.
    """
    missing = [name for name in _TEXTS if not row.get(name)]
    if missing:
        raise DataError(f"{where}: expected the columns of rm-opt select, but {missing[0]} is missing")
    # Texts of JSON and older files have no apostrophe to remove. The identity shows if texts spell messages. Without
    # one, such texts are messages, as Question.row writes these.
    given = row.get("pair_id")
    readers = ((_prompt,), (_response,)) if given in (None, "") else ((read_prompt, _prompt), (str, _response))
    forms = (lambda cell: cell, unquoted_formula), *readers
    for read, of_prompt, of_text in itertools.product(*forms):
        prompt = of_prompt(read(row["prompt"]))
        sides = (of_text(read(str(row["response_a"]))), of_text(read(str(row["response_b"]))))
        key = question_id(prompt, sides)
        try:  # a spreadsheet rounds an identity of digits to a number: 3.45063E+15
            is_own = given in (None, "", key) or math.isclose(float(str(given)), float(key), rel_tol=1e-4)
        except ValueError:
            is_own = False
        if is_own:
            return Question(key, prompt, *sides, 0), [answered_chance(one, where) for one in _given(row)]
    raise DataError(f"{where}: pair_id does not belong to its texts; leave prompt and responses as they were asked")


def _prompt(cell: Any) -> Prompt:
    """The prompt of the messages that the text of a cell spells, or the cell itself."""
    with suppress(ValueError):
        return read_messages("prompt", parsed(cell))
    return read_prompt(cell)


def _response(text: str) -> str:
    """The response of the messages that the text spells, or the text itself."""
    with suppress(ValueError):
        return response_of(read_messages("response", parsed(text)))
    return text


def _given(row: Mapping[str, Any]) -> list[Any]:
    """The row's answers as they are written."""
    answers = row.get(_ANSWER)
    given = answers if isinstance(answers, list) else [answers]
    return [one for one in given if one is not None and str(one).strip()]


def answered_chance(answer: object, where: str) -> float | None:
    """Probability of response A in an answer.

    It is None for a skip or no answer.

    Args:
        answer: A, B, tie, skip, nothing, or the probability itself.
        where: position of the answer, for error messages.

    Raises:
        DataError: if it is something else.
    """
    word = "" if answer is None else str(answer).strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        chance = float(word)
    except ValueError:
        chance = math.nan
    if not 0 <= chance <= 1:
        raise DataError(f"{where}: label must be A, B, tie, skip or a probability of A in [0, 1], got '{answer}'")
    return chance


def exported_answers(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """Answers of an exported row as given, or `skip`.

    It is None if no tool has added answers.

    Args:
        row: cells of the row.
        where: position of the row, for error messages.

    Raises:
        DataError: if the format of the export cannot be read.
    """
    found = (each for each in _EXPORTS.values() if any(row.get(name) is not None for name in each["has"]))
    if (export := next(found, None)) is None:
        return None
    if "refused" in export:
        raise DataError(f"{where}: {export['refused']}")
    answers = [*zip(*(_listed(cell({**row}, path)) for path in export["answers"]), strict=True)]
    states = _listed(cell({**row}, export["states"])) or [None] * len(answers)
    if len(states) != len(answers):
        column = export["answers"][0]
        raise DataError(f"{where}: {column} has {len(answers)} answers and {len(states)} states; export it again")
    given = [each for each in zip(answers, states, strict=True) if each[1] not in export.get("drafts", [])]
    return [one for cells, state in given for one in (["skip"] if state in export["skipped"] else cells_in(cells))]


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]

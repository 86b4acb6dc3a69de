"""Active learning: ask for labels, train on the answers, and ask again.

A loop that was killed continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.tokens.dataset import PreferenceDataset, TrainVal
from rm_optimizer.data_efficiency.acquisition import RandomSampling
from rm_optimizer.data_efficiency.feature_rules import acquisition_function
from rm_optimizer.data_efficiency.pool import read_pool
from rm_optimizer.data_efficiency.questions import (
    Answers,
    Question,
    answered_chance,
    asked_once,
    merged_answers,
    questions_of,
)
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.files import writing
from rm_optimizer.records.ledger import Ledger, open_ledger
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.schema.config import Resume, TrainConfig
from rm_optimizer.training.folder.lock import run_lock
from rm_optimizer.training.folder.record import RunResult
from rm_optimizer.training.run import run_training

Answer = str | float | None
"""`A`, `B`, `tie`, `skip`, the probability that response A is better, or None for a missing answer."""
LEDGER_FILE = "questions.jsonl"
"""Questions and answers of an `ActiveLearner`, in its folder."""


@dataclass
class _State:
    """Questions and answers so far.

    Args:
        batches: pair ids of each `ask`, in the order of the questions.
        answers: probabilities of response A by pair id, None for a skip.
    """

    batches: list[list[str]] = field(default_factory=list)
    answers: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def open(self) -> list[str]:
        """Pair ids without an answer, in the order of asking."""
        return [key for batch in self.batches for key in batch if key not in self.answers]

    def keep(self, chances: Mapping[str, float | None]) -> None:
        """Add answers."""
        for key, chance in chances.items():
            self.answers.setdefault(key, []).append(chance)


class ActiveLearner:
    """Questions about a pool of unlabeled pairs and their answers, kept in a folder.

    All questions and answers are on disk when `ask` and `tell` return. Only one process at a time may use the folder.

    Args:
        folder: folder of the state.
        pool: unlabeled pairs; their labels are not read, and a pair that repeats another, in either order, is asked
            once.
        rule: name of the acquisition function; without a model `ask` draws at random if the rule reads one.
        seed: seed of draws, ties and the order of responses.

    Raises:
        DataError: if the pool is empty.
        ConfigError: if there is no such rule.
    """

    def __init__(
        self, folder: Path | str, pool: Sequence[PreferencePair], *, rule: str = "boundary_optimal", seed: int = 0
    ) -> None:
        self._folder, self._seed = Path(folder), seed
        if not pool:
            raise DataError("a pool needs at least one pair, got none")
        self._pool = PreferenceDataset([*asked_once(pool).values()])
        self.num_pairs = len(self._pool)
        self._rule = acquisition_function(rule)
        questions = questions_of(self._pool, np.arange(len(self._pool)), seed=seed)
        self._questions = {question.pair_id: question for question in questions}
        self._places = {question.pair_id: place for place, question in enumerate(questions)}
        self._identity = digest([sorted(self._questions), rule, seed])

    def ask(self, k: int, model: BradleyTerryRM | RewardModelEnsemble | None = None) -> list[Question]:
        """Questions to answer next: the open ones of earlier calls, or `k` new ones.

        Args:
            k: number of new questions, positive; fewer if the pool has fewer pairs left.
            model: the model to improve by the labels; None draws at random.

        Raises:
            ConfigError: if `k` is not positive.
            DataError: if another process uses the folder, or it belongs to another pool or rule.
        """
        if k < 1:
            raise ConfigError(f"k must be positive, got {k}")
        with self._state() as (state, ledger):
            if not state.open and (chosen := self._chosen(state, k, model)):
                ledger.append({"asked": chosen})
                state.batches.append(chosen)
            return self._open(state)

    def open(self) -> list[Question]:
        """Questions without an answer."""
        with self._state() as (state, _):
            return self._open(state)

    def tell(self, labels: Mapping[str, Answer]) -> Answers:
        """Save answers, keyed by the questions' `pair_id`, and return all training pairs so far.

        The label of a question is the mean of its answers. A skipped question counts as answered.

        Raises:
            DataError: if an id belongs to no asked question, or an answer cannot be read; then no answer is saved.
        """
        with self._state() as (state, ledger):
            asked = {key for batch in state.batches for key in batch}
            if unknown := [key for key in labels if key not in asked]:
                raise DataError(f"'{unknown[0]}' is no question that was asked; tell answers by Question.pair_id")
            chances = {key: answered_chance(answer, f"question {key}") for key, answer in labels.items()}
            ledger.append({"told": chances})
            state.keep(chances)
            return self._answers(state)

    def answers(self, num_batches: int | None = None) -> Answers:
        """Training pairs of the answers so far to the first `num_batches` calls of `ask`.

        None counts all calls.
        """
        with self._state() as (state, _):
            return self._answers(state, num_batches)

    @property
    def batch_sizes(self) -> list[int]:
        """Number of new questions of each call of `ask` that chose some."""
        with self._state() as (state, _):
            return [len(batch) for batch in state.batches]

    @contextmanager
    def _state(self) -> Iterator[tuple[_State, Ledger]]:
        other = "questions about another pool, or by another rule or seed"
        with open_ledger(
            self._folder / LEDGER_FILE, self._identity, other=other, remedy="name another folder"
        ) as ledger:
            state = _State()
            for entry in ledger.values():
                if "asked" in entry:
                    state.batches.append(entry["asked"])
                else:
                    state.keep(entry["told"])
            yield state, ledger

    def _chosen(self, state: _State, k: int, model: BradleyTerryRM | RewardModelEnsemble | None) -> list[str]:
        is_known = np.zeros(len(self._pool), dtype=bool)
        is_known[[self._places[key] for batch in state.batches for key in batch]] = True
        num = min(k, int((~is_known).sum()))
        if not num:
            return []
        rule = RandomSampling() if model is None and self._rule.reads_model else self._rule
        pool = read_pool(self._pool, model, is_labeled=is_known)
        ids = [*self._questions]
        return [ids[place] for place in rule.select(pool, num, seed=self._seed + len(state.batches)).tolist()]

    def _open(self, state: _State) -> list[Question]:
        return [replace(self._questions[key], rank=rank) for rank, key in enumerate(state.open, start=1)]

    def _answers(self, state: _State, num_batches: int | None = None) -> Answers:
        asked = [key for batch in state.batches[:num_batches] for key in batch]
        return merged_answers((self._questions[key], state.answers.get(key, [])) for key in asked)


@dataclass(frozen=True)
class LearningRound:
    """A round of active learning.

    Args:
        num_labels: number of training pairs from all rounds so far.
        result: result of the run that was trained on them.
    """

    num_labels: int
    result: RunResult


def run_active_loop(
    pool: Sequence[PreferencePair],
    label_fn: Callable[[Sequence[Question]], Mapping[str, Answer]],
    n_rounds: int,
    *,
    config: TrainConfig,
    val: PreferenceDataset,
    k: int = 64,
    rule: str = "boundary_optimal",
    warm: bool = False,
    budget: int | None = None,
    patience: int | None = None,
) -> list[LearningRound]:
    """Ask, train on all answers, and choose the next questions by the trained model.

    Repeat a stopped call to continue.

    `config.output_dir` holds the questions and answers, and one run folder for each round in `rounds/`.

    Args:
        pool: unlabeled pairs.
        label_fn: function that returns answers to questions by `pair_id`; questions without one count as skipped. It is
            called once for each batch, and again if a kill interrupted the call.
        n_rounds: largest number of rounds.
        config: options of the runs.
        val: labeled validation pairs of every round.
        k: number of questions in each round.
        rule: acquisition function.
        warm: True starts each round from the weights of the round before; False trains the base model again.
        budget: number of labels after which the loop ends; None has no limit.
        patience: number of rounds without a lower validation NLL after which the loop ends; None has no limit.

    Returns:
        The rounds, first to last; fewer than `n_rounds` if the pool, the budget or the patience is used up before.

    Raises:
        ConfigError: if an option is out of range, the rule compares several models, or a loop of other options is or
            runs in the folder.
        DataError: if `label_fn` gives no mapping of answers, or no question was answered by the end of a round; the
            same call then asks that round's questions again.
    """
    if n_rounds < 1 or (budget is not None and budget < 1) or (patience is not None and patience < 1):
        raise ConfigError(f"n_rounds, budget and patience must be positive, got {n_rounds}, {budget} and {patience}")
    folder = Path(config.output_dir)
    learner = ActiveLearner(folder, pool, rule=rule, seed=config.seed)
    if acquisition_function(rule).compares_members:
        raise ConfigError(f"rule '{rule}' compares models, and a round trains one; take 'boundary_optimal'")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    rounds: list[LearningRound] = []
    with run_lock(folder):
        while len(rounds) < n_rounds and not _is_over(rounds, budget, patience):
            left = k if budget is None else min(k, budget - (rounds[-1].num_labels if rounds else 0))
            sizes = learner.batch_sizes
            if len(sizes) == len(rounds):
                model = BradleyTerryRM.from_pretrained(rounds[-1].result.export) if rounds else None
                if not learner.ask(left, model):
                    break
            elif sizes[len(rounds)] != (size := min(left, learner.num_pairs - sum(sizes[: len(rounds)]))):
                raise ConfigError(
                    f"round {len(rounds) + 1} of the loop in {folder} asked {sizes[len(rounds)]} questions, and with "
                    f"k={k} and budget={budget} it would ask {size}; give the k and budget of then, or another folder"
                )
            pairs = _answered(learner, label_fn, len(rounds) + 1)
            own = replace(config, output_dir=str(folder / "rounds" / f"{len(rounds):03d}"), resume=Resume.auto)
            if warm and rounds:
                start = replace(own.model, path=rounds[-1].result.export, revision=None, architecture={})
                own = replace(own, model=start)
            data = TrainVal(PreferenceDataset(pairs), val, "pairs of the caller")
            result = run_training(own, data=data)
            rounds.append(LearningRound(len(pairs), result))
    return rounds


def _answered(
    learner: ActiveLearner, label_fn: Callable[[Sequence[Question]], Mapping[str, Answer]], num_batches: int
) -> tuple[PreferencePair, ...]:
    """Training pairs of the first `num_batches` batches, after `label_fn` has answered the open questions."""
    questions, pairs = learner.open(), learner.answers(num_batches).pairs
    if questions:
        given = label_fn(questions)
        if not isinstance(given, Mapping):
            raise DataError(f"label_fn must return a mapping of pair_id to an answer, got {type(given).__name__}")
        if not pairs and all(answered_chance(answer, f"question {key}") is None for key, answer in given.items()):
            raise DataError(
                f"label_fn answered none of {len(questions)} questions, so there is nothing to train on; the same call "
                "asks them again"
            )
        learner.tell({question.pair_id: None for question in questions} | dict(given))
        pairs = learner.answers(num_batches).pairs
    if not pairs:
        raise DataError("every question so far was skipped, so there is nothing to train on; ask in another folder")
    return pairs


def _is_over(rounds: Sequence[LearningRound], budget: int | None, patience: int | None) -> bool:
    if rounds and budget is not None and rounds[-1].num_labels >= budget:
        return True
    losses = [found.result.metrics.nll.value for found in rounds]
    return patience is not None and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])

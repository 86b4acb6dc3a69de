"""Active learning: ask for labels, train on the answers, and ask again.

A loop that was killed continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.rows.natural import table_rows
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.data_efficiency.acquisition import AcquisitionFunction as AcquisitionFunction
from rm_optimizer.data_efficiency.acquisition import RandomSampling
from rm_optimizer.data_efficiency.acquisition import UncertaintySampling as UncertaintySampling
from rm_optimizer.data_efficiency.feature_rules import acquisition_function
from rm_optimizer.data_efficiency.pool import read_pool, unlabeled_pairs
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
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.config import Resume, TrainConfig
from rm_optimizer.training.folder.lock import run_lock
from rm_optimizer.training.folder.record import RunResult
from rm_optimizer.training.run import run_training

Answer = str | float | None
"""`A`, `B`, `tie`, `skip`, the probability that response A is better, or None for a missing answer."""
LEDGER_FILE = "questions.jsonl"
"""Questions and answers of an `ActiveLearner`, in its folder."""


LabelFunction: TypeAlias = Callable[[Sequence[Question]], Mapping[str, Answer] | Iterable[Answer]]
"""Function that answers questions: a list in their order, or a mapping by `pair_id`."""
DEFAULT_RULE = "boundary_optimal"


@dataclass(frozen=True)
class LearningRound:
    """A round of active learning.

    Args:
        num_labels: number of training pairs from all rounds so far.
        result: result of the run that was trained on them; None if nothing is trained.
    """

    num_labels: int
    result: RunResult | None


class _State:
    """Questions and answers so far.

    Args:
        log: earlier entries, to which new ones are added: pair ids of each `ask` in the order of the questions, and
            answers of each `tell`, which are probabilities of response A, or None for a skip.
    """

    def __init__(self, log: Ledger | list[Any]) -> None:
        self._log = log
        self.batches: list[list[str]] = []
        self.answers: dict[str, list[float | None]] = {}
        for entry in log if isinstance(log, list) else log.values():
            self._add(entry)

    @property
    def open(self) -> list[str]:
        """Pair ids without an answer, in the order of asking."""
        return [key for batch in self.batches for key in batch if key not in self.answers]

    def save(self, entry: dict[str, Any]) -> None:
        """Add an entry, which is on disk afterwards if the learner has a folder."""
        self._log.append(entry)
        self._add(entry)

    def _add(self, entry: Mapping[str, Any]) -> None:
        self.batches += [entry["asked"]] if "asked" in entry else []
        for key, chance in entry.get("told", {}).items():
            self.answers.setdefault(key, []).append(chance)


class ActiveLearner:
    """Choice of pairs to label: at once, by questions and answers, or in rounds of training.

    With a folder, all questions and answers are on disk when `ask` and `tell` return. Only one process at a time may
    use the folder.

    Args:
        model_or_ensemble: model to improve by the labels; None draws at random if the rule reads a model.
        acquisition_fn: rule that chooses, or its name; None is `uncertainty` with an ensemble, else `boundary_optimal`.
        folder: folder of questions and answers; None keeps them in memory.
        pool: unlabeled pairs to ask about; their labels are not read, and a pair that repeats another, in either order,
            is asked once.
        seed: seed of draws, ties and the order of responses.

    Attributes:
        labeled_data: training pairs of the last `run_active_loop` so far.

    Raises:
        DataError: if the pool is empty.
        ConfigError: if there is no such rule.
    """

    def __init__(
        self,
        model_or_ensemble: BradleyTerryRM | RewardModelEnsemble | None = None,
        acquisition_fn: AcquisitionFunction | str | None = None,
        *,
        folder: str | PathLike[str] | None = None,
        pool: object = None,
        seed: int = 0,
    ) -> None:
        is_ensemble = isinstance(model_or_ensemble, RewardModelEnsemble)
        if model_or_ensemble is not None and not is_ensemble:
            require_bradley_terry(model_or_ensemble)
        rule = acquisition_fn or ("uncertainty" if is_ensemble else DEFAULT_RULE)
        self.model, self.labeled_data = model_or_ensemble, list[PreferencePair]()
        self.acquisition = acquisition_function(rule) if isinstance(rule, str) else rule
        self._folder, self._seed = None if folder is None else Path(folder), seed
        self._kept: list[Any] = []
        asked = {} if pool is None else asked_once(unlabeled_pairs(pool))
        if pool is not None and not asked:
            raise DataError("a pool needs at least one pair, got none")
        self._pool = PreferenceDataset([*asked.values()])
        self.num_pairs = len(self._pool)
        questions = questions_of(self._pool, np.arange(len(self._pool)), seed=seed)
        self._questions = {question.pair_id: question for question in questions}
        self._identity = digest([sorted(self._questions), self.acquisition.name, seed])

    def select(self, pool: object, k: int = 100) -> list[Any]:
        """The `k` most informative pairs of a pool, best first, as they were given; all of a smaller pool.

        Args:
            pool: unlabeled pairs, questions, or rows with `prompt`, `response_a` and `response_b`.
            k: number of pairs to choose, positive.

        Raises:
            ConfigError: if `k` is not positive, or the model is not one that the rule can read.
            DataError: if there are no pairs.
        """
        rows = table_rows("pool", pool)
        read = read_pool(unlabeled_pairs(rows), self.model)
        return [rows[place] for place in self._rule(self.model).select(read, min(k, len(rows)), seed=self._seed)]

    def ask(self, k: int, model: BradleyTerryRM | RewardModelEnsemble | None = None) -> list[Question]:
        """Questions to answer next: the open ones of earlier calls, or `k` new ones.

        Args:
            k: number of new questions, positive; fewer if the pool has fewer pairs left.
            model: the model to improve by the labels; None takes the learner's.

        Raises:
            ConfigError: if `k` is not positive, or the learner has no pool.
            DataError: if another process uses the folder, or it belongs to another pool or rule.
        """
        require(k >= 1, "k", "be positive", k)
        if not self._questions:
            raise ConfigError("ask needs unlabeled pairs; give ActiveLearner(pool=PAIRS), or call select(PAIRS, k)")
        with self._state() as state:
            known = {key for batch in state.batches for key in batch}
            is_known = np.array([key in known for key in self._questions], dtype=bool)
            if not state.open and (num := min(k, int((~is_known).sum()))):
                model = model or self.model
                pool, seed = read_pool(self._pool, model, is_labeled=is_known), self._seed + len(state.batches)
                chosen = self._rule(model).select(pool, num, seed=seed).tolist()
                ids = [*self._questions]
                state.save({"asked": [ids[place] for place in chosen]})
            return self._open(state)

    def _rule(self, model: object) -> AcquisitionFunction:
        return RandomSampling() if model is None and self.acquisition.reads_model else self.acquisition

    def open(self) -> list[Question]:
        """Questions without an answer."""
        with self._state() as state:
            return self._open(state)

    def tell(self, labels: Mapping[str, Answer]) -> Answers:
        """Save answers, keyed by the questions' `pair_id`, and return all training pairs so far.

        The label of a question is the mean of its answers. A skipped question counts as answered.

        Raises:
            DataError: if an id belongs to no asked question, or an answer cannot be read; then no answer is saved.
        """
        with self._state() as state:
            asked = {key for batch in state.batches for key in batch}
            if unknown := [key for key in labels if key not in asked]:
                raise DataError(f"'{unknown[0]}' is no question that was asked; tell answers by Question.pair_id")
            chances = {key: answered_chance(answer, f"question {key}") for key, answer in labels.items()}
            state.save({"told": chances})
            return self._answers(state)

    def answers(self, num_batches: int | None = None) -> Answers:
        """Training pairs of the answers so far to the first `num_batches` calls of `ask`.

        None counts all calls.
        """
        with self._state() as state:
            return self._answers(state, num_batches)

    @property
    def batch_sizes(self) -> list[int]:
        """Number of new questions of each call of `ask` that chose some."""
        with self._state() as state:
            return [len(batch) for batch in state.batches]

    @contextmanager
    def _state(self) -> Iterator[_State]:
        """Questions and answers so far."""
        if self._folder is None:
            yield _State(self._kept)
            return
        other, remedy = "questions about another pool, or by another rule or seed", "name another folder"
        with open_ledger(self._folder / LEDGER_FILE, self._identity, other=other, remedy=remedy) as ledger:
            yield _State(ledger)

    def _open(self, state: _State) -> list[Question]:
        return [replace(self._questions[key], rank=rank) for rank, key in enumerate(state.open, start=1)]

    def _answers(self, state: _State, num_batches: int | None = None) -> Answers:
        asked = [key for batch in state.batches[:num_batches] for key in batch]
        return merged_answers((self._questions[key], state.answers.get(key, [])) for key in asked)

    def run_active_loop(
        self,
        pool: object,
        label_fn: LabelFunction,
        n_rounds: int = 10,
        *,
        k: int = 100,
        config: TrainConfig | None = None,
        val: object = None,
        warm: bool = False,
        budget: int | None = None,
        patience: int | None = None,
    ) -> list[LearningRound]:
        """Ask, train on all answers, and choose the next questions by the trained model.

        Without `config` nothing is trained, and the learner's model chooses in every round. With it, the folder
        (`config.output_dir` if the learner has none) holds questions, answers and a run folder for each round in
        `rounds/`. Repeat a stopped call to continue.

        Args:
            pool: unlabeled pairs.
            label_fn: function that returns answers to questions, as a list in their order or by `pair_id`; questions
                without one count as skipped. It is called once for each batch, and again if a kill interrupted the
                call.
            n_rounds: largest number of rounds.
            k: number of questions in each round.
            config: options of the runs; None trains nothing.
            val: labeled validation pairs of every round.
            warm: True starts each round from the weights of the round before; False trains the base model again.
            budget: number of labels after which the loop ends; None has no limit.
            patience: number of rounds without a lower validation NLL after which the loop ends; None has no limit.

        Returns:
            The rounds, first to last; fewer than `n_rounds` if the pool, the budget or the patience is used up before.

        Raises:
            ConfigError: if an option is out of range, the rule compares several models, or a loop of other options is
                or runs in the folder.
            DataError: if `label_fn` gives no answers, or no question was answered by the end of a round; the same call
                then asks that round's questions again.
        """
        for name, number in (("n_rounds", n_rounds), ("budget", budget), ("patience", patience)):
            require(number is None or number >= 1, name, "be positive", number)
        if (config is None) != (val is None) or (config is None and (warm or patience is not None)):
            raise ConfigError(
                "config, the options of the runs, and val, their validation pairs, go together; warm and "
                "patience need both"
            )
        if config is not None and self.acquisition.compares_members:
            rule = self.acquisition.name
            raise ConfigError(f"rule '{rule}' compares models, and a round trains one; take '{DEFAULT_RULE}'")
        folder = Path(config.output_dir) if self._folder is None and config is not None else self._folder
        learner = ActiveLearner(self.model, self.acquisition, folder=folder, pool=pool, seed=self._seed)
        held_out, rounds = PreferenceDataset([] if val is None else val), list[LearningRound]()
        with ExitStack() as stack:
            if folder is not None:
                with writing(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(run_lock(folder))
            while len(rounds) < n_rounds:
                num_labels = rounds[-1].num_labels if rounds else 0
                losses = [each.result.metrics.nll.value for each in rounds if each.result is not None]
                if (budget is not None and num_labels >= budget) or (
                    patience is not None
                    and len(losses) > patience
                    and min(losses[-patience:]) >= min(losses[:-patience])
                ):
                    break
                left = k if budget is None else min(k, budget - num_labels)
                last = rounds[-1].result if rounds else None
                sizes = learner.batch_sizes
                if len(sizes) == len(rounds):
                    if not learner.ask(left, None if last is None else BradleyTerryRM.from_pretrained(last.export)):
                        break
                elif sizes[len(rounds)] != (size := min(left, learner.num_pairs - sum(sizes[: len(rounds)]))):
                    raise ConfigError(
                        f"round {len(rounds) + 1} of the loop in {folder} asked {sizes[len(rounds)]} questions, and "
                        f"with k={k} and budget={budget} it would ask {size}; give the k and budget of then, or "
                        "another folder"
                    )
                self.labeled_data = [*_answered(learner, label_fn, len(rounds) + 1)]
                result = None
                if config is not None and folder is not None:
                    output = str(folder / "rounds" / f"{len(rounds):03d}")
                    own = replace(config, output_dir=output, resume=Resume.auto)
                    if warm and last is not None:
                        start = replace(own.model, path=last.export, revision=None, architecture={})
                        own = replace(own, model=start)
                    pairs = TrainVal(PreferenceDataset(self.labeled_data), held_out, "pairs of the caller")
                    result = run_training(own, data=pairs)
                rounds.append(LearningRound(len(self.labeled_data), result))
        return rounds


def _answered(learner: ActiveLearner, label_fn: LabelFunction, num_batches: int) -> tuple[PreferencePair, ...]:
    """Training pairs of the first `num_batches` batches, after `label_fn` has answered the open questions."""
    questions, pairs = learner.open(), learner.answers(num_batches).pairs
    if questions:
        given: object = label_fn(questions)
        if isinstance(given, Iterable) and not isinstance(given, str | Mapping):
            if len(answers := [*given]) != len(questions):
                raise DataError(
                    f"label_fn must return an answer to each of {len(questions)} questions, got {len(answers)}"
                )
            words = [float(each) if isinstance(each, bool | np.bool_) else each for each in answers]
            given = {question.pair_id: word for question, word in zip(questions, words, strict=True)}
        if not isinstance(given, Mapping):
            raise DataError(
                "label_fn must return a list of answers or a mapping of pair_id to an answer, got "
                f"{type(given).__name__}"
            )
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

"""Acquisition functions: scores of unlabeled pairs, and batches of pairs to label."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.special import expit, xlogy

from rm_optimizer.core.metrics.estimate import finite_array
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.data_efficiency.pool import Pool, read_pool, unlabeled_pairs
from rm_optimizer.data_efficiency.questions import Question
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.schema.checks import require

Gains: TypeAlias = Callable[[], Float[np.ndarray, " pairs"]]
_log = logging.getLogger("rm_optimizer")


class AcquisitionFunction:
    """A rule that ranks unlabeled pairs by the value of their labels.

    A subclass defines `score(pairs, model_or_ensemble)` for pairs with `prompt`, `response_a` and `response_b`, or
    `scores(pool)`, which reads margins and features that are computed once.

    Attributes:
        name: name of the rule on the command line; the class's name if it is not given.
    """

    name: ClassVar[str]
    compares_members: ClassVar[bool] = False
    """True if the rule needs several models."""
    reads_model: ClassVar[bool] = True
    """False if the rule chooses without a model."""

    def __init_subclass__(cls) -> None:
        if cls.score is AcquisitionFunction.score and cls.scores is AcquisitionFunction.scores:
            raise TypeError(f"{cls.__name__} must define score(pairs, model_or_ensemble) or scores(pool)")
        cls.name = vars(cls).get("name", cls.__name__)

    def score(
        self, pairs: object, model_or_ensemble: BradleyTerryRM | RewardModelEnsemble | None
    ) -> Float[np.ndarray, " pairs"]:
        """Value of each pair's label alone, in the rule's own unit.

        Larger is better.

        Args:
            pairs: unlabeled pairs, or questions or rows with `prompt`, `response_a` and `response_b`.
            model_or_ensemble: the model to improve by the labels, or an ensemble.
        """
        return self.scores(read_pool(unlabeled_pairs(pairs), model_or_ensemble))

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Value of each pair's label alone, given the pool's labeled pairs."""
        asked = [Question(pair.pair_id, pair.prompt, pair.chosen, pair.rejected, 0) for pair in pool.pairs]
        return finite_array(self.score(asked, pool.model), f"scores of {self.name}", ["pair"])

    def select(self, pool: Pool, k: int, *, seed: int = 0) -> NDArray[np.int64]:
        """Positions of `k` unlabeled pairs to label together, best first.

        The seed breaks ties.

        Args:
            pool: the pairs.
            k: pairs to choose, positive.
            seed: seed of ties and of rules that draw.

        Raises:
            ConfigError: if the pool has fewer unlabeled pairs, or lacks data that the rule needs.
        """
        left = len(pool.unlabeled)
        require(1 <= k <= left, "k", f"lie in [1, {left}], the unlabeled pairs of the pool", k)
        return self._batch(pool, k, np.random.default_rng([seed, len(pool)]))

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        scores = self.scores(pool)[pool.unlabeled]
        if are_equal(scores):
            self._warn_of_chance()
        keys = self._keys(scores, generator)
        shuffled = generator.permutation(len(keys))  # so that ties are broken at random
        return pool.unlabeled[shuffled[np.argsort(-keys[shuffled], kind="stable")[:k]]]

    def _keys(self, scores: Float[np.ndarray, " pairs"], generator: np.random.Generator) -> Float[np.ndarray, " pairs"]:
        """Numbers by which the batch is chosen, largest first."""
        return scores

    def _greedy(
        self, pool: Pool, k: int, generator: np.random.Generator, gains: Gains, add: Callable[[int], None]
    ) -> NDArray[np.int64]:
        """Positions of `k` unlabeled pairs, each with the largest gain given the ones before it.

        Args:
            pool: the pairs.
            k: pairs to choose.
            generator: source of the order of equal gains.
            gains: function that returns the current gain of every pair in the pool.
            add: function called with each chosen position.
        """
        order = generator.permutation(len(pool))  # so that ties are broken at random
        is_taken, chosen = pool.is_labeled.copy(), []
        scales: list[float] = []  # scales of gains, as long as every choice was a tie
        for number in range(k):
            current = gains()
            if len(scales) == number and are_equal(current[~is_taken], max(scales, default=0.0)):
                scales.append(float(np.abs(current[~is_taken]).max()))
            best = int(order[np.argmax(np.where(is_taken, -np.inf, current)[order])])
            is_taken[best] = True
            chosen.append(best)
            add(best)
        if len(scales) == k:
            self._warn_of_chance()
        return np.array(chosen)

    def _warn_of_chance(self) -> None:
        _log.warning(f"rule '{self.name}' gives every pair the same score, so these pairs are a random draw")


def are_equal(scores: Float[np.ndarray, " pairs"], scale: float = 0.0) -> bool:
    """True for several pairs with equal scores, up to a millionth of the largest one or of `scale`."""
    return len(scores) > 1 and float(np.ptp(scores)) <= 1e-6 * max(scale, float(np.abs(scores).max()))


class RandomSampling(AcquisitionFunction):
    """Pairs at random, the baseline that every other rule must beat."""

    name = "random"
    reads_model = False

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Zero for every pair."""
        return np.zeros(len(pool))

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        return generator.permutation(pool.unlabeled)[:k]


class LengthStratified(RandomSampling):
    """Pairs at random, equally many from each tenth of the pool by the length difference of the responses."""

    name = "length_stratified"

    def _batch(self, pool: Pool, k: int, generator: np.random.Generator) -> NDArray[np.int64]:
        shuffled = generator.permutation(pool.unlabeled)
        by_length = shuffled[np.argsort(np.abs(pool.lengths[shuffled]), kind="stable")]
        strata = [generator.permutation(stratum) for stratum in np.array_split(by_length, 10)]
        rounds = [stratum[turn] for turn in range(len(strata[0])) for stratum in strata if turn < len(stratum)]
        return np.array(rounds[:k])


class MarginSampling(AcquisitionFunction):
    """Pairs whose mean margin is nearest to 0."""

    name = "margin"

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """``-|mean margin|``."""
        return np.asarray(-np.abs(pool.margins.mean(axis=0)))


class EntropySampling(AcquisitionFunction):
    """Pairs whose predicted preference is least certain.

    With one model the order is the same as by `margin`.
    """

    name = "entropy"

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Entropy of the members' mean probability, in nats."""
        return binary_entropy(expit(pool.margins).mean(axis=0))


class UncertaintySampling(AcquisitionFunction):
    """Pairs on whose margin the members of an ensemble disagree most.

    Adding a constant to all rewards of a member changes nothing. The rule tends to choose similar pairs, since they
    are similarly uncertain. `studies/labels.py` measures how many labels it saves.
    """

    name = "uncertainty"
    compares_members = True

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """Variance of the margin over members.

        Raises:
            ConfigError: if there is one member.
        """
        pool.require_members(self.name, "one model has no variance over members")
        return np.asarray(pool.margins.var(axis=0, ddof=1))


class LargeGap(AcquisitionFunction):
    """Pairs with the largest optimistic margin, like DeltaUCB (ActiveUltraFeedback, arXiv:2603.09692)."""

    name = "large_gap"

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """``|mean margin| + std``, with the standard deviation over members."""
        spread = pool.margins.std(axis=0, ddof=1) if len(pool.margins) > 1 else 0.0
        return np.asarray(np.abs(pool.margins.mean(axis=0)) + spread)


class BALD(AcquisitionFunction):
    """Pairs whose label is most informative about which member is right (Houlsby et al., 2011, arXiv:1112.5745)."""

    name = "bald"
    compares_members = True

    def scores(self, pool: Pool) -> Float[np.ndarray, " pairs"]:
        """``H(mean p) - mean H(p)`` over members, in nats.

        Raises:
            ConfigError: if there is one member.
        """
        pool.require_members(self.name, "one model agrees with itself")
        chances = expit(pool.margins)
        information = binary_entropy(chances.mean(axis=0)) - binary_entropy(chances).mean(axis=0)
        return np.asarray(np.maximum(information, 0.0))


class StochasticBALD(BALD):
    """Pairs drawn with probabilities proportional to the score of BALD.

    The pairs with the highest scores are often similar; a random draw avoids that. This is the "power" acquisition of
    Kirsch et al. (2023, arXiv:2106.12059) with the exponent 1.
    """

    name = "stochastic_bald"

    def _keys(self, scores: Float[np.ndarray, " pairs"], generator: np.random.Generator) -> Float[np.ndarray, " pairs"]:
        with np.errstate(divide="ignore"):
            logs = np.log(scores)
        keys = np.where(np.isneginf(logs), -1e300 * generator.random(len(logs)), logs)
        return keys + generator.gumbel(size=len(keys))


def binary_entropy(chance: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Entropy of a coin, in nats; 0 at 0 and 1.

    Example:
        >>> bool(binary_entropy(np.array([0.5]))[0] == np.log(2))
        True
    """
    return np.asarray(-xlogy(chance, chance) - xlogy(1 - chance, 1 - chance))

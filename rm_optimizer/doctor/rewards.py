"""Checks of a model's rewards on preference pairs: their spread, and features learned instead of preferences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import expit, log_expit
from scipy.stats import norm, spearmanr

from rm_optimizer.core.metrics.calibration import flipped_labels
from rm_optimizer.core.metrics.effects import detectable_effect
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import LEAST_PAIRS, PairwiseMetrics, evaluate_pairs
from rm_optimizer.core.metrics.separation import detect_collapse
from rm_optimizer.core.model.features import scored_features
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.audit import length_baseline
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor.diagnosis import Check, MeasuredValue, Status, judged, skipped
from rm_optimizer.doctor.probe_conversations import change_tolerance, padded_rewards, running

MOST_TIES = 0.01
"""Share of tied pairs above which there is a warning."""
LENGTH_CORRELATION = 0.5
"""Rank correlation of margin and length above which there is a warning."""
MOST_FLIPPED = 0.10
"""Share of flipped labels above which they count as the cause of a bad calibration."""
NUM_BOOTSTRAP = 1000
_SAME_RESPONSE = "It is so."
_MOST_PROMPTS = 32


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs with the model's rewards and hidden states.

    Args:
        pairs: the pairs, without those that are equal after truncation.
        rewards: rewards of both sides, `chosen` first.
        features: inputs of the head for both sides.
        num_scored: number of pairs of each data set.
        cut_pairs: pairs that are equal after truncation, which count as ties.
        beta: the model's inverse temperature.
    """

    pairs: tuple[PreferencePair, ...]
    rewards: Float[np.ndarray, "pairs 2"]
    features: Float[np.ndarray, "pairs 2 hidden"]
    num_scored: Mapping[str, int]
    cut_pairs: tuple[PreferencePair, ...] = ()
    beta: float = 1.0

    @property
    def margin(self) -> Float[np.ndarray, " pairs"]:
        """Reward of `chosen` minus reward of `rejected`."""
        return np.asarray(self.rewards[:, 0] - self.rewards[:, 1])

    def where(self, kept: Bool[np.ndarray, " pairs"]) -> ScoredPairs:
        """The scored pairs that are kept."""
        pairs = tuple(pair for pair, is_kept in zip(self.pairs, kept, strict=True) if is_kept)
        return replace(self, pairs=pairs, rewards=self.rewards[kept], features=self.features[kept])

    def decided(self) -> ScoredPairs:
        """The scored pairs with a better response."""
        return self.where(np.array([pair.label != 0.5 for pair in self.pairs], dtype=bool))

    def metrics(self, seed: int, *, length_sign: float) -> PairwiseMetrics:
        """Agreement of the rewards, and of length alone, with the labels, with intervals from resamples of prompts.

        Args:
            seed: seed of the resamples.
            length_sign: 1 for the baseline that chooses the longer response, -1 for the shorter one.
        """
        pairs = (*self.pairs, *self.cut_pairs)
        margin = np.concatenate([self.margin, np.zeros(len(self.cut_pairs))])
        gap = length_sign * np.array([float(len(pair.chosen) - len(pair.rejected)) for pair in pairs])
        weight = np.array([pair.weight for pair in pairs])
        return _agreement(pairs, self.beta * margin, seed, weight=weight, length_gap=gap)

    def accuracy(self, margin: Float[np.ndarray, " pairs"], seed: int) -> Estimate:
        """Agreement of margins with the labels, where a tie counts one half, with an interval over prompts."""
        return _agreement(self.pairs, margin, seed).accuracy


def _agreement(
    pairs: Sequence[PreferencePair],
    margin: Float[np.ndarray, " pairs"],
    seed: int,
    weight: Float[np.ndarray, " pairs"] | None = None,
    length_gap: Float[np.ndarray, " pairs"] | None = None,
) -> PairwiseMetrics:
    return evaluate_pairs(
        margin,
        np.zeros_like(margin),
        beta=1.0,
        label=np.array([pair.label for pair in pairs]),
        prompt_ids=[pair.prompt_id for pair in pairs],
        weight=weight,
        length_gap=length_gap,
        num_bootstrap=NUM_BOOTSTRAP,
        seed=seed,
    )


def score_sample(
    model: BradleyTerryRM, data: Mapping[str, PreferenceDataset], *, max_pairs: int, token_budget: int, seed: int
) -> ScoredPairs:
    """Rewards and hidden states of a random sample of at most `max_pairs` pairs, with equal shares of each data set.

    A pass has at most `token_budget` tokens, padding included.
    """
    share = max(1, max_pairs // len(data))
    samples = {name: dataset.subset(share, seed).pairs for name, dataset in data.items()}
    pairs = [pair for sample in samples.values() for pair in sample]
    ids = model.renderer.ids_of((pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected))
    sides = list(zip(ids[::2], ids[1::2], strict=True))
    sequences = [side for both in sides if both[0] != both[1] for side in both]
    features = np.zeros((len(sequences), model.reward_head.in_features))
    rewards = scored_features(model, sequences, features, token_budget=token_budget)
    return ScoredPairs(
        tuple(pair for pair, both in zip(pairs, sides, strict=True) if both[0] != both[1]),
        rewards.reshape(-1, 2),
        features.reshape(len(sequences) // 2, 2, features.shape[1]),
        {name: len(sample) for name, sample in samples.items()},
        tuple(pair for pair, both in zip(pairs, sides, strict=True) if both[0] == both[1]),
        model.beta,
    )


def reward_spread(rewards: Float[np.ndarray, "pairs 2"]) -> Check:
    """Rewards are finite and differ between responses."""
    chosen, rejected = rewards.T
    if not np.isfinite(rewards).all():
        num = int((~np.isfinite(rewards)).sum())
        reason = f"{num} of {rewards.size} rewards are not finite; train again with a lower learning rate or in float32"
        return Check("", Status.fail, None, "standard deviation", "more than 0", reason)
    nll = float(-log_expit(chosen - rejected).mean())
    collapse = detect_collapse(chosen, rejected, np.ones_like(chosen), nll)
    tie_rate = float((chosen == rejected).mean())
    status, explanation = Status.ok, "rewards differ between responses"
    if tie_rate > MOST_TIES:
        status = Status.warn
        explanation = f"{tie_rate:.1%} of the pairs have equal rewards; compute the head in float32"
    if collapse.collapsed:
        status = Status.fail
        explanation = f"{collapse.reason}; check the tokenizer and the head, then train again"
    details: dict[str, MeasuredValue] = {"mean": float(rewards.mean()), "tie_rate": tie_rate, "num_pairs": chosen.size}
    spread = float(rewards.std())
    return Check("reward_spread", status, spread, "standard deviation of reward", "more than 0", explanation, details)


def label_agreement(scored: ScoredPairs, seed: int) -> Check:
    """A trained model agrees with the labels more often than chance."""
    estimate = scored.metrics(seed, length_sign=1.0).accuracy
    low, high = interval_of(estimate)
    status, explanation = Status.ok, f"rewards agree with {estimate.value:.3f} of the labels"
    if not low > 0.5:
        status = Status.warn
        explanation = (
            f"agreement with the labels, {estimate.value:.3f}, is not shown to be above chance{_power(estimate)}; if "
            "label_signal is ok, train longer or on more pairs; on a set made to mislead, a better base helps instead"
        )
    if high < 0.5:
        status = Status.fail
        explanation = (
            f"rewards rank {1 - estimate.value:.1%} of the pairs against the labels; swap chosen and rejected, or train"
        )
    return Check("label_agreement", status, estimate.value, "accuracy", "above 0.5", explanation, _details(estimate))


def calibration(scored: ScoredPairs, seed: int) -> Check:
    """The probabilities of a trained model agree with its labels, up to a factor of two in temperature.

    It warns only if the calibration error, too, exceeds a calibrated model's beyond its interval. A model with
    flipped labels seems over-confident at any scale of its rewards, which `flipped_labels` tells apart.
    """
    metrics = scored.metrics(seed, length_sign=1.0)
    expected, scale = "between 0.5 and 2, or an error no larger than by chance", metrics.temperature.temperature
    if scale is None:
        return skipped(expected, metrics.temperature.reason or "")
    side = np.sign([pair.label - 0.5 for pair in scored.pairs])
    share, _ = flipped_labels(expit(side * scored.beta * scored.margin / scale)[side != 0])
    error, chance = metrics.ece.value, metrics.ece_noise_floor
    good = f"the calibration error on {metrics.num_pairs} pairs is {error:.3f}, of which {chance:.3f} are expected"
    cause = f"it fits labels of which {share:.0%} were flipped; check them (rm-opt data clean lists suspects)"
    if scale < 1 or share <= MOST_FLIPPED:
        kind, remedy = ("under", "train longer") if scale < 1 else ("over", "train for fewer steps")
        cause = (
            f"the model is {kind}-confident; divide its rewards by {scale:.3g} where their scale matters, or {remedy}"
        )
    is_good = 0.5 <= scale <= 2 or not interval_of(metrics.ece)[0] > chance
    details = {"ece": error, "ece_noise_floor": chance, "flipped_share": share}
    verdict = (is_good, scale, "temperature", expected, good, f"{good}: {cause}")
    return judged(*verdict, otherwise=Status.warn, details=details)


def label_groups(scored: ScoredPairs, seed: int) -> Check:
    """The model agrees above chance with the labels of each annotator, source or other value of the pairs' metadata.

    A value with `LEAST_PAIRS` pairs counts if its accuracy is below the other pairs' beyond a one-sided test at
    1 %, divided by the number of values (Bonferroni), and is not above chance.
    """
    expected = "above 0.5 for each value of the metadata"
    scored = scored.decided()
    values = {(name, str(value)) for pair in scored.pairs for name, value in pair.metadata.items()}
    found: list[tuple[float, str, Estimate, Estimate]] = []
    for name, value in sorted(values):
        inside = np.array([str(pair.metadata.get(name)) == value for pair in scored.pairs])
        if LEAST_PAIRS <= inside.sum() <= len(inside) - LEAST_PAIRS:
            own, others = (part.accuracy(part.margin, seed) for part in map(scored.where, (inside, ~inside)))
            errors = [math.inf if each.standard_error is None else each.standard_error for each in (own, others)]
            score = (others.value - own.value) / max(math.hypot(*errors), 1e-9)
            found.append((score, f"{name}={value}", own, others))
    if not found:
        return skipped(expected, f"no metadata divides the pairs into groups of {LEAST_PAIRS}")
    score, where, own, others = max(found)
    good = f"{where}: rewards agree with {own.value:.3f} of the labels, and elsewhere with {others.value:.3f}"
    is_good = score < norm.isf(0.01 / len(found)) or interval_of(own)[0] > 0.5
    bad = f"{good}; the labels of these {own.num_samples} prompts look random or reversed: check them"
    return judged(is_good, own.value, "accuracy", expected, good, bad, otherwise=Status.warn)


def beats_length(scored: ScoredPairs, seed: int) -> Check:
    """A trained model agrees with the labels more often than a rule that counts characters, on the same pairs.

    The rule chooses the longer response, or the shorter one if that is right more often. The interval is for the
    difference in accuracy, from resamples of prompts.
    """
    expected = "above 0, beyond its interval"
    longer = scored.metrics(seed, length_sign=1.0)
    is_longer = not longer.longer_wins.value < 0.5
    metrics = longer if is_longer else scored.metrics(seed, length_sign=-1.0)
    above, rule = metrics.over_length, f"the {'longer' if is_longer else 'shorter'} response wins"
    if above.low is None or above.high is None:
        return skipped(expected, "the pairs with a better response are of fewer than two prompts")
    compared = (
        f'rewards agree with {metrics.accuracy.value:.3f} of the labels, "{rule}" with {metrics.longer_wins.value:.3f}'
    )
    bad = (
        f"the model is {'worse' if above.high < 0 else 'no better'} than counting characters, as far as these pairs "
        f"can tell: {compared}{_power(above)}; compare on pairs of like length, or train on data where length does not "
        "decide"
    )
    details = {**_details(above), "accuracy": metrics.accuracy.value, "length_rule": metrics.longer_wins.value}
    verdict = (above.low > 0, above.value, "accuracy above length", expected, compared, bad)
    return judged(*verdict, otherwise=Status.warn, details=details)


def _power(estimate: Estimate) -> str:
    """Remark on the smallest difference that such samples show in four of five cases; empty without an error."""
    if not estimate.standard_error:
        return ""
    num = estimate.num_samples
    smallest = detectable_effect(estimate.standard_error, num - 1)
    return f" ({num} prompts find a difference of {smallest:.2f} in 4 of 5 cases; --max-pairs scores more)"


def reward_length(scored: ScoredPairs) -> Check:
    """Check of Spearman's rank correlation, over pairs, of the margin with the difference in length.

    Only differences within a pair count, since a prompt's own reward and length express no preference. The interval is
    Fisher's with the standard error `1.03 / sqrt(n - 3)` (Fieller, Hartley & Pearson, 1957,
    doi:10.1093/biomet/44.3-4.470).
    """
    expected = f"between -{LENGTH_CORRELATION:g} and {LENGTH_CORRELATION:g}, within its interval"
    length = np.array([len(pair.chosen) - len(pair.rejected) for pair in scored.pairs], dtype=np.float64)
    if len(length) < 10 or np.ptp(length) == 0 or np.ptp(scored.margin) == 0:
        return skipped(expected, "there are fewer than 10 pairs, or margins or lengths do not vary")
    rho = float(spearmanr(scored.margin, length).statistic)
    half = 1.96 * 1.03 / math.sqrt(len(length) - 3)
    low, high = (math.tanh(math.atanh(np.clip(rho, -0.999999, 0.999999)) + sign * half) for sign in (-1, 1))
    follows = low > LENGTH_CORRELATION or high < -LENGTH_CORRELATION
    good = f"margins correlate with length by {rho:.2f}"
    bad = f"{good}; the model ranks by length, so balance lengths in the data or penalize length"
    baseline = length_baseline(scored.pairs).value
    details = {"low": low, "high": high, "longer_wins": baseline, "num_pairs": len(length)}
    return judged(not follows, rho, "rank correlation", expected, good, bad, otherwise=Status.warn, details=details)


def prompt_only(model: BradleyTerryRM, scored: ScoredPairs) -> Check:
    """Check that equal responses get equal rewards, since a prompt alone does not decide which side is better."""
    pairs = scored.pairs[:_MOST_PROMPTS]
    sides = [[model.renderer.encode(pair.prompt, _SAME_RESPONSE).ids for _ in range(2)] for pair in pairs]
    with running(model, training=False):
        rewards = np.stack([padded_rewards(model, both).numpy() for both in sides])
    tolerance = change_tolerance(model) * float(scored.rewards.std())
    num_apart = int((~(np.abs(rewards[:, 0] - rewards[:, 1]) <= tolerance)).sum())
    good = f"given the prompt alone, none of {len(pairs)} pairs is told apart"
    bad = "the sides of a pair get different rewards for the same text; look for state in the rendering or the model"
    share, unit = num_apart / len(pairs), "share of pairs told apart"
    return judged(not num_apart, share, unit, "0", good, bad, details={"num_pairs": len(pairs)})


def interval_of(estimate: Estimate) -> tuple[float, float]:
    """The estimate's interval, or [0, 1] if there is only one prompt, which gives none."""
    return (0.0 if estimate.low is None else estimate.low), (1.0 if estimate.high is None else estimate.high)


def _details(estimate: Estimate) -> dict[str, MeasuredValue]:
    return {"low": estimate.low, "high": estimate.high, "num_prompts": estimate.num_samples}

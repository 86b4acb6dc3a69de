"""Features that readiness is judged by, as functions of arrays, and edits of style.

The validation on synthetic worlds and the measurement of a real model call these same functions. Intervals take pairs
and questions of one prompt as dependent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.calibration import TemperatureFit, fit_temperature, pair_scores
from rm_optimizer.core.metrics.estimate import Estimate, finite_array
from rm_optimizer.core.metrics.intervals import (
    cluster_bootstrap,
    cluster_totals,
    clustered_share,
    ratios,
    with_honest_width,
)
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import DataError
from rm_optimizer.schema.checks import require

WORST_SLICE_QUANTILE = 0.2
"""Quantile over slices that represents the worst ones, as in PPE (Frick et al., 2024, arXiv:2410.14872)."""
Clusters = Sequence[int] | Sequence[str] | np.ndarray
Margins = Float[np.ndarray, " pairs"]
"""Reward of `chosen` less the reward of `rejected`."""
Labels = Float[np.ndarray, " pairs"] | None
"""Probability that `chosen` is the better one; none is 1."""
Pool = Float[np.ndarray, "prompts samples"]
"""Numbers of equally many responses to each prompt."""


def pair_accuracy(margin: Margins, prompt: Clusters, label: Labels = None) -> Estimate:
    """Share of pairs whose better response has the higher reward, ties one half; pairs labeled 0.5 are left out.

    Args:
        margin: reward of `chosen` less the reward of `rejected`.
        prompt: prompt of each pair.
        label: probability that `chosen` is the better one; none is 1.
    """
    agreed, kept = agreement(margin, label)
    return clustered_share(agreed[kept], np.asarray(prompt)[kept])


def agreement(margin: Margins, label: Labels = None) -> tuple[np.ndarray, np.ndarray]:
    """Return 1, 0.5 or 0 for each pair that is ranked as labeled, tied or reversed, and which pairs are decided."""
    margin = finite_array(margin, "margins", ["pair"])
    side = np.ones_like(margin) if label is None else np.sign(np.asarray(label) - 0.5)
    return 0.5 + 0.5 * side * np.sign(margin), side != 0


def worst_slice_accuracy(
    margin: Margins,
    slices: Clusters,
    prompt: Clusters,
    label: Labels = None,
    *,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> Estimate:
    """20 % quantile over slices of the accuracy in each, the lower of two neighboring slices.

    Args:
        margin: reward of `chosen` less the reward of `rejected`.
        slices: slice of each pair, such as its source.
        prompt: prompt of each pair; prompts are resampled.
        label: probability that `chosen` is the better one; none is 1.
        num_bootstrap: resamples; 0 gives a jackknife error and no interval.
        seed: seed of the resamples.
    """
    agreed, kept = agreement(margin, label)
    place = np.unique(np.asarray(slices)[kept], return_inverse=True)[1]
    member = np.eye(int(place.max()) + 1)[place]
    sums = cluster_totals(
        np.concatenate([member * agreed[kept][:, None], member], axis=1), [*np.asarray(prompt)[kept].tolist()]
    )

    def low_quantile(totals: np.ndarray) -> np.ndarray:
        right, count = np.split(totals, 2, axis=-1)
        accuracy = np.where(count > 0, right / np.maximum(count, 1e-12), np.inf)
        return np.asarray(np.quantile(accuracy, WORST_SLICE_QUANTILE, axis=-1, method="inverted_cdf")[..., None])

    found = cluster_bootstrap(sums, low_quantile, num_bootstrap=num_bootstrap, seed=seed)[0]
    return with_honest_width(found, sums[:, member.shape[1] :].sum(axis=1), bounds=(0.0, 1.0))


def relative_to_ceiling(accuracy: Estimate, ceiling: float) -> Estimate:
    """Share of what lies between chance and the best possible accuracy: `(accuracy - 0.5) / (ceiling - 0.5)`.

    Args:
        accuracy: accuracy on labels with noise.
        ceiling: accuracy of the true preference on the same labels, in (0.5, 1].

    Raises:
        ConfigError: if the ceiling is out of range.

    Example:
        >>> relative_to_ceiling(Estimate(0.625, None, 100), 0.75).value
        0.5
    """
    require(0.5 < ceiling <= 1, "the ceiling of the accuracy", "lie in (0.5, 1]", f"{ceiling:g}")

    def scaled(value: float | None, shift: float = 0.5) -> float | None:
        return None if value is None else (value - shift) / (ceiling - 0.5)

    value = (accuracy.value - 0.5) / (ceiling - 0.5)
    error = scaled(accuracy.standard_error, 0.0)
    return replace(accuracy, value=value, standard_error=error, low=scaled(accuracy.low), high=scaled(accuracy.high))


@dataclass(frozen=True)
class TemperedScores:
    """Proper scores after calibration.

    Args:
        temperature: temperature that calibrates the rewards of all pairs, or the reason why it is missing.
        nll: mean negative log-likelihood in nats of each half of the prompts at the other half's temperature.
        brier: mean squared error of the same probabilities.
    """

    temperature: TemperatureFit
    nll: Estimate
    brier: Estimate


def tempered_scores(
    margin: Margins, prompt: Clusters, label: Labels = None, *, num_bootstrap: int = 1000, seed: int = 0
) -> TemperedScores:
    """NLL and Brier score after temperature scaling, fitted on one half of the prompts and scored on the other.

    Where a half has no temperature because its margins do not agree with its labels, the other half is scored at
    P = 1/2. Where it has none because each of its pairs is ranked as labeled, the other half is scored as it is.

    Args:
        margin: reward of `chosen` less the reward of `rejected`, times beta.
        prompt: prompt of each pair.
        label: probability that `chosen` is the better one; none is 1.
        num_bootstrap: resamples over prompts; 0 gives jackknife errors and no intervals.
        seed: seed of the halves and the resamples.
    """
    margin = finite_array(margin, "margins", ["pair"])
    y = np.ones_like(margin) if label is None else np.asarray(label, dtype=np.float64)
    place = np.unique(np.asarray(prompt), return_inverse=True)[1]
    second_half = (np.random.default_rng(seed).permutation(int(place.max()) + 1) % 2 == 1)[place]
    logit = np.empty_like(margin)
    for side in (False, True):
        fitted, scored = second_half == side, second_half != side
        logit[scored] = margin[scored] * _inverse_temperature(margin[fitted], y[fitted])
    scores = pair_scores(logit, y)
    sums = cluster_totals(np.stack([scores["nll"], scores["brier"], np.ones_like(y)], axis=1), place.tolist())
    found = cluster_bootstrap(sums, ratios, num_bootstrap=num_bootstrap, seed=seed)
    return TemperedScores(fit_temperature(margin, y, np.ones_like(y)), *found)


def reward_spread(rewards: Pool, *, num_bootstrap: int = 1000, seed: int = 0) -> Estimate:
    """Share of the reward's variance under the policy that lies within prompts, in [0, 1].

    `w / (w + b)` with `w` the mean variance within a prompt and `b` the variance of the prompts' means less `w /
    samples`, both unbiased. A low share leaves little to an algorithm that compares rewards across prompts or adds them
    to a penalty (Razin et al., 2025, arXiv:2503.15477); dividing by the standard deviation of a group undoes it.

    Args:
        rewards: rewards of independent responses of the policy, at least two prompts and two samples.
        num_bootstrap: resamples over prompts; 0 gives a jackknife error and no interval.
        seed: seed of the resamples.
    """
    pool = finite_array(rewards, "rewards", ["prompt", "sample"])
    if min(pool.shape) < 2:
        raise DataError(f"the spread of rewards needs at least 2 prompts and 2 responses to each, got {pool.shape}")
    mean, within = pool.mean(axis=1) - pool.mean(), pool.var(axis=1, ddof=1)
    sums = np.stack([within, mean, mean**2, np.ones(len(pool))], axis=1)

    def share(totals: np.ndarray) -> np.ndarray:
        inside, first, second, count = np.moveaxis(totals, -1, 0)
        inside = inside / count
        between = (second - first**2 / count) / np.maximum(count - 1, 1) - inside / pool.shape[1]
        whole = inside + np.maximum(between, 0.0)
        return np.asarray(np.where(whole > 0, inside / np.where(whole > 0, whole, 1.0), np.nan)[..., None])

    found = cluster_bootstrap(sums, share, num_bootstrap=num_bootstrap, seed=seed)[0]
    return with_honest_width(found, np.ones(len(pool)), bounds=(0.0, 1.0))


def tied_groups(rewards: Pool, group_size: int) -> Estimate:
    """Probability that a group of responses to one prompt has equal rewards, so that group-wise scaling gives nothing.

    `sum_v C(c_v, G) / C(N, G)` over the values v of a prompt's pool of N, exact over all groups of the pool; mean over
    prompts.

    Args:
        rewards: rewards of the pool.
        group_size: G, responses of a group, in 2 … samples.

    Example:
        >>> tied_groups(np.array([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]]), 2).value.__round__(4)
        0.6667
    """
    pool = finite_array(rewards, "rewards", ["prompt", "sample"])
    num_samples = pool.shape[1]
    expected = f"lie in 2 … {num_samples}, the responses to each prompt"
    require(2 <= group_size <= num_samples, "group_size", expected, group_size)
    counts = [np.unique(row, return_counts=True)[1] for row in pool]
    tied = [np.exp(_log_choose(c[c >= group_size], group_size)).sum() for c in counts]
    share = np.clip(np.array(tied) / math.exp(_log_choose(np.array([num_samples]), group_size)[0]), 0.0, 1.0)
    return clustered_share(share, np.arange(len(pool)))


def epistemic_std(members: Float[np.ndarray, "members prompts samples"]) -> Estimate:
    """Disagreement of an ensemble's members, in standard deviations of the reward within a prompt.

    Members are centered within each prompt, since pairs do not determine a prompt's offset, and divided by their own
    standard deviation within prompts. The result is the root mean square over responses of the standard deviation over
    members; its error is Student's over prompts by the delta method. Unlike `reward_spread`, high is bad.

    Args:
        members: rewards by each of at least two members.
    """
    pools = finite_array(members, "rewards", ["member", "prompt", "sample"])
    if len(pools) < 2:
        raise DataError("the disagreement of an ensemble needs at least 2 members, got 1")
    centered = pools - pools.mean(axis=2, keepdims=True)
    scale = np.sqrt((centered**2).mean(axis=(1, 2), keepdims=True))
    if not (scale > 0).all():
        raise DataError("a member of the ensemble gives all responses of a prompt one reward; leave it out")
    variance = (centered / scale).var(axis=0, ddof=1).mean(axis=1)
    value = math.sqrt(float(variance.mean()))
    if len(variance) < 2 or value == 0:
        return Estimate(value, None, len(variance))
    return Estimate(value, float(variance.std(ddof=1)) / math.sqrt(len(variance)) / (2 * value), len(variance))


def length_sensitivity(rewards: Pool, lengths: Pool, *, num_bootstrap: int = 1000, seed: int = 0) -> Estimate:
    """Correlation of reward and length within prompts.

    Args:
        rewards: rewards of the pool.
        lengths: length of each response, in any unit.
        num_bootstrap: resamples over prompts; 0 gives a jackknife error and no interval.
        seed: seed of the resamples.

    Returns:
        The correlation in [-1, 1]; NaN where rewards or lengths do not vary within prompts.
    """
    columns = (rewards, lengths)
    pools = np.stack([finite_array(column, "rewards and lengths", ["prompt", "sample"]) for column in columns])
    centered = pools - pools.mean(axis=2, keepdims=True)
    products = np.einsum("aps,bps->pab", centered, centered).reshape(-1, 4)

    def correlation(totals: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.maximum(totals[..., 0] * totals[..., 3], 0.0))
        return np.asarray(np.where(scale > 1e-12, totals[..., 1] / np.where(scale > 0, scale, 1.0), np.nan)[..., None])

    return cluster_bootstrap(products, correlation, num_bootstrap=num_bootstrap, seed=seed)[0]


def _inverse_temperature(margin: np.ndarray, label: np.ndarray) -> float:
    if not margin.size:
        return 1.0
    fit = fit_temperature(margin, label, np.ones_like(label))
    if fit.temperature is not None:
        return 1 / fit.temperature
    right = (np.sign(margin) == np.sign(label - 0.5)) | (label == 0.5)
    return 1.0 if right.all() else 0.0


def _log_choose(count: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(gammaln(count + 1) - gammaln(size + 1) - gammaln(count - size + 1))


_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")


def as_list(text: str) -> str:
    """The sentences as a Markdown list.

    Example:
        >>> as_list("Wait. Then stir.").splitlines()
        ['- Wait.', '- Then stir.']
    """
    return "\n".join(f"- {sentence}" for sentence in _SENTENCE_ENDS.split(text.strip()))


def with_bold_start(text: str) -> str:
    """The first sentence in Markdown's bold."""
    first, *rest = _SENTENCE_ENDS.split(text.strip(), maxsplit=1)
    return " ".join([f"**{first}**", *rest])


def in_paragraphs(text: str) -> str:
    """Each sentence in its own paragraph."""
    return "\n\n".join(_SENTENCE_ENDS.split(text.strip()))


def with_courtesy(text: str) -> str:
    """The text and a polite last sentence."""
    return f"{text.rstrip()} I hope this helps!"


def with_repeated_sentence(text: str) -> str:
    """The text and its last sentence once more, which adds length and no content."""
    return f"{text.rstrip()} {_SENTENCE_ENDS.split(text.strip())[-1]}"


EDITS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"list": as_list, "bold": with_bold_start, "paragraphs": in_paragraphs, "courtesy": with_courtesy}
)
"""Edits by name."""


def style_flips(model: Scorer, pairs: Sequence[PreferencePair]) -> dict[str, Estimate]:
    """Share of pairs whose preferred response changes when the other one is edited, for each edit and over all.

    The response with the lower reward is edited. An edit that leaves a text as it is, and a pair of equal rewards, take
    no part.

    Args:
        model: the model in question.
        pairs: pairs of different responses.

    Returns:
        Estimates under `style_flips` and `style_flips_edit_NAME`; an edit that changes no text is left out.
    """
    sides = [(pair.chosen, pair.rejected) for pair in pairs]
    edited = [tuple(edit(text) for text in both for edit in EDITS.values()) for both in sides]
    groups = model.score_groups(
        [pair.prompt for pair in pairs], [both + more for both, more in zip(sides, edited, strict=True)]
    )
    flips: dict[str, list[tuple[str, float]]] = {name: [] for name in EDITS}
    for pair, both, more, rewards in zip(pairs, sides, edited, (group.tolist() for group in groups), strict=True):
        loser = int(rewards[0] > rewards[1])
        if rewards[0] == rewards[1]:
            continue
        for place, name in enumerate(EDITS):
            index = loser * len(EDITS) + place
            if more[index] != both[loser]:
                flips[name].append((pair.prompt_id, float(rewards[2 + index] > rewards[1 - loser])))
    shares = {f"style_flips_edit_{name}": _share(rows) for name, rows in flips.items() if rows}
    return {"style_flips": _share([row for rows in flips.values() for row in rows]), **shares}


def _share(rows: Sequence[tuple[str, float]]) -> Estimate:
    return clustered_share(np.array([flip for _, flip in rows]), [prompt for prompt, _ in rows])

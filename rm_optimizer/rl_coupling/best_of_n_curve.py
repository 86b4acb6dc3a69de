"""Best-of-n: expected reward of the best of n responses for every n, from one pool of responses to each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from rm_optimizer.core.metrics.estimate import Estimate, finite_array
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, ratios
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.schema.checks import require


@dataclass(frozen=True)
class BestOfNPoint:
    """Selection of the best of n responses by the proxy reward.

    Args:
        n: number of responses to choose from.
        kl_bound: `log n - (n - 1) / n` nats, an upper bound on the divergence from the policy.
        kl_pool: divergence in nats, exact for a policy that draws from the pool; mean over prompts.
        proxy: expected proxy reward of the selected response.
        gold: expected gold reward of the same response; None without a gold reward.
    """

    n: int
    kl_bound: float
    kl_pool: float
    proxy: Estimate
    gold: Estimate | None


@dataclass(frozen=True)
class BestOfNCurve(JsonRecord, indent=2, rows="points"):
    """Expected rewards of best-of-n selection.

    Args:
        points: points by ascending n; the first is n = 1, the policy itself.
        num_prompts: number of prompts, which the intervals are over.
        num_samples: number of responses in the pool of each prompt.
    """

    points: tuple[BestOfNPoint, ...]
    num_prompts: int
    num_samples: int

    @classmethod
    def measure(
        cls,
        proxy: ArrayLike,
        gold: ArrayLike | None = None,
        *,
        sizes: Sequence[int] | None = None,
        num_bootstrap: int = 1000,
        seed: int = 0,
    ) -> BestOfNCurve:
        """The curve of a pool of rewards, unbiased for every n up to the pool's size.

        Args:
            proxy: rewards by which the best response is selected, shape (prompts, samples).
            gold: rewards of the same responses by which the selection is judged.
            sizes: values of n; None takes the pool's size and the powers of 2 below it.
            num_bootstrap: resamples over prompts for the intervals; 0 gives none.
            seed: seed of the resamples.

        Raises:
            DataError: if a reward is not finite, or the two kinds differ in number.
            ConfigError: if a size is below 1 or above the pool's size.
        """
        if gold is None:
            rewards = [finite_array(proxy, "proxy rewards", ["prompt", "sample"])]
        else:
            rewards = [*require_both(proxy, gold)]
        num_prompts, num_samples = rewards[0].shape
        sizes = powers_of_two(num_samples) if sizes is None else sorted(set(sizes))
        is_inside, got = bool(sizes) and 1 <= sizes[0] <= sizes[-1] <= num_samples, ", ".join(map(str, sizes)) or "none"
        require(is_inside, "sizes", f"lie in 1 … {num_samples}, the responses to each prompt", got)
        columns = selected_means(rewards[0], rewards, sizes)
        flat = columns.transpose(1, 0, 2).reshape(num_prompts, -1)
        sums = np.concatenate([flat, np.ones((num_prompts, 1))], axis=1)
        found = cluster_bootstrap(sums, ratios, num_bootstrap=num_bootstrap, seed=seed)
        divergence = np.mean([pool_divergence(row, sizes) for row in rewards[0]], axis=0).tolist()
        golds = found[len(sizes) :] or [None] * len(sizes)
        points = map(BestOfNPoint, sizes, map(kl_bound, sizes), divergence, found, golds)
        return cls(tuple(points), num_prompts, num_samples)


def powers_of_two(num_samples: int) -> list[int]:
    """Powers of 2 up to a number, and the number.

    Example:
        >>> powers_of_two(24)
        [1, 2, 4, 8, 16, 24]
    """
    return sorted({*(2**k for k in range(num_samples.bit_length())), num_samples})


def kl_bound(n: int) -> float:
    """Divergence of best-of-n from the policy if no two responses tie, `log n - (n - 1) / n` nats.

    It is an upper bound if responses repeat or tie (Beirami et al., 2024, https://arxiv.org/abs/2401.01879, Theorem 1).

    Example:
        >>> round(kl_bound(16), 4)
        1.8351
    """
    return math.log(n) - (n - 1) / n


def exact_divergence(
    probabilities: Float[np.ndarray, " responses"], rewards: Float[np.ndarray, " responses"], n: int
) -> float:
    """Divergence of best-of-n from a policy with finitely many responses, in nats; ties are broken at random.

    `sum_g Q_g log(Q_g / P_g)` over groups of equal reward, with `P_g` their probability, `F` the distribution function
    of the reward and `Q_g = F(g)^n - F(g-)^n`: within a group, selection keeps the policy's proportions.

    Args:
        probabilities: the policy's probability of each response; they sum to 1.
        rewards: reward of each response.
        n: number of responses to choose from, positive.

    Example:
        >>> exact_divergence(np.array([0.5, 0.5]), np.array([1.0, 1.0]), 8)
        0.0
        >>> round(exact_divergence(np.array([0.5, 0.5]), np.array([0.0, 1.0]), 10**6), 6)
        0.693147
    """
    share = np.bincount(np.unique(rewards, return_inverse=True)[1], weights=probabilities)
    below = np.concatenate([[0.0], np.minimum(np.cumsum(share), 1.0)])
    below[-1] = 1.0
    kept = share > 0
    taken, share = (below[1:] ** n - below[:-1] ** n)[kept], share[kept]
    divergence = np.where(taken > 0, taken * np.log(np.where(taken > 0, taken, 1.0) / share), 0.0).sum()
    return max(float(divergence), 0.0)


def pool_divergence(proxy: Float[np.ndarray, " samples"], sizes: Sequence[int]) -> list[float]:
    """`exact_divergence` of each n for the policy that draws a random response from the pool."""
    values, counts = np.unique(proxy, return_counts=True)
    share = counts / len(proxy)
    return [exact_divergence(share, values, n) for n in sizes]


def selected_means(
    proxy: Float[np.ndarray, "prompts samples"],
    rewards: Sequence[Float[np.ndarray, "prompts samples"]],
    sizes: Sequence[int],
) -> Float[np.ndarray, "kinds prompts sizes"]:
    """Expected rewards of the response with the highest proxy among n drawn without replacement from each pool.

    `sum_i C(i - 1, n - 1) / C(N, n) g_(i)` over the pool sorted by proxy (Nakano et al., 2021,
    https://arxiv.org/abs/2112.09332, appendix I), with the weights of tied responses shared equally. As an average over
    all subsets of n it is unbiased.

    Args:
        proxy: rewards that select.
        rewards: rewards to average, each kind like `proxy`.
        sizes: values of n, in 1 … samples.
    """
    num_prompts, num_samples = proxy.shape
    cumulative = [_subset_share(num_samples, n) for n in sizes]
    found = np.zeros((len(rewards), num_prompts, len(sizes)))
    for prompt in range(num_prompts):
        _, group, counts = np.unique(proxy[prompt], return_inverse=True, return_counts=True)
        ends = np.concatenate([[0], np.cumsum(counts)])
        means = [np.bincount(group, weights=kind[prompt]) / counts for kind in rewards]
        for index, share in enumerate(cumulative):
            weights = np.diff(share[ends])
            for number, mean in enumerate(means):
                found[number, prompt, index] = weights @ mean
    return found


def _subset_share(num_samples: int, n: int) -> Float[np.ndarray, " ends"]:
    """`C(i, n) / C(N, n)` for i in 0 … N: share of subsets within the first i.

    The logarithms `log(1 - n / k)` of ratios of neighbors are summed from the top. Logarithms of factorials would lose
    precision by cancellation.
    """
    share = np.zeros(num_samples + 1)
    ratios = np.log1p(-n / np.arange(n + 1, num_samples + 1))
    share[n:] = np.exp(np.concatenate([np.cumsum(ratios[::-1])[::-1], [0.0]]))
    return share


def require_both(proxy: ArrayLike, gold: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as float64 tables of one shape, (prompts, samples).

    Raises:
        DataError: if a reward is not a finite number, or the two kinds differ in number.
    """
    first, second = (
        finite_array(rewards, name, ["prompt", "sample"])
        for rewards, name in ((proxy, "proxy rewards"), (gold, "gold rewards"))
    )
    if first.shape != second.shape:
        raise DataError(f"expected a gold reward for each of the {first.shape} proxy rewards, got {second.shape}")
    return first, second

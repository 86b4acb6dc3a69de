"""Formulas that several oracles share: intervals over clusters, and hidden states by plain transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats


def student(value: float, left_out: Sequence[float]) -> tuple[float, float, float]:
    """Standard error and interval of a statistic from its values without each cluster."""
    count = len(left_out)
    error = math.sqrt((count - 1) * np.var(left_out))
    half = stats.t.ppf(0.975, count - 1) * error
    return error, value - half, value + half


def jackknifed(statistic: Callable[[np.ndarray], float], clusters: Sequence[Any]) -> list[float]:
    """The statistic of the rows without each cluster, as a function of the kept rows' positions."""
    names = np.unique(np.asarray(clusters), return_inverse=True)[1]
    return [statistic(np.flatnonzero(names != each)) for each in range(names.max() + 1)]


def wilson(share: float, count: float, confidence: float = 0.95) -> list[float]:
    """Ends of Wilson's interval (1927), the roots x of (share - x)^2 = z^2 x (1 - x) / count."""
    z2 = stats.norm.ppf(0.5 + confidence / 2) ** 2
    return sorted(np.roots([1 + z2 / count, -2 * share - z2 / count, share**2]).real)


def clustered(rows: np.ndarray, clusters: Sequence[Any], confidence: float = 0.95) -> tuple[float, ...]:
    """Share, its error over clusters, and Wilson's interval of the rows over the design effect (Kish, 1965)."""
    share, count = float(rows.mean()), len(rows)
    names = np.unique(np.asarray(clusters), return_inverse=True)[1]
    groups = [rows[names == each] - share for each in range(names.max() + 1)]
    variance = len(groups) / (len(groups) - 1) * sum(group.sum() ** 2 for group in groups) / count**2
    independent = rows.var(ddof=1) / count
    effective = count / max(variance / independent, 1.0) if independent else len(groups)
    return share, math.sqrt(variance), *wilson(share, effective, confidence)


def ends(estimate: Any) -> tuple[float, ...]:
    """Value, error and interval of an estimate."""
    return estimate.value, estimate.standard_error, estimate.low, estimate.high


def hidden(model: Any, prompt: Any, response: str) -> np.ndarray:
    """Hidden state that a decoder's head reads, by plain transformers."""
    ids = torch.tensor([list(model.encode([prompt], [response])[0].ids)])
    with torch.no_grad():
        return np.asarray(model.model.model(input_ids=ids).last_hidden_state[0, -1].double())

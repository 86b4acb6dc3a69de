"""Checks that the hidden states of a frozen model predict the labels of pairs, and do not predict random labels.

A linear probe is fitted to differences of hidden states, and tested on prompts outside of its fit. The same
probe is applied to a control task (Hewitt & Liang, 2019, https://arxiv.org/abs/1909.03368), where a random one of each
two texts wins. There its accuracy must be at chance. If it is higher, the same comparisons are under several prompts,
and no held-out number is valid.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Float, Int

from rm_optimizer.doctor.diagnosis import Check, MeasuredValue, Status, judged, skipped
from rm_optimizer.doctor.rewards import ScoredPairs, interval_of

NUM_SHUFFLES = 32
NUM_FOLDS = 5
FEWEST_PAIRS = 40
"""Least number of pairs with a better response for a fit."""
NO_SIGNAL = 0.55
"""Accuracy that the interval must reach. If the interval is entirely below it, the labels count as random."""
_STANDARD_ERRORS = 4.0


def label_checks(scored: ScoredPairs, *, is_fresh: bool, seed: int) -> list[Check]:
    """Check that the probe is above chance on real labels (`label_signal`) but not on random ones (`label_shuffle`).

    Args:
        scored: pairs with the hidden states of both sides.
        is_fresh: True for a model with a fresh head, whose hidden states may lack an existing signal.
        seed: seed of folds, random labels and bootstrap.
    """
    expected = ("above 0.5", "0.5")
    decided = scored.decided()
    if len(decided.pairs) < FEWEST_PAIRS:
        reason = f"{len(decided.pairs)} pairs with a better response are too few for a probe; give {FEWEST_PAIRS}"
        return [skipped(text, reason) for text in expected]
    winners = np.array([1.0 if pair.label > 0.5 else -1.0 for pair in decided.pairs])
    # In the control task, the same two texts have the same random winner under every prompt.
    texts = [tuple(sorted((pair.chosen, pair.rejected))) for pair in decided.pairs]
    index = {key: i for i, key in enumerate(dict.fromkeys(texts))}
    first_wins = np.random.default_rng(seed).choice((-1.0, 1.0), size=(len(index), NUM_SHUFFLES))
    is_first = np.array(
        [1.0 if pair.chosen == key[0] else -1.0 for pair, key in zip(decided.pairs, texts, strict=True)]
    )
    random_winners = first_wins[[index[key] for key in texts]] * is_first[:, None]
    targets = np.concatenate([winners[:, None], random_winners], axis=1)
    # Pairs of one prompt are in one fold.
    marks = [hashlib.sha256(f"{seed}:{pair.prompt_id}".encode()).digest() for pair in decided.pairs]
    order = {mark: i % NUM_FOLDS for i, mark in enumerate(sorted(set(marks)))}
    folds = np.array([order[mark] for mark in marks], dtype=np.int64)
    predicted = held_out_predictions(decided.features[:, 0] - decided.features[:, 1], targets, folds)
    shuffled = (0.5 + 0.5 * np.sign(predicted * targets))[:, 1:].mean(axis=0)
    mean, error = float(shuffled.mean()), float(shuffled.std(ddof=1) / np.sqrt(len(shuffled)))
    good = f"with random labels the probe is right on {mean:.3f} ± {error:.3f} of new prompts"
    bad = f"{good}, so the same comparisons are under several prompts; remove such repeats before splitting"
    details: dict[str, MeasuredValue] = {"standard_error": error, "num_shuffles": len(shuffled)}
    verdict = (not mean - _STANDARD_ERRORS * error > 0.5, mean, "held-out accuracy", expected[1], good, bad)
    control = judged(*verdict, details=details)
    estimate = decided.accuracy(predicted[:, 0], seed)
    low, high = interval_of(estimate)
    good = f"a probe of the frozen model predicts {estimate:.3f} of the labels on new prompts"
    bad = f"{good}, no better than random ones; check which response is preferred, or give more pairs"
    num_pairs, num_prompts = len(decided.pairs), estimate.num_samples
    details = {"low": low, "high": high, "shuffled": mean, "num_pairs": num_pairs, "num_prompts": num_prompts}
    otherwise = Status.fail if high < NO_SIGNAL and not is_fresh else Status.warn
    verdict = (low > 0.5, estimate.value, "held-out accuracy", expected[0], good, bad)
    return [judged(*verdict, otherwise=otherwise, details=details), control]


def held_out_predictions(
    differences: Float[np.ndarray, "pairs hidden"],
    targets: Float[np.ndarray, "pairs tasks"],
    folds: Int[np.ndarray, " pairs"],
) -> Float[np.ndarray, "pairs tasks"]:
    """Predictions of each fold by ridge regression on the other folds, for every column of targets.

    Without intercept, `w = argmin ||X w - y||^2 + lambda ||w||^2`, solved in its dual form `X' (X X' + lambda I)^-1 y`.
    The columns of X are in units of their root mean square, and lambda is the mean squared length of its rows.

    Args:
        differences: X.
        targets: y of each task.
        folds: index of each pair's fold.
    """
    scale = np.sqrt((differences**2).mean(axis=0))
    X = differences / np.where(scale > 0, scale, 1.0)
    gram = X @ X.T
    predicted = np.zeros_like(targets)
    for fold in np.unique(folds):
        held, kept = folds == fold, folds != fold
        inner = gram[np.ix_(kept, kept)]
        ridge = max(float(np.diag(inner).mean()), np.finfo(np.float64).tiny)
        dual = np.linalg.solve(inner + ridge * np.eye(len(inner)), targets[kept])
        predicted[held] = gram[np.ix_(held, kept)] @ dual
    return predicted

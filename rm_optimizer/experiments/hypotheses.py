"""Five hypotheses about training reward models, and the criteria that judge them.

The criteria were fixed before the runs. An effect is positive where it speaks for the hypothesis. `better` needs the
whole 95 % interval above 0, `worse` the whole interval beyond the loss that the hypothesis allows, and `equivalent`
none of it beyond that loss. Anything else is `inconclusive` at this scale. The weaker of two parts decides.

H1  Pair-atomic, length-sorted micro-batches with exact pair weights give the gradient of one padded pass over the same
    pairs (largest difference at most 1e-4 of the largest entry, float32; above that: worse) in less CPU time
    (log ratio above 0). How far the mean of micro-batch means is from that gradient is reported beside it.
H2  The scheduler (ablation_a2 against ablation_a1) lowers test NLL minus training NLL of the last weights (above 0).
H3  Label smoothing (ablation_a3 against ablation_a2) lowers the test ECE of the last weights (above 0).
H4  LoRA of rank 16 (lora_r16 against full_finetune) is at most 3 points of test accuracy worse (above -0.03);
    inconclusive as long as full fine-tuning's own accuracy cannot be told from chance.
H5  Early stopping (ablation_a4's best weights against ablation_a3's last) costs at most 0.005 nats of test NLL (above
    -0.005) and saves steps (share above 0).

Arms share seeds and test pairs, so all effects are paired; `rm_optimizer.core.metrics.effects` says how intervals are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from jaxtyping import Float
from scipy.special import log_expit

from rm_optimizer.core.metrics.effects import Outcome, both, outcome, paired_effect
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import crossed_mean

ARMS = ("ablation_a1", "ablation_a2", "ablation_a3", "ablation_a4", "full_finetune", "lora_r16")
"""Presets of `configs/experiment` trained for each seed."""
GAP_ARMS = ("ablation_a1", "ablation_a2")
"""Presets whose training pairs are scored too."""
STOPPING_ARM = "ablation_a4"
CLAIMS = MappingProxyType(
    {
        "h1": "pair-aware batching takes less CPU time at an equal gradient",
        "h2": "the scheduler narrows the gap between test and training NLL",
        "h3": "label smoothing lowers the test ECE",
        "h4": "LoRA is within 3 points of full fine-tuning",
        "h5": "early stopping costs at most 0.005 nats and saves steps",
    }
)
"""The hypotheses in a few words."""
GRADIENT_TOLERANCE = 1e-4
LORA_MARGIN, STOPPING_MARGIN = 0.03, 0.005
"""Points of accuracy that LoRA may lose, and nats that early stopping may cost."""


@dataclass(frozen=True)
class Finding:
    """The effect and verdict of a hypothesis.

    Args:
        name: name of the effect, with the hypothesis's number in front.
        effect: estimate with its interval, positive where it speaks for the hypothesis.
        margin: loss that the hypothesis allows.
        verdict: outcome by the criteria.
        also: further numbers and words that belong to it.
    """

    name: str
    effect: Estimate
    margin: float
    verdict: Outcome
    also: Mapping[str, float | str | None] = field(default_factory=dict)


def batching_finding(rows: Sequence[Mapping[str, float]]) -> Finding:
    """H1, from the rows of `batching_cost.batching_row`; macro-batches are independent draws."""
    ratio = crossed_mean(np.array([row["log_time_ratio"] for row in rows]), 0.0, len(rows)).estimate
    worst = max(row["gradient_difference"] for row in rows)
    means = float(np.mean([row["mean_of_means_difference"] for row in rows]))
    also = {"max_gradient_difference": worst, "mean_of_means_difference": means, "time_ratio": math.exp(ratio.value)}
    found: Outcome = outcome(ratio) if worst <= GRADIENT_TOLERANCE else "worse"
    return Finding("h1_pair_aware_log_time_ratio", ratio, 0.0, found, also)


def training_findings(
    test: Mapping[str, Float[np.ndarray, "seeds pairs"]],
    train: Mapping[str, Float[np.ndarray, "seeds pairs"]],
    saved: Float[np.ndarray, " seeds"],
    prompts: Sequence[str],
) -> Iterator[Finding]:
    """Effects and verdicts of H2 to H5.

    Args:
        test: each arm's margins on the test pairs.
        train: margins of `GAP_ARMS` on the training pairs.
        saved: share of steps that early stopping saved, for each seed.
        prompts: prompt of each test pair.
    """
    fitted = {arm: -log_expit(margins).mean(axis=1) for arm, margins in train.items()}
    first, second = GAP_ARMS
    gap = paired_effect(test[second], test[first], prompts, "nll", offset=fitted[second] - fitted[first])
    yield Finding("h2_scheduler_gap", gap, 0.0, outcome(gap))
    ece = paired_effect(test["ablation_a3"], test["ablation_a2"], prompts, "ece")
    yield Finding("h3_smoothing_ece", ece, 0.0, outcome(ece))
    lora = paired_effect(test["lora_r16"], test["full_finetune"], prompts, "accuracy")
    full = paired_effect(test["full_finetune"], None, prompts, "accuracy")
    learned: Outcome = "better" if full.low is not None and full.low > 0.5 else "inconclusive"
    decided = outcome(lora, LORA_MARGIN) if learned == "better" else learned
    yield Finding("h4_lora_accuracy", lora, LORA_MARGIN, decided, {"full_above_chance": learned})
    nll = paired_effect(test[STOPPING_ARM], test["ablation_a3"], prompts, "nll")
    steps = crossed_mean(saved, 0.0, len(saved)).estimate
    also = {"steps_saved": steps.value, "steps_saved_low": steps.low, "steps_saved_high": steps.high}
    yield Finding(
        "h5_early_stopping_nll", nll, STOPPING_MARGIN, both(outcome(nll, STOPPING_MARGIN), outcome(steps)), also
    )

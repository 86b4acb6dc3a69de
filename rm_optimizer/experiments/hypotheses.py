"""Five hypotheses about training reward models, and the criteria that judge them.

What confirms and what refutes each was fixed before the runs. An effect is positive where it speaks for the hypothesis;
`confirmed` needs the whole 95 % interval above the threshold, `refuted` none of it above, anything else is `undecided`
at this scale. Where a hypothesis has two parts, one refuted part refutes it and both must be confirmed.

H1  Pair-atomic, length-sorted micro-batches with exact pair weights give the gradient of one padded pass over the same
    pairs (largest difference at most 1e-4 of the largest entry, float32; above that: refuted) in less CPU time
    (log ratio above 0). How far the mean of micro-batch means is from that gradient is reported beside it.
H2  The scheduler (ablation_a2 against ablation_a1) lowers test NLL minus training NLL of the last weights (above 0).
H3  Label smoothing (ablation_a3 against ablation_a2) lowers the test ECE of the last weights (above 0).
H4  LoRA of rank 16 (lora_r16 against full_finetune) is at most 3 points of test accuracy worse (above -0.03); undecided
    as long as full fine-tuning's own accuracy cannot be told from chance.
H5  Early stopping (ablation_a4's best weights against ablation_a3's last) costs at most 0.005 nats of test NLL (above
    -0.005) and saves steps (share above 0).

Arms share seeds and test pairs, so all effects are paired; `rm_optimizer.core.metrics.effects` says how intervals are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from scipy.special import log_expit

from rm_optimizer.core.metrics.effects import Verdict, both, paired_effect, verdict
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import crossed_mean

ARMS = ("ablation_a1", "ablation_a2", "ablation_a3", "ablation_a4", "full_finetune", "lora_r16")
"""Presets of `configs/experiment` trained for each seed."""
GAP_ARMS = ("ablation_a1", "ablation_a2")
"""Presets whose training pairs are scored too."""
STOPPING_ARM = "ablation_a4"
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finding:
    """The effect and verdict of a hypothesis.

    Args:
        name: name of the effect, with the hypothesis's number in front.
        effect: estimate with its interval, positive where it speaks for the hypothesis.
        threshold: value that the effect is held against.
        verdict: outcome by the criteria.
        also: further numbers and words that belong to it.
    """

    name: str
    effect: Estimate
    threshold: float
    verdict: Verdict
    also: Mapping[str, float | str | None] = field(default_factory=dict)


def batching_finding(rows: Sequence[Mapping[str, float]]) -> Finding:
    """H1, from the rows of `batching_cost.batching_row`; macro-batches are independent draws."""
    ratio = crossed_mean(np.array([row["log_time_ratio"] for row in rows]), 0.0, len(rows))
    worst = max(row["gradient_difference"] for row in rows)
    same: Verdict = "confirmed" if worst <= GRADIENT_TOLERANCE else "refuted"
    means = float(np.mean([row["mean_of_means_difference"] for row in rows]))
    also = {"max_gradient_difference": worst, "mean_of_means_difference": means, "time_ratio": math.exp(ratio.value)}
    return Finding("h1_pair_aware_log_time_ratio", ratio, 0.0, both(verdict(ratio, 0.0), same), also)


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
    yield Finding("h2_scheduler_gap", gap, 0.0, verdict(gap, 0.0))
    ece = paired_effect(test["ablation_a3"], test["ablation_a2"], prompts, "ece")
    yield Finding("h3_smoothing_ece", ece, 0.0, verdict(ece, 0.0))
    lora = paired_effect(test["lora_r16"], test["full_finetune"], prompts, "accuracy")
    full = paired_effect(test["full_finetune"], None, prompts, "accuracy")
    learned: Verdict = "confirmed" if verdict(full, 0.5) == "confirmed" else "undecided"
    decided = verdict(lora, -0.03) if learned == "confirmed" else learned
    yield Finding("h4_lora_accuracy", lora, -0.03, decided, {"full_above_chance": learned})
    nll = paired_effect(test[STOPPING_ARM], test["ablation_a3"], prompts, "nll")
    steps = crossed_mean(saved, 0.0, len(saved))
    also = {"steps_saved": steps.value, "steps_saved_low": steps.low, "steps_saved_high": steps.high}
    yield Finding("h5_early_stopping_nll", nll, -0.005, both(verdict(nll, -0.005), verdict(steps, 0.0)), also)

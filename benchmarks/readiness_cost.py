"""Labels and seconds that a readiness verdict takes, against the width of the interval that they buy.

The policy, its responses and the oracle are the quick start's world, so that labels cost nothing and can be drawn
again. Each row is the mean over seeds, each with prompts, responses, questions and labels of its own. `half_width` is
that of the probe's interval, which is valid at every stop. `error` is the standard deviation of the win rate over
seeds. Labels are draws with the probabilities of a rater.

    python benchmarks/readiness_cost.py --model outputs/quickstart

Beside it stands Kendall's tau with the gold reward of policies that labels bought on the test worlds of the validation
of `studies/readiness.py`, which is read and not measured again.

Seconds are of one process on `--threads` threads, by stage; those of the responses and of the labels depend on the
policy and on who answers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler
from rm_optimizer.rl_coupling.readiness.measurement import ReadinessOptions, measure_readiness
from rm_optimizer.rl_coupling.readiness.probe import ResponsePool, ScorerOracle, StoppingRule, run_probe
from rm_optimizer.rl_coupling.readiness.report import ProbeRecord
from rm_optimizer.rl_coupling.world_policy import WorldGold, WorldPolicy

LABELS = (16, 32, 64, 128, 256, 512, 1024)
PROMPTS, SAMPLES = 64, 64
VALIDATION = Path(__file__).parents[1] / "studies" / "readiness_validation.json"
_NEVER = 1e-6
"""Precision that no probe reaches, so that it asks all questions."""


@dataclass(frozen=True)
class Noisy:
    """Oracle that draws labels from another's probabilities, as people would give them.

    Args:
        oracle: gives the probabilities.
        rng: source of the draws.
    """

    oracle: ScorerOracle
    rng: np.random.Generator

    def prefer(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        """Return 1 or 0 for each question."""
        return (self.rng.random(len(prompts)) < self.oracle.prefer(prompts, first, second)).astype(np.float64)


def pools(model: BradleyTerryRM, world: PreferenceWorld, seeds: int) -> list[ResponsePool]:
    """Pools of other prompts and responses for each seed."""
    prompts = world.prompts()
    found = []
    for seed in range(seeds):
        sampler = BestOfNSampler(WorldPolicy(world), model, SAMPLES, seed=seed)
        found.append(ResponsePool.of(sampler.sample(prompts[seed * PROMPTS : (seed + 1) * PROMPTS])))
    return found


def half_width(rate: Estimate) -> float:
    """Half the width of an interval."""
    assert rate.low is not None
    assert rate.high is not None
    return (rate.high - rate.low) / 2


def probes(found: Sequence[ResponsePool], gold: ScorerOracle, rule: StoppingRule) -> list[ProbeRecord]:
    """Probe of each pool with labels of its own."""
    return [
        run_probe(
            pool,
            Noisy(gold.as_rater(pool.prompts, pool.responses), np.random.default_rng(seed)),
            SAMPLES,
            rule,
            seed=seed,
        )
        for seed, pool in enumerate(found)
    ]


def seconds_by_stage(
    model: BradleyTerryRM, pairs: PreferenceDataset, world: PreferenceWorld, gold: ScorerOracle
) -> dict[str, float]:
    """Seconds of each stage of one measurement."""
    marks: list[tuple[str, float]] = []
    measure_readiness(
        model,
        pairs,
        WorldPolicy(world),
        gold,
        prompts=world.prompts()[:PROMPTS],
        options=ReadinessOptions(),
        on_stage=lambda what, done, total: marks.append((what, time.perf_counter())),
    )
    marks.append(("end", time.perf_counter()))
    return {what: after - before for (what, before), (_, after) in pairwise(marks)}


def taus(validation: Mapping[str, Any]) -> dict[str, float]:
    """Tau with gold after RLOO to 6 nats by labels a reward model, of the score, the probe and accuracy."""
    return {
        f"tau_{name}_{point['labels']}": point[name]
        for point in validation["curve"]
        for name in ("score", "probe", "accuracy")
        if point[name] is not None
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="reward model of the quick start's world")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    world = PreferenceWorld(0, gold=Gold())
    gold = ScorerOracle(WorldGold(world), is_exact=True)
    model = BradleyTerryRM.from_pretrained(options.model)
    found = pools(model, world, options.seeds)
    numbers: dict[str, float] = {}
    print("labels   win rate   error over seeds   half width")
    for labels in LABELS:
        records = probes(found, gold, StoppingRule(labels, precision=_NEVER))
        rates = np.array([record.win_rate.value for record in records])
        width = float(np.mean([half_width(record.win_rate) for record in records]))
        print(f"{labels:6}   {rates.mean():8.3f}   {rates.std(ddof=1):16.3f}   {width:10.3f}")
        numbers |= {f"half_width_{labels}": width, f"error_{labels}": float(rates.std(ddof=1))}
    stopped = probes(found, gold, StoppingRule())
    numbers["labels_when_stopped"] = float(np.mean([record.num_labels for record in stopped]))
    numbers["half_width_when_stopped"] = float(np.mean([half_width(record.win_rate) for record in stopped]))
    pairs = PreferenceDataset(world.pairs(0, 1000).val)
    seconds = seconds_by_stage(model, pairs, world, gold)
    numbers |= {f"seconds_{what.replace(' ', '_')}": value for what, value in seconds.items()}
    numbers["seconds"] = sum(seconds.values())
    numbers |= taus(json.loads(VALIDATION.read_text(encoding="utf-8")))
    for name, value in numbers.items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()

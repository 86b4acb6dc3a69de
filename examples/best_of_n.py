"""Choose the best of 64 responses to each prompt by a reward model, and see what choosing among more of them gains.

    python examples/best_of_n.py outputs/run/best
    python examples/best_of_n.py outputs/run/best path/of/a/language/model

Without a language model the synthetic world's policy answers, whose true reward is known.
"""

from __future__ import annotations

import sys

import numpy as np

from rm_optimizer import BestOfNCurve, BestOfNSampler, BradleyTerryRM, PreferenceWorld
from rm_optimizer.rl_coupling import WorldGold, WorldPolicy


def main(checkpoint: str, language_model: str | None = None) -> None:
    """Sample, rank and judge responses."""
    world = PreferenceWorld(0)
    prompts = world.prompts()[:8]
    policy = language_model or WorldPolicy(world)
    sampler = BestOfNSampler(policy, BradleyTerryRM.from_pretrained(checkpoint), n_samples=64)
    ranked = sampler.sample(prompts)
    print(f"{ranked[0].prompt}\n  best:  {ranked[0].best}\n  worst: {ranked[0].responses[-1]}")

    proxy = np.array([row.rewards for row in ranked])
    scores = WorldGold(world).score_groups(prompts, [row.responses for row in ranked])
    curve = BestOfNCurve.measure(proxy, np.array([score.tolist() for score in scores]))
    for point in curve.points:
        print(f"best of {point.n}: reward {point.proxy:.2f}, true reward {point.gold:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

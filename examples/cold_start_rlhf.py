"""From preference pairs to an optimized policy, on a synthetic world whose true reward is known.

    pip install 'rm-optimizer[rl]'
    python examples/cold_start_rlhf.py [STEPS]

`rm-opt rlhf` does the same from files, with an ensemble, a reward server and pictures.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rm_optimizer import (
    BradleyTerryRM,
    PreferenceDataset,
    PreferenceWorld,
    TrainVal,
    train_reward_model,
)
from rm_optimizer.rl_coupling import WorldGold, optimize_policy, save_world_policy
from rm_optimizer.schema import RLHFConfig

FOLDER = Path("outputs/cold_start")


def main(steps: int = 40) -> None:
    """Train a reward model, fit a start policy, optimize it, and print what each checkpoint is worth."""
    world = PreferenceWorld(0, concave=True)
    pairs = world.pairs(num_train=max(64, 100 * steps), num_val=200)
    data = TrainVal(PreferenceDataset(pairs.train), PreferenceDataset(pairs.val))
    trained = train_reward_model("tiny", data_path=data, output_dir=FOLDER / "reward", options={"resume": "auto"})
    print(f"reward model: accuracy {trained.metrics.accuracy}, at most {pairs.ceiling:.3f}")

    start = save_world_policy(world, FOLDER / "start", num_responses=max(64, 160 * steps))
    prompts = world.prompts()
    config = RLHFConfig(steps=steps, learning_rate=3e-4, max_new_tokens=80, measure_every=max(1, steps // 8))
    result = optimize_policy(
        start,
        BradleyTerryRM.from_pretrained(trained),
        prompts[100:],
        prompts[:100],  # validation prompts, which the reward model has not seen
        FOLDER,
        config,
        gold=WorldGold(world),
    )
    for point in result.checkpoints:
        print(
            f"step {point.step}: KL {point.divergence:.2f}, proxy {point.proxy_gain:+.2f}, true {point.gold_gain:+.2f}"
        )
    print(f"policy: {result.policy}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

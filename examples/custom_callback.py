"""Watch a reward and stop early with a Lightning callback: `python examples/custom_callback.py [OPTION=VALUE ...]`."""

import sys
from typing import Any

import pytorch_lightning as pl

from rm_optimizer import RewardModelLightning, TrainConfig, compose, train_reward_model, typed

GOOD, BAD = "Put it in boiling water for seven minutes.", "No."


class WatchMargin(pl.Callback):
    """Prints the margin of one pair every few steps, and stops training once it is wide enough."""

    def __init__(self, every: int, enough: float) -> None:
        self.every = every
        self.enough = enough

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        """Score the pair after an optimizer step; the score takes no random number and leaves the model as it was."""
        assert isinstance(module, RewardModelLightning)
        if trainer.global_step % self.every == 0:
            good, bad = module.model.score(["How do I boil an egg?"] * 2, [GOOD, BAD]).tolist()
            print(f"step {trainer.global_step}: margin {good - bad:+.4f}")
            trainer.should_stop = trainer.should_stop or good - bad > self.enough


def main() -> None:
    """Train the tiny model on the embedded synthetic pairs with the callback."""
    options = ["model=tiny", "training.progress=false", "output_dir=outputs/watched", *sys.argv[1:]]
    train_reward_model(typed(compose(options), TrainConfig), callbacks=[WatchMargin(every=2, enough=2.0)])


if __name__ == "__main__":
    main()

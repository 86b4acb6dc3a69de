"""Our loss and gradients beside TRL's, on the same weights and pairs.

TRL's side is its own code from end to end: `RewardTrainer` loads the folder, its collator pads the pairs and its
`compute_loss` runs. Ours loads the same folder with `BradleyTerryRM` and computes `bradley_terry_loss` on an
interleaved batch. A decoder and an encoder, with and without margins, centered rewards, in float32 and training mode.
The tokenizer's pad token differs from its EOS, since with pad == EOS TRL reads a decoder's reward one token too early.

    python benchmarks/parity_trl.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # and TRL sends no telemetry

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from trl import RewardConfig, RewardTrainer

from rm_optimizer.core.model.losses import bradley_terry_loss
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import PairCollator
from rm_optimizer.core.tokens.cache import TokenizedPairs, tokenize_pairs
from rm_optimizer.core.tokens.tokenizer import train_tokenizer

TOLERANCE = 1e-5
NUM_PAIRS = 12
MAX_LENGTH = 128
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {"llama": SHAPE | {"num_key_value_heads": 2}, "bert": SHAPE}
WORDS = tuple(f"word{i}" for i in range(40))


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences of one case.

    Args:
        loss: largest difference of the loss.
        gradient: largest difference of any entry of any gradient.
        largest_gradient: largest entry of TRL's gradients, for scale.
    """

    loss: float
    gradient: float
    largest_gradient: float


def random_pairs(seed: int) -> list[PreferencePair]:
    """Pairs of many lengths with margins."""
    rng = np.random.default_rng(seed)

    def text(longest: int) -> str:
        return " ".join(rng.choice(WORDS, size=int(rng.integers(2, longest))))

    return [
        PreferencePair(text(20), text(50) + " yes", text(50) + " no", margin=float(rng.normal()))
        for _ in range(NUM_PAIRS)
    ]


def write_model(folder: Path, model_type: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A random classifier with one label and its tokenizer, as `transformers` stores them."""
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        num_labels=1,
        initializer_range=0.1,
        **ARCHITECTURES[model_type],
        **special,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trl_loss_and_gradients(
    folder: Path, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, center_rewards: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Loss and gradients of TRL's trainer for one batch of these rows."""
    config = RewardConfig(
        output_dir=str(folder / "trl"),
        center_rewards_coefficient=center_rewards or None,
        max_length=MAX_LENGTH,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = RewardTrainer(
        model=str(folder), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    return loss.detach(), gradients_of(trainer.model, loss)


def our_loss_and_gradients(
    folder: Path, tokens: TokenizedPairs, pairs: list[PreferencePair], *, has_margin: bool, center_rewards: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Loss and gradients of this package for the same pairs."""
    reward_model = BradleyTerryRM.from_pretrained(folder, max_length=MAX_LENGTH, new_head=True)
    batch = PairCollator(tokens, pairs, reward_model.pad_choice.token_id)(range(len(tokens)))
    reward_model.train()
    chosen, rejected = batch.split(reward_model(batch.input_ids, batch.attention_mask))
    margin = batch.margin if has_margin else None
    loss = bradley_terry_loss(chosen, rejected, margin=margin, center_rewards=center_rewards)
    return loss.detach(), gradients_of(reward_model.model, loss)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of the loss with respect to each parameter that has one, by name."""
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def measure(model_type: str, *, has_margin: bool, center_rewards: float) -> Difference:
    """The differences of one architecture and loss."""
    pairs = random_pairs(seed=0)
    tokenizer = train_tokenizer((f"{p.prompt} {p.chosen} {p.rejected}" for p in pairs), vocab_size=400)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, model_type, tokenizer)
        renderer = BradleyTerryRM.from_pretrained(folder, max_length=MAX_LENGTH, new_head=True).renderer
        tokens = tokenize_pairs(pairs, renderer, folder / "tokens")
        assert len(tokens) == len(pairs), "every pair is needed"
        rows = [
            {"chosen_ids": tokens.chosen(i).tolist(), "rejected_ids": tokens.rejected(i).tolist()}
            | ({"margin": pairs[i].margin} if has_margin else {})
            for i in range(len(tokens))
        ]
        theirs, their_gradients = trl_loss_and_gradients(folder, rows, tokenizer, center_rewards)
        ours, our_gradients = our_loss_and_gradients(
            folder, tokens, pairs, has_margin=has_margin, center_rewards=center_rewards
        )
    assert their_gradients.keys() == our_gradients.keys(), "the sides differentiate different parameters"
    gaps = [float((our_gradients[key] - value).abs().max()) for key, value in their_gradients.items()]
    largest = max(float(value.abs().max()) for value in their_gradients.values())
    return Difference(float((ours - theirs).abs()), max(gaps), largest)


def main() -> int:
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    print(f"{'case':41} {'loss gap':>10} {'gradient gap':>13} {'largest gradient':>17}")
    differences = []
    for model_type, has_margin, center_rewards in product(ARCHITECTURES, (False, True), (0.0, 0.01)):
        difference = measure(model_type, has_margin=has_margin, center_rewards=center_rewards)
        case = f"{model_type}, margin={has_margin}, center_rewards={center_rewards}"
        print(f"{case:41} {difference.loss:10.2e} {difference.gradient:13.2e} {difference.largest_gradient:17.2e}")
        differences.append(difference)
    worst = max(d.loss for d in differences), max(d.gradient for d in differences)
    print(f"max_loss_difference: {worst[0]:.3e}")
    print(f"max_gradient_difference: {worst[1]:.3e}")
    return int(max(worst) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

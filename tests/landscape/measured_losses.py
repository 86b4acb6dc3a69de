"""A tiny reward model with pairs, as landscapes are taken of."""

from __future__ import annotations

from pathlib import Path

import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.evaluation.draws import draw_pairs
from rm_optimizer.landscape.sample import MeasuredLoss
from rm_optimizer.schema import LossConfig
from tests.core.tiny_models import tiny_model, tiny_tokenizer

PAIRS = [
    PreferencePair(
        prompt=f"one {i // 2} two", chosen=f"three {i * 7 % 11} four", rejected=f"five {'six ' * (i % 4)}", weight=w
    )
    for i, w in enumerate([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 3.0, 1.0])
]


def tiny_measured_loss(cache_dir: Path, *, token_budget: int = 64, params: str = "trainable") -> MeasuredLoss:
    """A one-layer decoder in float64 on eight pairs of four prompts, with every term of the loss."""
    tokenizer = tiny_tokenizer("llama")
    model = BradleyTerryRM(tiny_model("llama", tokenizer, num_hidden_layers=1), tokenizer, max_length=32).double()
    sample = draw_pairs(model, PAIRS, 8, 0, token_budget=token_budget, cache_dir=cache_dir)
    loss = LossConfig(label_smoothing=0.1, center_rewards=0.01)
    return MeasuredLoss(model.eval(), sample, loss, params, torch.float64)

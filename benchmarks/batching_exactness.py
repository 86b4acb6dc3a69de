"""The gradient of one optimizer step under every token budget and layout, against one pass over single sequences.

A Llama-shaped and a BERT-shaped reward model in float64, 48 pairs of very different lengths with weights, soft labels
and regularizers. Prints the largest relative difference of any gradient entry, relative to the largest entry.

Llama's RMSNorm computes in float32 whatever the model's type, so its float64 figure would be that of float32 rounding;
here it computes in float64, which changes nothing but the precision.

    python benchmarks/batching_exactness.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import AnyPairBatch, BatchShape, PackedPairCollator, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.loader import MacroBatches
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer

NUM_PAIRS = 48
BUDGETS = (1, 150, 700, 100_000)
WORLD_SIZES = (1, 2, 3)
ARCHITECTURES = {
    "decoder": {"model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    "encoder": {"model_type": "bert", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
}
HEADS = {"num_attention_heads": 4}


def pairs() -> list[PreferencePair]:
    rng = np.random.default_rng(0)
    words = np.array(
        [
            "the",
            "quick",
            "brown",
            "fox",
            "jumps",
            "over",
            "a",
            "lazy",
            "dog",
            "and",
            "runs",
            "far",
            "away",
            "from",
            "home",
        ]
    )

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(words, rng.integers(low, high)))

    return [
        PreferencePair(
            text(3, 40), text(1, 60) + " a", text(1, 20) + " b", label=float(rng.uniform(0.5, 1)), weight=1 + i % 3
        )
        for i in range(NUM_PAIRS)
    ]


def norm_in_full_precision(self: torch.nn.Module, hidden: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * hidden * scale


def gradient(model: BradleyTerryRM, batches: list[AnyPairBatch], total_weight: float) -> Tensor:
    model.zero_grad()
    for batch in batches:
        chosen, rejected = batch.split(model.rewards_of(batch))
        options = {"label_smoothing": 0.1, "label": batch.label, "center_rewards": 0.01, "reward_l2": 0.1}
        losses = bradley_terry_pair_losses(chosen, rejected, **options)
        ((losses * batch.weight).sum() / total_weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def differences(name: str) -> Iterator[float]:
    data = pairs()
    tokenizer = train_tokenizer(rendered_texts(data), 400)
    model = BradleyTerryRM.from_config({**ARCHITECTURES[name], **HEADS}, tokenizer, max_length=256, seed=0).double()
    tokens = tokenize_pairs(data, model.renderer, None)
    apart = PairCollator(tokens, data, model.renderer.pad_token_id)
    kinds = [PairCollator] if model.supports_prefix_sharing() else [PairCollator, PackedPairCollator]
    total = float(apart.weight.sum())
    reference = gradient(model, [apart([i]) for i in range(len(tokens))], total)
    for kind in kinds:
        collator = kind(tokens, data, model.renderer.pad_token_id)
        for budget in BUDGETS:
            for world_size in WORLD_SIZES:
                shares = [
                    MacroBatches(collator, BatchShape(NUM_PAIRS, budget, rank, world_size), seed=0)[0]
                    for rank in range(world_size)
                ]
                found = sum(gradient(model, list(share.micro), share.total_weight) for share in shares)
                yield float((found - reference).abs().max() / reference.abs().max())


def main() -> None:
    modeling_llama.LlamaRMSNorm.forward = norm_in_full_precision
    worst = {name: max(differences(name)) for name in ARCHITECTURES}
    for name, difference in worst.items():
        print(f"max_grad_difference_{name}: {difference:.3e}")
    print(f"max_grad_difference_float64: {max(worst.values()):.3e}")


if __name__ == "__main__":
    main()

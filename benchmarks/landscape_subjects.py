"""Models that the landscape benchmark measures, the pairs they are measured on, and seconds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.batching import AnyPairBatch, BatchShape, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.loader import MacroBatches
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.schema.landscape import SpectrumOptions

SHAPES = {"encoder": ("bert", 4.0), "decoder": ("llama", 2.6875)}
"""Architecture, and width of the feed-forward layers over the hidden size."""
VOCABULARY = 8192
BATCH_SIZE, LEARNING_RATE = 16, 3e-4
SYNTHETIC_PAIRS = 2048
TOKEN_BUDGET = 2048
"""Of training."""


@dataclass
class Subject:
    """A model and the pairs that its curvature is measured on.

    Args:
        name: its key in `SHAPES`.
        model: the reward model.
        measured: training pairs that are short enough to be measured.
        batches: the first of them, which are.
        macro: training batches, by step.
        optimizer: the model's.
        step: optimizer steps taken.
    """

    name: str
    model: BradleyTerryRM
    measured: PairCollator
    batches: list[AnyPairBatch]
    macro: MacroBatches
    optimizer: torch.optim.Optimizer
    step: int = 0

    def train(self, until: int) -> None:
        """Train to that step."""
        while self.step < until:
            macro = self.macro[self.step]
            self.optimizer.zero_grad()
            for batch in macro.micro:
                losses = bradley_terry_pair_losses(*batch.split(self.model.rewards_of(batch)))
                ((losses * batch.weight).sum() / macro.total_weight).backward()
            self.optimizer.step()
            self.step += 1
        self.optimizer.zero_grad()


def fitting(model: BradleyTerryRM, dataset: PreferenceDataset, max_length: int, least: int) -> PairCollator:
    """Pairs whose responses end within so many tokens, in an order drawn once."""
    tokens = tokenize_pairs(dataset.pairs, model.renderer, None)
    longest = [max(len(tokens.chosen(i)), len(tokens.rejected(i))) for i in range(len(tokens))]
    fit = np.flatnonzero(np.array(longest) <= max_length)
    if len(fit) < least:
        raise SystemExit(f"{len(fit)} pairs fit in --max-length {max_length}, expected at least {least}; raise it")
    drawn = np.random.default_rng(0).permutation(fit)
    pairs = [dataset.pairs[index] for index in tokens.pair_index[drawn].tolist()]
    return PairCollator(tokenize_pairs(pairs, model.renderer, None), pairs, model.renderer.pad_token_id)


def some(collator: PairCollator, count: int, token_budget: int) -> list[AnyPairBatch]:
    """The first pairs in micro-batches."""
    positions = np.arange(min(count, len(collator.tokenized)))
    return [collator(batch) for batch in collator.micro_batches(positions, token_budget)]


def load_pairs(args: argparse.Namespace) -> PreferenceDataset:
    """The pairs of `--pairs`, or the synthetic ones."""
    if args.pairs:
        return PreferenceDataset(args.pairs)
    return PreferenceDataset(synthetic_world(SyntheticConfig(num_train=SYNTHETIC_PAIRS, num_val=2)).train)


def prepare(args: argparse.Namespace, name: str, hidden: int | None = None) -> Subject:
    """A trained model and its pairs."""
    dataset, width = load_pairs(args), hidden or args.hidden
    tokenizer = train_tokenizer(rendered_texts(dataset.pairs), VOCABULARY)
    tokenizer.add_tokens([f"<unused {i}>" for i in range(VOCABULARY - len(tokenizer))])
    kind, ratio = SHAPES[name]
    shape = {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": int(ratio * width),
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    model = BradleyTerryRM.from_config(shape, tokenizer, max_length=512, seed=0)
    return trained(args, name, model, dataset, learning_rate=LEARNING_RATE)


def trained(
    args: argparse.Namespace, name: str, model: BradleyTerryRM, dataset: PreferenceDataset, *, learning_rate: float
) -> Subject:
    """The model after `--steps` steps, and the pairs to measure it on."""
    measured = fitting(model, dataset, args.max_length, args.num_pairs)
    pairs = fitting(model, dataset, max(args.train_length, args.max_length), BATCH_SIZE)
    macro = MacroBatches(pairs, BatchShape(BATCH_SIZE, TOKEN_BUDGET), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    subject = Subject(name, model, measured, some(measured, args.num_pairs, args.token_budget), macro, optimizer)
    subject.train(args.steps)
    tokens = sum(batch.num_padded_tokens for batch in subject.batches)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{name}: {count:,} parameters trained on {len(pairs.tokenized):,} pairs; measured on "
        f"{sum(b.num_pairs for b in subject.batches)}, {tokens:,} padded tokens",
        flush=True,
    )
    return subject


def ours(subject: Subject, top_k: int, *, dtype: torch.dtype = torch.float32, **changed: Any) -> HessianSpectrum:
    """Our eigenvalues, by default those of largest magnitude as the analyzer finds them when nothing is said."""
    given = SpectrumOptions(**{"which": "magnitude", **changed})
    return HessianAnalyzer(subject.model, dtype=dtype).compute_spectrum(subject.batches, top_k=top_k, options=given)


def timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and seconds of the process."""
    began = time.process_time()
    result = compute()
    return result, time.process_time() - began

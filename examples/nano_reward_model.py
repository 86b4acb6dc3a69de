r"""A Bradley-Terry reward model in one file of plain torch, without this package: the quick start, step by step.

Read it first. `rm_optimizer` adds any base model, exact batching, resume, certificates and intervals that hold, around
this core. The tests hold its losses to the package's own. To write the quick start's pairs to files, and train on them:

    python -c "
    import json
    from rm_optimizer.core.pairs.synthetic import SyntheticConfig, synthetic_world
    world = synthetic_world(SyntheticConfig(num_train=16000))
    for name in ('train', 'val'):
        print(*(json.dumps(pair.to_dict()) for pair in getattr(world, name)), sep='\n', file=open(f'{name}.jsonl', 'w'))
    "
    python examples/nano_reward_model.py train.jsonl val.jsonl
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention, silu

Pair = dict[str, str]
WIDTH, INNER, LAYERS, HEADS, VOCABULARY, LENGTH = 64, 128, 2, 4, 2048, 128
BATCH, EPOCHS, RATE, DECAY, WARMUP, CLIP, SEED = 32, 2, 1e-3, 0.01, 0.03, 1.0, 0


def read(path: str | Path) -> list[Pair]:
    """Rows `{"prompt", "chosen", "rejected"}` of a JSON lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def render(prompt: str) -> str:
    """Text before a response."""
    return f"Prompt: {prompt}\n\nResponse: "


def trained_tokenizer(pairs: list[Pair]) -> Tokenizer:
    """Byte-level BPE learned from the pairs' own texts; ids 0, 1 and 2 are start, end and padding."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special, alphabet = ["<|bos|>", "<|eos|>", "<|pad|>"], ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    texts = [text for pair in pairs for text in (render(pair["prompt"]) + pair["chosen"], pair["rejected"])]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, pair: Pair, side: str) -> list[int]:
    """Token ids of a conversation, with one start and one end token."""
    ids = [0, *tokenizer.encode(render(pair["prompt"]) + pair[side]).ids, 1]
    assert len(ids) <= LENGTH, "longer texts need a rule of truncation"
    return ids


class Norm(nn.RMSNorm):
    """Root mean square norm (Zhang & Sennrich, 2019)."""

    def __init__(self) -> None:
        super().__init__(WIDTH, eps=1e-6)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): each pair of features (i, i + half) turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class Block(nn.Module):
    """Causal self-attention and a gated feed-forward layer (Llama; Touvron et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down, self.norm_in, self.norm_out = nn.Linear(INNER, WIDTH, bias=False), Norm(), Norm()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Hidden states, shape (sequences, tokens, width)."""
        q, k, v = (f(self.norm_in(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        inner = self.norm_out(x)
        out: Tensor = x + self.down(silu(self.gate(inner)) * self.up(inner))
        return out


class RewardModel(nn.Module):
    """A small decoder whose reward is a linear function of the last token's hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.score = Norm(), nn.Linear(WIDTH, 1, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.12)

    def forward(self, rows: list[list[int]]) -> Tensor:
        """Reward of each sequence. Padding stands right of the last token, so a causal model never sees it."""
        longest = max(map(len, rows))
        x = self.embed(torch.tensor([[*row, *[2] * (longest - len(row))] for row in rows]))
        rates = 10000.0 ** -(torch.arange(0, WIDTH // HEADS, 2, dtype=x.dtype) / (WIDTH // HEADS))
        angles = torch.outer(torch.arange(longest, dtype=x.dtype), rates).repeat(1, 2)
        for block in self.blocks:
            x = block(x, angles)
        last = torch.tensor([len(row) - 1 for row in rows])
        rewards: Tensor = self.score(self.norm(x)[torch.arange(len(rows)), last])[:, 0]
        return rewards


def margins(model: RewardModel, batch: list[tuple[list[int], list[int]]]) -> Tensor:
    """Reward of the chosen less that of the rejected response, of each pair."""
    rewards: Tensor = model([row for pair in batch for row in pair])
    return rewards[0::2] - rewards[1::2]


def factor(step: int, num_steps: int) -> float:
    """Learning rate relative to its peak: linear warm-up, then half a cosine (Loshchilov & Hutter, 2017)."""
    warmup = math.ceil(round(WARMUP * num_steps, 9))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


def train(model: RewardModel, rows: list[tuple[list[int], list[int]]], num_steps: int) -> Iterator[float]:
    """Loss of each step: mean of -log sigmoid(margin) (Bradley & Terry, 1952), clipped, one AdamW step."""
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and name.startswith("blocks"))]
    groups: list[dict[str, Any]] = [{"params": hidden}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    steps_per_epoch = math.ceil(len(rows) / BATCH)
    for step in range(num_steps):
        epoch, place = divmod(step, steps_per_epoch)
        order = np.argsort(np.random.PCG64(np.random.SeedSequence([SEED, epoch])).random_raw(len(rows)), kind="stable")
        batch = [rows[i] for i in order[place * BATCH : (place + 1) * BATCH]]
        for group in optimizer.param_groups:
            group["lr"] = RATE * factor(step, num_steps)
        optimizer.zero_grad()
        loss = -logsigmoid(margins(model, batch)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield loss.item()


def accuracy(model: RewardModel, pairs: list[Pair], rows: list[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Share of pairs ranked right (a tie is half), and the half width of its 95 % interval over prompts."""
    with torch.no_grad():
        margin = torch.cat([margins(model, rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)])
    right = (0.5 + 0.5 * margin.sign()).double().numpy()
    number = {prompt: n for n, prompt in enumerate(dict.fromkeys(pair["prompt"] for pair in pairs))}
    lead = np.zeros(len(number))  # pairs of one prompt are alike, so prompts are what is drawn
    np.add.at(lead, [number[pair["prompt"]] for pair in pairs], right - right.mean())
    return float(right.mean()), 1.96 * math.sqrt((lead**2).sum() * len(lead) / (len(lead) - 1)) / len(right)


def main(train_file: str, val_file: str) -> None:
    """Train on one file, and print the loss and the accuracy on the other."""
    pairs, held_out = read(train_file), read(val_file)
    tokenizer = trained_tokenizer(pairs)
    rows, val_rows = (
        [(encode(tokenizer, pair, "chosen"), encode(tokenizer, pair, "rejected")) for pair in part]
        for part in (pairs, held_out)
    )
    torch.manual_seed(SEED)
    model, num_steps = RewardModel(), EPOCHS * math.ceil(len(rows) / BATCH)
    for step, loss in enumerate(train(model, rows, num_steps), 1):
        if step % 50 == 0 or step == num_steps:
            print(f"step {step:4d} of {num_steps}  loss {loss:.4f}")
    share, half = accuracy(model, held_out, val_rows)
    print(f"accuracy {share:.3f} ± {half:.3f} on {len(held_out):,} pairs")


if __name__ == "__main__":
    main(*sys.argv[1:])

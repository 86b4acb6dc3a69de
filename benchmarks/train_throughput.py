"""Training speed and memory beside TRL's RewardTrainer: same model, same pairs in every step, real HH-RLHF texts.

Both sides start from one folder and see the same token ids in the same order, `--batch-size` pairs a step, AdamW at a
constant rate, gradient norm at most 1, no dropout, equal precision, no gradient checkpointing. TRL pads at its
defaults; ours is at the defaults of `rm-opt train`. Sides take turns, `--rounds` times; a speed-up is the median over
rounds of TRL's seconds over ours. Seconds are those of `Trainer.train` and `Trainer.fit`, ours with its evaluation of
two pairs and its checkpoint: on a GPU of the clock, on a CPU of the process, which other work on the machine does not
lengthen; `wall_speedup` is by the clock in any case.

Memory is the growth of a fresh process's peak while it trains (on a GPU: the peak allocated). `loss_gap` is the largest
difference of a step's loss between our default path and our plain one: every pair in a pass of its own, no prefix
shared. `loss_gap_trl` is that to TRL. Tokens moved count computed padding; unique ones count a shared prompt once.
`--rounds 0` trains without TRL and prints the `share_of_limit` of `limit.py` at this model's steps, in each of
`--precisions`, with the profile's parts of a step.

    python benchmarks/train_throughput.py --pairs hh_train.jsonl.gz
    python benchmarks/train_throughput.py --pairs hh_train.jsonl.gz --models qwen   # on a GPU, bf16
    python benchmarks/train_throughput.py --pairs hh_train.jsonl.gz --rounds 0 --steps 8  # share_of_limit
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # and TRL sends no telemetry

import limit
import numpy as np
import pytorch_lightning as pl
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Prompt, as_messages
from rm_optimizer.core.tokens.batching import BatchShape, pair_collator
from rm_optimizer.core.tokens.cache import TokenizedPairs, tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.loader import MacroBatches
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.records.orders import epoch_order
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.callbacks.memory_profile import moved_tokens
from rm_optimizer.training.run import run_training

LEARNING_RATE = 1e-4
VOCABULARY = 8192
CHECK_PAIRS = 2
"""Validation pairs of ours, which the trainer wants."""
PLAIN = {"batching.prefix_sharing": "off", "batching.micro_token_budget": 1}
"""Our plain path: a pass for every pair, its prompt computed twice."""
SHAPES: dict[str, dict[str, Any]] = {
    "decoder": {
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 1024,
    },
    "encoder": {
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
    },
    "qwen": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "vocab_size": 151936,
    },
}
"""About 12M parameters, the shape of MiniLM-L6, and the shape of Qwen2.5-0.5B."""


@dataclass(frozen=True)
class Fit:
    """Result of one training.

    Args:
        seconds: seconds of the training loop, by the clock.
        cpu_seconds: process time of the same, all threads.
        losses: training loss of each step.
        memory_bytes: growth of the process's peak since just before the training call; on a GPU the peak allocated.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]
    memory_bytes: float


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pairs a second and memory of RM-Optimizer and of TRL, in turns.")
    parser.add_argument("--pairs", required=True, help="preference pairs, HH-RLHF say")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["decoder", "encoder"])
    parser.add_argument("--batch-size", type=int, default=16, help="pairs of one optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of one training")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--precisions", nargs="*", default=["32-true", "bf16-mixed"], help="of share_of_limit")
    parser.add_argument("--layers", type=int, help="layers, fewer for a quick look")
    parser.add_argument("--only", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.rounds and args.steps < limit.PROFILED + 2:
        parser.error(f"--rounds 0 needs --steps of at least {limit.PROFILED + 2}, got {args.steps}")
    return args


def write_model(args: argparse.Namespace, name: str, folder: Path) -> None:
    """A random classifier with one label, its tokenizer, and the pairs of `--steps` steps, in `folder`."""
    dataset = PreferenceDataset(args.pairs)
    tokenizer = train_tokenizer(rendered_texts(dataset.pairs), VOCABULARY)
    special = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    shape = {"vocab_size": len(tokenizer)} | SHAPES[name] | {"num_labels": 1, "hidden_dropout_prob": 0.0}
    shape["num_hidden_layers"] = args.layers or shape["num_hidden_layers"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, attention_probs_dropout_prob=0.0, **special)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    chosen = dataset.subset(args.batch_size * args.steps + CHECK_PAIRS, 0).pairs
    for file, pairs in (("train", chosen[:-CHECK_PAIRS]), ("val", chosen[-CHECK_PAIRS:])):
        rows = [{"prompt": _messages(p.prompt), "chosen": p.chosen, "rejected": p.rejected} for p in pairs]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in as_messages(prompt)]


def max_length(folder: Path) -> int:
    """Tokens that the model has positions for."""
    return int(AutoConfig.from_pretrained(folder).max_position_embeddings)


def tokens_of(folder: Path) -> tuple[TokenizedPairs, PreferenceDataset]:
    """The training pairs as both sides' token ids."""
    dataset = PreferenceDataset(folder / "train.jsonl")
    renderer = ConversationRenderer(AutoTokenizer.from_pretrained(folder), max_length(folder))
    return tokenize_pairs(dataset.pairs, renderer, None), dataset


def fit_trl(args: argparse.Namespace, folder: Path) -> Fit:
    """Train with TRL's RewardTrainer on our token ids, in the order of our seed 0."""
    from datasets import Dataset, disable_progress_bars
    from trl import RewardConfig, RewardTrainer

    disable_progress_bars()
    tokens = tokens_of(folder)[0]
    order = epoch_order(len(tokens), 0, 0).tolist()
    rows = [{"chosen_ids": tokens.chosen(i).tolist(), "rejected_ids": tokens.rejected(i).tolist()} for i in order]
    on_gpu = torch.cuda.is_available()
    config = RewardConfig(
        output_dir=str(folder / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        max_length=max_length(folder),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = RewardTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.remove_callback(PrinterCallback)
    before = _memory_mark()
    with stopwatch() as spent:
        trainer.train()
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    return Fit(*spent, losses, _memory_since(before))


def our_options(args: argparse.Namespace, folder: Path, **changed: Any) -> list[str]:
    """Options of our training, defaults but for what both sides share and `changed`."""
    on_gpu = torch.cuda.is_available()
    values: dict[str, Any] = {
        "model": "minilm",
        "model.path": folder,
        "model.max_length": max_length(folder),
        "data.train": folder / "train.jsonl",
        "data.val": folder / "val.jsonl",
        "data.allow_prompt_overlap": "true",
        "batching.batch_size": args.batch_size,
        "optimizer.lr": LEARNING_RATE,
        "optimizer.weight_decay": 0.0,
        "schedule": "constant",
        "schedule.warmup_ratio": 0,
        "training.max_steps": args.steps,
        "training.evals_per_epoch": 1,
        "training.eval_at_start": "false",
        "training.checkpoint_every": args.steps + 1,
        "training.num_bootstrap": 100,
        "training.progress": "false",
        "hardware.num_threads": args.threads,
        "hardware.precision": "bf16-mixed" if on_gpu else "32-true",
        "logger.tensorboard": "false",
        **changed,
    }
    return [f"{name}={value}" for name, value in values.items()]


def fit_ours(args: argparse.Namespace, folder: Path, **changed: Any) -> Fit:
    """Train with `run_training` at its defaults, but for `changed`."""
    with tempfile.TemporaryDirectory() as run_dir:
        config = typed(compose(our_options(args, folder, **changed, output_dir=run_dir)), TrainConfig)
        before = _memory_mark()
        spent: list[float] = []
        with patch.object(pl.Trainer, "fit", timed(pl.Trainer.fit, spent)):
            run_training(config)
        memory = _memory_since(before)
        with open(Path(run_dir) / "metrics.csv", newline="") as file:
            losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return Fit(*spent, losses, memory)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Fills the list it gives with the seconds of the block, by the clock and of the process."""
    spent: list[float] = []
    wall, cpu = time.perf_counter(), time.process_time()
    yield spent
    spent += [time.perf_counter() - wall, time.process_time() - cpu]


def timed(fit: Callable[..., None], spent: list[float]) -> Callable[..., None]:
    """`fit`, which also leaves its seconds in `spent`."""

    def measured(*args: Any, **kwargs: Any) -> None:
        with stopwatch() as seconds:
            fit(*args, **kwargs)
        spent.extend(seconds)

    return measured


def _memory_mark() -> float:
    """Forget the peak so far; bytes held now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return 0.0
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _memory_since(before: float) -> float:
    return (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status_bytes("VmHWM")) - before


def _status_bytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def in_a_process(args: argparse.Namespace, side: str, folder: Path) -> Fit:
    """One side's training in a process of its own, where the peak is its own."""
    given = ("pairs", "batch_size", "steps", "threads")
    command = [sys.executable, __file__, "--only", side, str(folder)]
    command += [word for name in given for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Fit(**json.loads(done.stdout.splitlines()[-1]))


def tokens_moved(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Tokens of our passes and of TRL's padding over unique ones, and ours over real ones."""
    tokens, dataset = tokens_of(folder)
    model = BradleyTerryRM.from_pretrained(folder, max_length=max_length(folder), new_head=True)
    shares = model.supports_prefix_sharing() is None
    collator = pair_collator(tokens, dataset.pairs, model.renderer.pad_token_id, prefix_sharing=shares)
    budget = typed(compose(["model=minilm", "output_dir=x"]), TrainConfig).batching.micro_token_budget
    batches = MacroBatches(collator, BatchShape(args.batch_size, budget), seed=0)
    micro = [batch for step in range(args.steps) for batch in batches[step].micro]
    real, unique = (sum(getattr(batch, name) for batch in micro) for name in ("num_tokens", "num_unique_tokens"))
    moved = sum(moved_tokens(batch, model.model) for batch in micro)
    steps = epoch_order(len(tokens), 0, 0).reshape(args.steps, -1)
    padded = sum(2 * len(step) * int(tokens.lengths[step].max()) for step in steps)
    return {
        "moved_over_unique": moved / unique,
        "moved_over_real": moved / real,
        "trl_moved_over_unique": padded / unique,
    }


def share_of_limit(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Shares of the rate of the products that our steps reach, and the parts of their seconds, by precision."""
    found = {}
    for precision in args.precisions:
        with tempfile.TemporaryDirectory() as run_dir:
            values = limit.measure(our_options(args, folder), precision, Path(run_dir), args.steps)
        name = precision.partition("-")[0]
        kept = {key: value for key, value in values.items() if key.startswith(("product", "part"))}
        found |= {f"share_of_limit_{name}": values["train_share_of_limit"]}
        found |= {f"{key}_{name}": value for key, value in kept.items()}
    return found


def _seconds(fit: Fit) -> float:
    return fit.seconds if torch.cuda.is_available() else fit.cpu_seconds


def gap(first: list[float], second: list[float]) -> float:
    """Largest difference of a step's loss."""
    return float(np.max(np.abs(np.subtract(first, second))))


def measure(args: argparse.Namespace, name: str, folder: Path) -> dict[str, float]:
    """Everything about one model."""
    write_model(args, name, folder)
    if not args.rounds:
        return share_of_limit(args, folder)
    ratios, wall_ratios, trl, ours = [], [], None, None
    for turn in range(args.rounds):
        trl, ours = fit_trl(args, folder), fit_ours(args, folder)
        ratios.append(_seconds(trl) / _seconds(ours))
        wall_ratios.append(trl.seconds / ours.seconds)
        print(f"{name} round {turn + 1}: TRL {_seconds(trl):.1f} s, ours {_seconds(ours):.1f} s, {ratios[-1]:.2f}x")
    assert trl is not None, "at least one round"
    assert ours is not None, "at least one round"
    plain = fit_ours(args, folder, **PLAIN)
    memory = {side: in_a_process(args, side, folder).memory_bytes for side in ("trl", "ours")}
    for side, fit in (("ours", ours), ("TRL", trl)):
        print(f"{name} losses of {side}: {', '.join(f'{loss:.5f}' for loss in fit.losses)}")
    return {
        "speedup": median(ratios),
        "speedup_low": min(ratios),
        "speedup_high": max(ratios),
        "wall_speedup": median(wall_ratios),
        **tokens_moved(args, folder),
        "memory_ratio": memory["ours"] / memory["trl"],
        "loss_gap": gap(ours.losses, plain.losses),
        "loss_gap_trl": gap(ours.losses, trl.losses),
    }


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    if args.only:
        fit = {"trl": fit_trl, "ours": fit_ours}[args.only[0]](args, Path(args.only[1]))
        print(json.dumps(vars(fit)))
        return
    started, rows = time.perf_counter(), {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = measure(args, name, Path(folder))
    print(f"wall_seconds: {time.perf_counter() - started:.0f}")
    for name, row in rows.items():
        for key, value in row.items():
            print(f"{key}_{name}: {value:.4g}")
    if not args.rounds:
        return
    print(f"tokens_over_unique: {min(row['moved_over_unique'] for row in rows.values()):.4f}")
    print(f"memory_ratio: {max(row['memory_ratio'] for row in rows.values()):.4f}")
    print(f"loss_gap: {max(row['loss_gap'] for row in rows.values()):.3g}")


if __name__ == "__main__":
    main()

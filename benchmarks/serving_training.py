"""A trainer and a server as two processes: does what the server answers get better, and is it what the trainer has?

`rm-opt serve` starts with the untrained reward model, `rm-opt train` publishes its weights to it at every evaluation,
and the held-out pairs are scored through the server at each version. The trainer stands still (SIGSTOP) meanwhile, so
that no version is missed and one core is enough.

    OMP_NUM_THREADS=1 python benchmarks/serving_training.py --model MINILM --pairs pairs_train.parquet \
        --val pairs_val.parquet --only subset=harmless-base --move 400

The setting was fixed before that run. HH's two halves ask for opposite things of the same requests, and a 22M encoder
that sees both learns next to nothing of either: linear probes of its features, cross-validated within the training
file, tell the pairs of one half apart and hardly those of both together. So one half is trained on, harmless-base; the
learning rate was tried on the other. 400 training pairs, with all of their prompts, are held out too, as 189 pairs
decide little. Epochs, length and number of versions keep it near ten minutes of one core.

Compared with the trainer's own evaluation of the same step are accuracy, the quantiles of the rewards of both sides,
and at the best step the rewards of every pair. Intervals are bootstraps over prompts, those of a rise paired.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from quality_trl import paired_differences
from serving_consistency import server

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.audit import length_baseline
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.evaluation.pair_rewards import PairRewards, metrics_of, reward_distribution
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.serving.client.client import RewardClient

NUM_BOOTSTRAP = 2000
PROGRAM = "from rm_optimizer.interfaces.cli import app; app()"


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure held-out accuracy through a server that a trainer updates.")
    add = parser.add_argument
    add("--model", required=True, help="folder of the encoder's weights, MiniLM say")
    add("--pairs", required=True, help="training pairs")
    add("--val", required=True, help="held-out pairs")
    add("--only", help="take rows with this value of a column alone, `subset=harmless-base` say")
    add("--move", type=int, default=0, help="about so many training pairs, with all of their prompts, are held out too")
    add("--epochs", type=int, default=2)
    add("--versions", type=int, default=2, help="versions published in an epoch")
    add("--lr", type=float, default=1e-4, help="AdamW's peak learning rate")
    add("--batch-size", type=int, default=16, help="pairs of one optimizer step")
    add("--max-length", type=int, default=96, help="tokens of prompt and response together")
    add("--seed", type=int, default=0, help="of head, subset and order")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class HeldOut:
    """The held-out pairs, and which of them differ after truncation: those that the trainer evaluates."""

    data: PreferenceDataset
    pair_index: np.ndarray

    @classmethod
    def of(cls, data: PreferenceDataset, renderer: ConversationRenderer) -> HeldOut:
        """The pairs, as this renderer cuts them."""
        return cls(data, np.asarray(tokenize_pairs(data.pairs, renderer, None).pair_index))

    @property
    def pairs(self) -> list[PreferencePair]:
        """Those that differ."""
        return [self.data[int(index)] for index in self.pair_index]

    def served(self, client: RewardClient) -> tuple[str, PairRewards]:
        """The version that answers, and its rewards."""
        prompts, pairs = [pair.prompt for pair in self.pairs], self.pairs
        responses = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        scored = client.score_versioned(prompts * 2, responses)
        chosen, rejected = np.array(scored.rewards, dtype=np.float64).reshape(2, -1)
        return scored.version, PairRewards(chosen, rejected, self.pair_index)


def split(args: argparse.Namespace, scratch: Path) -> tuple[PreferenceDataset, PreferenceDataset]:
    """Training and held-out pairs, written to and read again from `train.jsonl` and `val.jsonl`."""
    column, _, value = (args.only or "").partition("=")
    train, val = (
        [
            pair
            for pair in PreferenceDataset(path, on_bad_row="drop").pairs
            if not column or str(pair.metadata.get(column)) == value
        ]
        for path in (args.pairs, args.val)
    )
    if args.move:
        kept, moved = divided([pair.prompt_id for pair in train], args.move, np.random.default_rng(args.seed))
        train, val = [train[i] for i in kept], val + [train[i] for i in moved]
    for name, pairs in (("train", train), ("val", val)):
        lines = (json.dumps(pair.to_dict()) + "\n" for pair in pairs)
        (scratch / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    first, second = (PreferenceDataset(str(scratch / f"{name}.jsonl")) for name in ("train", "val"))
    return first, second


def divided(prompts: list[str], num_moved: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Rows that stay, and at most `num_moved` others; the two share no prompt."""
    rows, num_kept = rng.permutation(len(prompts)).tolist(), len(prompts) - num_moved
    names = rng.permutation(sorted(set(prompts))).tolist()
    first = set(names[: round(len(names) * num_kept / len(prompts))])
    kept, moved = ([row for row in rows if (prompts[row] in first) == stays] for stays in (True, False))
    return sorted(kept[:num_kept]), sorted(moved[:num_moved])


def trainer_command(args: argparse.Namespace, scratch: Path, url: str, every: int) -> list[str]:
    values = {
        "model": "minilm",
        "model.path": scratch / "untrained",
        "model.max_length": args.max_length,
        "data.train": scratch / "train.jsonl",
        "data.val": scratch / "val.jsonl",
        "batching.batch_size": args.batch_size,
        "batching.micro_token_budget": 2048,
        "optimizer.lr": args.lr,
        "optimizer.weight_decay": 0.0,
        "training.epochs": args.epochs,
        "training.evals_per_epoch": args.versions,
        "training.progress": "false",
        "training.num_bootstrap": 100,
        "hardware": "cpu",
        "hardware.num_threads": 1,
        "logger.tensorboard": "false",
        "publish.url": url,
        "publish.every_n_steps": every,
        "publish.timeout_seconds": 600,
        "seed": args.seed,
        "output_dir": scratch / "run",
        "hydra.run.dir": scratch / "run",
    }
    return [sys.executable, "-c", PROGRAM, "train", *(f"{name}={value}" for name, value in values.items())]


@contextmanager
def standing_still(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The process does nothing within the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def served_by_step(client: RewardClient, held_out: HeldOut, command: list[str]) -> dict[int, PairRewards]:
    """Rewards of the held-out pairs by step: before the training, and of every version that it publishes."""
    untrained, rewards = held_out.served(client)
    found, seen = {0: rewards}, untrained
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as trainer:
        try:
            is_over = False
            while not is_over:
                is_over = trainer.poll() is not None
                if client.version != seen:
                    with standing_still(trainer):
                        seen, rewards = held_out.served(client)
                    found[int(seen.rpartition("-")[2])] = rewards
                    is_over = False
                time.sleep(0.05)
        except BaseException:
            trainer.kill()
            raise
    if trainer.returncode:
        raise SystemExit(f"the trainer ended with code {trainer.returncode}")
    return found


@dataclass(frozen=True)
class Row:
    """One step: what the server's rewards are worth, what the trainer's were, and how far the two are apart."""

    step: int
    served: PairwiseMetrics
    trained: PairwiseMetrics
    reward_gap: float


def rows_of(found: Mapping[int, PairRewards], held_out: HeldOut, run: Path) -> list[Row]:
    rows = []
    for step, rewards in found.items():
        folder = run / "evaluations" / f"step-{step:08d}"
        served = metrics_of(rewards, held_out.data, beta=1.0, num_bootstrap=NUM_BOOTSTRAP, seed=0)
        trained = PairwiseMetrics.from_json((folder / "metrics.json").read_text())
        own = json.loads((folder / "reward_distributions.json").read_text())
        ours = reward_distribution(rewards, step)
        gaps = [
            abs(value - own[side]["quantiles"][name])
            for side in ("chosen", "rejected")
            for name, value in ours[side]["quantiles"].items()
        ]
        rows.append(Row(step, served, trained, max(gaps)))
    return rows


def gap_of_every_pair(found: Mapping[int, PairRewards], run: Path) -> float:
    """Largest difference of one reward at the best step, whose rewards the trainer keeps."""
    rewards = found[int(json.loads((run / "run.json").read_text())["best_step"])]
    own = RunFolder(run).pair_rewards()
    gaps = [
        np.abs(getattr(rewards, side) - [getattr(row, side) for row in own]).max() for side in ("chosen", "rejected")
    ]
    return float(max(gaps))


def report(rows: list[Row], found: Mapping[int, PairRewards], held_out: HeldOut, every_pair: float) -> None:
    """Print accuracy by step and by source, then `name: value` lines."""
    print(f"{'step':>6}  {'accuracy, served':22} {'trainer':>8} {'NLL':>7} {'largest reward gap':>19}")
    for row in rows:
        numbers = f"{row.trained.accuracy.value:8.4f} {row.served.nll.value:7.4f} {row.reward_gap:19.1e}"
        print(f"{row.step:6d}  {row.served.accuracy!s:22} {numbers}")
    pairs, first, last = held_out.pairs, found[rows[0].step].margin, found[rows[-1].step].margin
    sources = np.array([str(pair.metadata.get("source", "")) for pair in pairs])
    print(f"{'source':26} {'pairs':>6} {'longer wins':>12} {'first':>7} {'last':>7}  rise")
    for source in ("all", *sorted(set(sources) - {""})):
        inside = np.flatnonzero((sources == source) | (source == "all"))
        chosen = [pairs[i] for i in inside]
        prompts = [pair.prompt_id for pair in chosen]
        rise = paired_differences(last[inside], first[inside], prompts, num_bootstrap=NUM_BOOTSTRAP, seed=0)["accuracy"]
        means = [(0.5 + 0.5 * np.sign(margin[inside])).mean() for margin in (first, last)]
        shown = f"{length_baseline(chosen).value:12.3f} {means[0]:7.3f} {means[1]:7.3f}"
        print(f"{source:26} {len(chosen):6d} {shown}  {rise:+.3f}")
        if source == "all":
            total = rise
    for name, row in (("first", rows[0]), ("last", rows[-1])):
        accuracy = row.served.accuracy
        print(f"accuracy_{name}: {accuracy.value:.4f}\naccuracy_{name}_low: {accuracy.low:.4f}")
        print(f"accuracy_{name}_high: {accuracy.high:.4f}")
    print(f"accuracy_rise: {total.value:.4f}\naccuracy_rise_low: {total.low:.4f}\naccuracy_rise_high: {total.high:.4f}")
    accuracy_gap = max(abs(row.served.accuracy.value - row.trained.accuracy.value) for row in rows)
    print(f"largest_accuracy_gap: {accuracy_gap:.6g}")
    print(f"largest_reward_gap: {max(every_pair, *(row.reward_gap for row in rows)):.3g}")


def measure(args: argparse.Namespace, scratch: Path) -> None:
    started = time.perf_counter()
    model = BradleyTerryRM.from_pretrained(args.model, max_length=args.max_length, seed=args.seed, new_head=True)
    model.save_pretrained(scratch / "untrained")
    train, val = split(args, scratch)
    held_out = HeldOut.of(val, model.renderer)
    steps = math.ceil(len(tokenize_pairs(train.pairs, model.renderer, None)) / args.batch_size)
    every = max(1, steps // args.versions)
    (scratch / "root").mkdir()
    with (
        server("transformers", sys.executable, scratch / "untrained", scratch / "root") as (url, _),
        RewardClient(url, renderer=model.renderer, timeout_seconds=600) as client,
    ):
        found = served_by_step(client, held_out, trainer_command(args, scratch, url, every))
    expected = sorted({0, *range(every, args.epochs * steps + 1, every), args.epochs * steps})
    if list(found) != expected:
        raise SystemExit(f"expected versions of steps {expected}, the server gave {list(found)}")
    print(f"{len(train)} training pairs, {args.epochs} epochs of {steps} steps, {time.perf_counter() - started:.0f} s")
    run = scratch / "run"
    report(rows_of(found, held_out, run), found, held_out, gap_of_every_pair(found, run))


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        measure(args, Path(scratch))


if __name__ == "__main__":
    main()

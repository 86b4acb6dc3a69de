"""Quality of our training beside TRL's RewardTrainer: same weights, pairs, tokens, length, epochs, batch and schedule.

Both sides start from the same encoder and see the same token ids: our reader and renderer make them, over-long
conversations cut and identical pairs dropped, and TRL takes them as `chosen_ids` and `rejected_ids`. AdamW without
decay, warm-up then cosine, gradient norm at most 1, and precision are equal; TRL is otherwise at its defaults, which
means gradient checkpointing (the same numbers in less memory and more time) and random batches padded to their longest
sequence. Each side draws its own fresh head and its own order of pairs from the seed. Both final models are then loaded
by `BradleyTerryRM`, scored in float32 and measured by one piece of code.

`wall_seconds` and `cpu_seconds` are those of a side's whole training call, `train_wall_seconds` of its optimizer steps.
TRL's call loads the model and trains; ours also reads and tokenizes the data, evaluates twice, exports and certifies.

    python benchmarks/quality_trl.py --model MINILM --train train.parquet --val val.parquet --output outputs/quality
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # and TRL sends no telemetry

import numpy as np
import torch
from scipy.special import log_expit
from transformers import AutoTokenizer

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.metrics.calibration import NUM_BINS, equal_width_bins, fold
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.audit import length_baseline
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.evaluation.pair_rewards import PairRewards, metrics_of, score_pairs
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.run import run_training

SIDES = ("trl", "ours")
COMPARED = ("accuracy", "nll", "ece")
WARMUP_RATIO = 0.03
EVAL_TOKEN_BUDGET = 16384
MICRO_TOKEN_BUDGET = 2048
"""Ours: small enough that a macro-batch is cut into passes of like length; the gradient is the same with any."""


@dataclass(frozen=True)
class Side:
    """One trained side.

    Args:
        settings: settings of its training.
        model: folder of its final weights.
        steps: optimizer steps.
        exported_step: step whose weights were exported.
        wall_seconds: seconds of the training call.
        cpu_seconds: process time of the training call, all threads.
        train_wall_seconds: seconds of the optimizer steps alone.
    """

    settings: dict[str, Any]
    model: str
    steps: int
    exported_step: int
    wall_seconds: float
    cpu_seconds: float
    train_wall_seconds: float


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with RM-Optimizer and with TRL, and compare held-out quality.")
    parser.add_argument("--model", required=True, help="folder of the encoder's weights, MiniLM say")
    parser.add_argument("--train", required=True, help="training pairs")
    parser.add_argument("--val", required=True, help="validation pairs")
    parser.add_argument("--output", type=Path, required=True, help="folder for models, rewards and comparison.json")
    parser.add_argument("--num-pairs", type=int, help="train on a random subset of this many pairs; default all")
    parser.add_argument("--subset-seed", type=int, default=0, help="seed of that subset")
    parser.add_argument("--seed", type=int, default=0, help="seed of heads and orders")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="pairs of one optimizer step")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=256, help="tokens of prompt and response together")
    parser.add_argument(
        "--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed", help="TRL's default first"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--bootstrap", type=int, default=2000, help="resamples over prompts")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="which sides to train")
    parser.add_argument("--reuse", action="store_true", help="keep the sides that are already trained in --output")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide a side's weights."""
    names = ("num_pairs", "subset_seed", "seed", "epochs", "batch_size", "learning_rate", "max_length", "precision")
    paths = {name: str(Path(getattr(args, name)).resolve()) for name in ("model", "train", "val")}
    return paths | {name: getattr(args, name) for name in names} | {"threads": args.threads}


def training_pairs(args: argparse.Namespace) -> PreferenceDataset:
    """The training pairs, or the stated random subset of them."""
    dataset = PreferenceDataset(args.train)
    return dataset if args.num_pairs is None else dataset.subset(args.num_pairs, args.subset_seed)


def train_trl(args: argparse.Namespace, folder: Path) -> Side:
    """Train with TRL's RewardTrainer on our token ids."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pairs = training_pairs(args).pairs
    tokens = tokenize_pairs(pairs, ConversationRenderer(tokenizer, args.max_length), None)
    rows = [
        {"chosen_ids": tokens.chosen(i).tolist(), "rejected_ids": tokens.rejected(i).tolist()}
        for i in range(len(tokens))
    ]
    config = RewardConfig(
        output_dir=str(folder / "trainer"),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_RATIO,
        max_length=args.max_length,
        bf16=args.precision == "bf16-mixed",
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    trainer = RewardTrainer(
        model=args.model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    assert len(trainer.train_dataset) == len(rows), "TRL dropped pairs that were already cut to the length"
    steps_started = time.perf_counter()
    trainer.train()
    stopped = time.perf_counter(), time.process_time()
    trainer.save_model(str(folder / "model"))
    steps = trainer.state.global_step
    seconds = stopped[0] - wall, stopped[1] - cpu, stopped[0] - steps_started
    return Side(settings_of(args), str(folder / "model"), steps, steps, *seconds)


def our_config(args: argparse.Namespace, folder: Path) -> TrainConfig:
    """The same training in our options; one evaluation after the last step, so that the export is the final weights."""
    values: dict[str, Any] = {
        "model": "minilm",
        "model.path": args.model,
        "model.max_length": args.max_length,
        "data.train": args.train,
        "data.val": args.val,
        "data.max_pairs": "null" if args.num_pairs is None else args.num_pairs,
        "data.split_seed": args.subset_seed,
        "batching.batch_size": args.batch_size,
        "batching.micro_token_budget": MICRO_TOKEN_BUDGET,
        "optimizer": "adamw",
        "optimizer.lr": args.learning_rate,
        "optimizer.weight_decay": 0.0,
        "schedule": "cosine",
        "schedule.warmup_ratio": WARMUP_RATIO,
        "training.epochs": args.epochs,
        "training.evals_per_epoch": 1,
        "training.eval_at_start": "false",
        "training.progress": "false",
        "hardware.num_threads": args.threads,
        "hardware.precision": args.precision,
        "logger.tensorboard": "false",
        "seed": args.seed,
        "output_dir": folder / "run",
    }
    return typed(compose([f"{name}={value}" for name, value in values.items()]), TrainConfig)


def train_ours(args: argparse.Namespace, folder: Path) -> Side:
    """Train with `run_training`."""
    config = our_config(args, folder)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run_training(config)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps_seconds = result.steps * args.batch_size / result.pairs_per_second
    return Side(settings_of(args), result.export, result.steps, result.best_step, wall, cpu, steps_seconds)


TRAIN: Mapping[str, Callable[[argparse.Namespace, Path], Side]] = {"trl": train_trl, "ours": train_ours}


def trained(args: argparse.Namespace, name: str) -> Side | None:
    """The side from --output, or trained now; None if it is neither there nor asked for."""
    folder = args.output / name
    record = folder / "side.json"
    wanted = settings_of(args)
    if record.is_file() and (args.reuse or name not in args.sides):
        side = Side(**json.loads(record.read_text()))
        changed = sorted(key for key in wanted if side.settings.get(key) != wanted[key])
        if changed:
            raise SystemExit(f"{record} was trained with other {', '.join(changed)}; give another --output")
        return side
    if name not in args.sides:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.npz").unlink(missing_ok=True)
    side = TRAIN[name](args, folder)
    record.write_text(json.dumps(asdict(side), indent=1) + "\n")
    return side


def validation_rewards(args: argparse.Namespace, name: str, side: Side, val: PreferenceDataset) -> PairRewards:
    """Rewards of the side's final weights on all validation pairs, computed once."""
    path = args.output / name / "rewards.npz"
    if not path.is_file():
        model = BradleyTerryRM.from_pretrained(side.model, max_length=args.max_length)
        tokens = tokenize_pairs(val.pairs, model.renderer, None)
        rewards = score_pairs(model, tokens, val, token_budget=EVAL_TOKEN_BUDGET, prefix_sharing=False)
        np.savez(path, chosen=rewards.chosen, rejected=rewards.rejected, pair_index=rewards.pair_index)
    with np.load(path) as saved:
        return PairRewards(saved["chosen"], saved["rejected"], saved["pair_index"])


def paired_differences(
    ours: np.ndarray, theirs: np.ndarray, prompt_ids: list[str], *, num_bootstrap: int, seed: int
) -> dict[str, Estimate]:
    """Our accuracy, NLL and ECE less theirs, with intervals from resampling prompts, both sides resampled together.

    Args:
        ours: our margins, chosen less rejected.
        theirs: their margins of the same pairs.
        prompt_ids: prompt of each pair.
        num_bootstrap: resamples.
        seed: seed of the resampling.
    """
    terms = np.concatenate([_terms(ours), _terms(theirs), np.ones((len(ours), 1))], axis=1)
    cluster = np.unique(np.array(prompt_ids), return_inverse=True)[1]
    sums = np.zeros((int(cluster.max()) + 1, terms.shape[1]))
    np.add.at(sums, cluster, terms)
    width = NUM_BINS + 2

    def difference(totals: np.ndarray) -> np.ndarray:
        ours_less_theirs = _side_statistics(totals[..., :width], totals) - _side_statistics(
            totals[..., width:-1], totals
        )
        return np.asarray(ours_less_theirs)

    estimates = cluster_bootstrap(sums, difference, num_bootstrap=num_bootstrap, seed=seed)
    return dict(zip(COMPARED, estimates, strict=True))


def _terms(margin: np.ndarray) -> np.ndarray:
    """Per pair: half-credit accuracy, NLL, and the calibration gap in its bin."""
    folded = fold(margin, np.ones_like(margin), np.ones_like(margin))
    gaps = np.zeros((len(margin), NUM_BINS))
    gaps[np.arange(len(margin)), equal_width_bins(folded.confidence)] = folded.confidence - folded.outcome
    return np.concatenate([(0.5 + 0.5 * np.sign(margin))[:, None], -log_expit(margin)[:, None], gaps], axis=1)


def _side_statistics(totals: np.ndarray, all_totals: np.ndarray) -> np.ndarray:
    ece = np.abs(totals[..., 2:]).sum(axis=-1, keepdims=True)
    return np.asarray(np.concatenate([totals[..., :2], ece], axis=-1) / all_totals[..., -1:])


def compare(args: argparse.Namespace, sides: Mapping[str, Side]) -> dict[str, Any]:
    """Everything the comparison says, as JSON values."""
    val = PreferenceDataset(args.val)
    rewards = {name: validation_rewards(args, name, side, val) for name, side in sides.items()}
    metrics = {
        name: metrics_of(value, val, beta=1.0, num_bootstrap=args.bootstrap, seed=0) for name, value in rewards.items()
    }
    pairs = [val[int(i)] for i in rewards["ours"].pair_index]
    assert np.array_equal(rewards["ours"].pair_index, rewards["trl"].pair_index), "the sides scored different pairs"
    sources = np.array([str(pair.metadata.get("source", "")) for pair in pairs])
    rows = {}
    for source in ("all", *sorted(set(sources))):
        inside = np.flatnonzero((sources == source) | (source == "all"))
        chosen = [pairs[i] for i in inside]
        difference = paired_differences(
            rewards["ours"].margin[inside],
            rewards["trl"].margin[inside],
            [pair.prompt_id for pair in chosen],
            num_bootstrap=args.bootstrap,
            seed=0,
        )
        rows[source] = {
            "num_pairs": len(chosen),
            "num_prompts": len({pair.prompt_id for pair in chosen}),
            "length_baseline": length_baseline(chosen).value,
            **{name: _numbers(_member(metrics[name], source)) for name in SIDES},
            "difference": {name: asdict(value) for name, value in difference.items()},
        }
    return {
        "settings": settings_of(args),
        "num_val_pairs_given": len(val),
        "sides": {name: asdict(side) for name, side in sides.items()},
        "results": rows,
    }


def _member(metrics: PairwiseMetrics, source: str) -> PairwiseMetrics:
    groups = metrics.groups.get("source", {})
    return groups.get(source, metrics)


def _numbers(metrics: PairwiseMetrics) -> dict[str, Any]:
    return {name: asdict(getattr(metrics, name)) for name in COMPARED}


def report(comparison: Mapping[str, Any]) -> None:
    """Print the table by source, then `name: value` lines."""
    print(f"{'source':26} {'pairs':>6} {'prompts':>7} {'length':>7} {'trl':>6} {'ours':>6}  accuracy difference")
    for source, row in comparison["results"].items():
        value = Estimate(**row["difference"]["accuracy"])
        accuracies = f"{row['trl']['accuracy']['value']:6.3f} {row['ours']['accuracy']['value']:6.3f}"
        counts = f"{row['num_pairs']:6d} {row['num_prompts']:7d} {row['length_baseline']:7.3f}"
        print(f"{source:26} {counts} {accuracies}  {value:+.3f}")
    total = comparison["results"]["all"]
    print(f"num_val_pairs: {total['num_pairs']}")
    for name in COMPARED:
        difference = total["difference"][name]
        print(f"{name}_ours: {total['ours'][name]['value']:.4f}")
        print(f"{name}_trl: {total['trl'][name]['value']:.4f}")
        print(f"{name}_difference: {difference['value']:.4f}")
        print(f"{name}_difference_low: {difference['low']:.4f}")
        print(f"{name}_difference_high: {difference['high']:.4f}")
    print(f"length_baseline: {total['length_baseline']:.4f}")
    for name, side in comparison["sides"].items():
        for key in ("steps", "exported_step", "wall_seconds", "cpu_seconds", "train_wall_seconds"):
            print(f"{key}_{name}: {side[key]:.6g}")


def main(argv: list[str] | None = None) -> None:
    args = options(argv)
    torch.set_num_threads(args.threads)
    sides = {name: side for name in SIDES if (side := trained(args, name)) is not None}
    for name, side in sides.items():
        print(f"{name}: {side.steps} steps, {side.cpu_seconds:.0f} CPU seconds, weights in {side.model}")
    if len(sides) < len(SIDES):
        return
    comparison = compare(args, sides)
    text = json.dumps(comparison, indent=1)
    temporary = args.output / ".comparison.json.tmp"
    temporary.write_text(text + "\n")
    os.replace(temporary, args.output / "comparison.json")
    report(comparison)


if __name__ == "__main__":
    main()

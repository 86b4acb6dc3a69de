"""Five hypotheses about training reward models, tested with the presets of `configs/experiment` on real pairs.

What confirms and what refutes each was fixed before the runs. An effect is positive where it speaks for the hypothesis;
`confirmed` needs the whole 95 % interval above the threshold, `refuted` none of it above, anything else is `undecided`
at this scale. Where a hypothesis has two parts, one refuted part refutes it and both must be confirmed.

H1  Pair-atomic, length-sorted micro-batches with exact pair weights give the gradient of one padded pass over the same
    pairs (largest difference at most 1e-4 of the largest entry, float32; above that: refuted) in less CPU time
    (log ratio above 0). How far the mean of micro-batch means is from that gradient is reported beside it.
H2  The scheduler (ablation_a2 against ablation_a1) lowers test NLL minus training NLL of the last weights (above 0).
H3  Label smoothing (ablation_a3 against ablation_a2) lowers the test ECE of the last weights (above 0).
H4  LoRA of rank 16 (lora_r16 against full_finetune) is at most 3 points of test accuracy worse (above -0.03); undecided
    as long as full fine-tuning's own accuracy cannot be told from chance.
H5  Early stopping (ablation_a4's best weights against ablation_a3's last) costs at most 0.005 nats of test NLL (above
    -0.005) and saves steps (share above 0).

Training takes a random subset of the pairs. Validation is cut to `--pairs-per-prompt` pairs a prompt, so that no prompt
decides alone, and divided by prompt: early stopping watches one part, and every figure is computed on the other.

Arms share seeds and test pairs, so all effects are paired; `rm_optimizer.core.metrics.effects` says how intervals are
computed.

    python benchmarks/hypotheses.py --model-path MINILM --train train.parquet --val val.parquet --output outputs/trials

Finished trials are kept in --output; the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow.parquet as pq
import torch
from batching_cost import batching_row, gradients
from scipy.special import log_expit

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.metrics.effects import SCORES, Verdict, both, paired_effect, verdict
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import crossed_mean
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.audit import length_baseline
from rm_optimizer.core.tokens.batching import MacroBatches, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.experiments.training_trial import margins_of, train_and_score
from rm_optimizer.experiments.trials import Trial, run_trial
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.run import build_model

ARMS = ("ablation_a1", "ablation_a2", "ablation_a3", "ablation_a4", "full_finetune", "lora_r16")
"""Presets trained for each seed."""
GAP_ARMS = ("ablation_a1", "ablation_a2")
"""Presets whose training pairs are scored too."""
STOPPING_ARM = "ablation_a4"
GRADIENT_TOLERANCE = 1e-4
ONE_PASS = 10**9
"""A token budget that no macro-batch exceeds."""


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Test five hypotheses about training reward models.")
    add = parser.add_argument
    add("--model-path", help="folder of the weights, MiniLM say; none builds the preset's architecture")
    add("--model", default="minilm", help="preset of the model group")
    add("--train", required=True, help="training pairs, parquet with a prompt column")
    add("--val", required=True, help="validation pairs, likewise")
    add("--output", type=Path, required=True, help="folder for trials and hypotheses.json")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--num-train", type=int, default=1200, help="training pairs, drawn at random")
    add("--num-test", type=int, default=800, help="most validation pairs that figures are computed on")
    add("--num-select", type=int, default=200, help="most validation pairs that early stopping watches")
    add("--pairs-per-prompt", type=int, default=50, help="most validation pairs of one prompt")
    add("--subset-seed", type=int, default=0, help="seed of these subsets")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=16, help="pairs of one optimizer step")
    add("--adamw-lr", type=float, default=5e-5, help="AdamW's learning rate; LoRA takes ten times it")
    add("--max-length", type=int, default=128, help="tokens of prompt and response together")
    add("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="of training and of scoring")
    add("--attention", default="auto", help="attention kernel")
    add("--hardware", default="cpu", help="preset of the hardware group")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--micro-token-budget", type=int, default=2048, help="tokens of one pass")
    add("--batching-length", type=int, default=256, help="tokens of a conversation in H1's comparison")
    add("--batching-pairs", type=int, default=16, help="pairs of a macro-batch in H1's comparison")
    add("--batching-steps", type=int, default=4, help="macro-batches of H1's comparison for each seed")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Splits:
    """Files of the drawn pairs."""

    train: Path
    select: Path
    test: Path


def draw(args: argparse.Namespace) -> Splits:
    """Write the random subsets of both files, once."""
    folder = args.output / "data"
    splits = Splits(*(folder / f"{name}.parquet" for name in ("train", "select", "test")))
    if splits.test.is_file():
        return splits
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.subset_seed)
    train, val = pq.read_table(args.train), pq.read_table(args.val)
    chosen = np.sort(rng.permutation(len(train))[: args.num_train])
    select, test = divided(val["prompt"].to_pylist(), args.pairs_per_prompt, (args.num_select, args.num_test), rng)
    pq.write_table(train.take(chosen), splits.train)
    pq.write_table(val.take(select), splits.select)
    pq.write_table(val.take(test), splits.test)
    return splits


def keep_to_settings(args: argparse.Namespace) -> None:
    """Refuse to add to an --output that other settings began; further seeds are no other settings."""
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("seeds", "output")}
    path = args.output / "settings.json"
    begun = json.loads(path.read_text()) if path.is_file() else settings
    changed = sorted(name for name in settings if begun.get(name) != settings[name])
    if changed:
        raise SystemExit(f"{args.output} was begun with other {', '.join(changed)}; give another --output")
    write_text(path, json.dumps(settings, indent=1) + "\n")


def divided(
    prompts: Sequence[str], pairs_per_prompt: int, sizes: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two random parts without a common prompt, with at most `pairs_per_prompt` rows of each prompt.

    Rows are taken in one random order until a part is full, so a prompt of very many rows usually gets all it may.

    Args:
        prompts: prompt of each row.
        pairs_per_prompt: most rows of one prompt.
        sizes: most rows of the two parts; prompts are shared out in that proportion.
        rng: source of randomness.
    """
    seen: dict[str, int] = {}
    rows: list[int] = []
    for row in rng.permutation(len(prompts)).tolist():
        seen[prompts[row]] = seen.get(prompts[row], 0) + 1
        if seen[prompts[row]] <= pairs_per_prompt:
            rows.append(row)
    names = [str(name) for name in rng.permutation(sorted(seen))]
    first = set(names[: round(len(names) * sizes[0] / sum(sizes))])
    parts = [row for row in rows if prompts[row] in first], [row for row in rows if prompts[row] not in first]
    return np.sort(parts[0][: sizes[0]]), np.sort(parts[1][: sizes[1]])


def arm_config(args: argparse.Namespace, splits: Splits, arm: str, seed: int) -> TrainConfig:
    """An arm's preset with what all arms share; the last weights are a checkpoint of their own."""
    steps = args.epochs * math.ceil(pq.read_metadata(splits.train).num_rows / args.batch_size)
    values: dict[str, Any] = {
        "experiment": arm,
        "model": args.model,
        "model.path": args.model_path or "null",
        "model.max_length": args.max_length,
        **({"model.lora_lr": 10 * args.adamw_lr} if arm.startswith("lora") else {"model.adamw_lr": args.adamw_lr}),
        "model.attn_implementation": args.attention,
        "data.train": splits.train,
        "data.val": splits.select,
        "batching.batch_size": args.batch_size,
        "batching.micro_token_budget": args.micro_token_budget,
        "optimizer.weight_decay": 0.0,
        "training.epochs": args.epochs,
        "training.max_steps": steps,
        "training.checkpoint_every": steps,
        "training.evals_per_epoch": 4 if arm == STOPPING_ARM else 1,  # evaluations change nothing but when to stop
        "training.eval_at_start": "false",
        "training.num_bootstrap": 100,
        "training.progress": "false",
        "hardware": args.hardware,
        "hardware.num_threads": args.threads,
        "hardware.precision": args.precision,
        "logger.tensorboard": "false",
        "seed": seed,
        "output_dir": "OUTPUT",
    }
    return typed(compose([f"{name}={value}" for name, value in values.items()]), TrainConfig)


def arm_trial(args: argparse.Namespace, splits: Splits, arm: str, seed: int) -> Trial:
    """An arm's finished trial; arms whose options are equal share one."""
    config = arm_config(args, splits, arm, seed)
    scored = {"test": splits.test, **({"train": splits.train} if arm in GAP_ARMS else {})}

    def measure(folder: Path) -> dict[str, Any]:
        return {"arm": arm, "seed": seed, **train_and_score(config, scored, folder)}

    return run_trial(args.output / "trials", dataclasses.asdict(config), measure)


def batching_trial(args: argparse.Namespace, splits: Splits, seed: int) -> list[dict[str, float]]:
    """H1's measurements on one seed's macro-batches, in float32: times and gradients of both ways, made in turn."""
    path = args.output / "batching" / f"seed-{seed}.json"
    if path.is_file():
        return list(json.loads(path.read_text()))
    model = base_model(args, seed)
    data = PreferenceDataset.load(str(splits.train))
    tokens = tokenize_pairs(data.pairs, model.renderer, None)
    collator = PairCollator(tokens, data.pairs, model.renderer.pad_token_id)
    ways = {
        name: MacroBatches(collator, batch_size=args.batching_pairs, micro_token_budget=budget, seed=seed)
        for name, budget in (("pair_aware", args.micro_token_budget), ("padded", ONE_PASS))
    }
    gradients(model, ways["pair_aware"][0].micro[-1:])  # warms up
    rows = []
    for step in range(args.batching_steps):
        found = {name: gradients(model, ways[name][step].micro) for name in sorted(ways, reverse=step % 2 == 0)}
        rows.append(batching_row(found["pair_aware"], found["padded"]))
    write_text(path, json.dumps(rows, indent=1) + "\n")
    return rows


def base_model(args: argparse.Namespace, seed: int) -> BradleyTerryRM:
    """The untrained model of H1's comparison."""
    config = arm_config(args, draw(args), ARMS[0], seed).model
    if config.path:
        path, length = config.path, args.batching_length
        return BradleyTerryRM.from_pretrained(path, max_length=length, seed=seed, new_head=True).train()
    return build_model(config, PreferenceDataset.load(str(draw(args).train)), seed).train()


@dataclass(frozen=True)
class Finding:
    """A hypothesis's effect and verdict, with what else belongs to it."""

    name: str
    effect: Estimate
    threshold: float
    verdict: Verdict
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def h1(rows: Sequence[Mapping[str, float]]) -> Finding:
    """Pair-aware batching: the same gradient in less time; macro-batches are independent draws."""
    ratio = crossed_mean(np.array([row["log_time_ratio"] for row in rows]), 0.0, len(rows))
    worst = max(row["gradient_difference"] for row in rows)
    same: Verdict = "confirmed" if worst <= GRADIENT_TOLERANCE else "refuted"
    means = float(np.mean([row["mean_of_means_difference"] for row in rows]))
    also = {"max_gradient_difference": worst, "mean_of_means_difference": means, "time_ratio": math.exp(ratio.value)}
    return Finding("h1_pair_aware_log_time_ratio", ratio, 0.0, both(verdict(ratio, 0.0), same), also)


def findings(
    test: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray], saved: np.ndarray, prompts: Sequence[str]
) -> Iterator[Finding]:
    """Effects and verdicts of H2 to H5.

    Args:
        test: each arm's margins on the test pairs, (seeds, pairs).
        train: those of `GAP_ARMS` on the training pairs.
        saved: share of steps that early stopping saved, for each seed.
        prompts: prompt of each test pair.
    """
    fitted = {arm: -log_expit(margins).mean(axis=1) for arm, margins in train.items()}
    first, second = GAP_ARMS
    gap = paired_effect(test[second], test[first], prompts, "nll", offset=fitted[second] - fitted[first])
    yield Finding("h2_scheduler_gap", gap, 0.0, verdict(gap, 0.0))
    ece = paired_effect(test["ablation_a3"], test["ablation_a2"], prompts, "ece")
    yield Finding("h3_smoothing_ece", ece, 0.0, verdict(ece, 0.0))
    lora = paired_effect(test["lora_r16"], test["full_finetune"], prompts, "accuracy")
    full = paired_effect(test["full_finetune"], None, prompts, "accuracy")
    learnt: Verdict = "confirmed" if verdict(full, 0.5) == "confirmed" else "undecided"
    decided = verdict(lora, -0.03) if learnt == "confirmed" else learnt
    yield Finding("h4_lora_accuracy", lora, -0.03, decided, {"full_above_chance": learnt})
    nll = paired_effect(test[STOPPING_ARM], test["ablation_a3"], prompts, "nll")
    steps = crossed_mean(saved, 0.0, len(saved))
    also = {"steps_saved": steps.value, "steps_saved_low": steps.low, "steps_saved_high": steps.high}
    yield Finding("h5_early_stopping_nll", nll, -0.005, both(verdict(nll, -0.005), verdict(steps, 0.0)), also)


def report(results: Sequence[Finding], arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Print both tables, then `name: value` lines."""
    print(f"{'arm':14} {'accuracy':22} {'nll':22} {'ece':22} {'step':>6} {'parameters':>11} {'CPU s':>6}")
    for name, arm in arms.items():
        cells = " ".join(f"{arm[score]!s:22}" for score in SCORES)
        print(f"{name:14} {cells} {arm['scored_step']:6.0f} {arm['parameters']:11,d} {arm['cpu_seconds']:6.0f}")
    for found in results:
        print(f"{found.name:30} {found.effect:+.4f}  threshold {found.threshold:+.3f}  {found.verdict}")
    for found in results:
        print(f"{found.name}: {found.effect.value:.5f}")
        for end in ("low", "high"):
            value = getattr(found.effect, end)
            print(f"{found.name}_{end}: {'n/a' if value is None else format(value, '.5f')}")
        for key, value in found.also.items():
            print(f"{found.name[:2]}_{key}: {format(value, '.4g') if isinstance(value, float) else value}")
        print(f"{found.name[:2]}_verdict: {found.verdict}")


def collected(args: argparse.Namespace, splits: Splits) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """Run or read every trial, seed by seed, and draw the findings."""
    batching: list[dict[str, float]] = []
    trials: dict[str, list[Trial]] = {arm: [] for arm in ARMS}
    for seed in args.seeds:
        batching += batching_trial(args, splits, seed)
        for arm in ARMS:
            trials[arm].append(arm_trial(args, splits, arm, seed))
    prompts = pq.read_table(splits.test)["prompt"].to_pylist()
    test = {arm: margins_of(found, "test") for arm, found in trials.items()}
    train = {arm: margins_of(trials[arm], "train") for arm in GAP_ARMS}
    records = {arm: [trial.result for trial in found] for arm, found in trials.items()}
    saved = np.array([1 - record["steps"] / record["all_steps"] for record in records[STOPPING_ARM]])
    arms = {arm: summary(test[arm], records[arm], prompts) for arm in ARMS}
    return [h1(batching), *findings(test, train, saved, prompts)], arms


def summary(margins: np.ndarray, records: Sequence[Mapping[str, Any]], prompts: Sequence[str]) -> dict[str, Any]:
    """An arm's own scores over seeds, and its means of steps and seconds."""
    own: dict[str, Any] = {score: paired_effect(margins, None, prompts, score) for score in SCORES}
    for key in ("scored_step", "cpu_seconds"):
        own[key] = float(np.mean([record[key] for record in records]))
    return own | {"parameters": records[0]["parameters"]}


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    torch.set_num_threads(args.threads)
    keep_to_settings(args)
    splits = draw(args)
    results, arms = collected(args, splits)
    report(results, arms)
    baseline = length_baseline(PreferenceDataset.load(str(splits.test)).pairs).value
    print(f"length_baseline: {baseline:.4f}")
    document = {
        "settings": vars(args),
        "versions": versions(),
        "machine": machine(),
        "commit": commit(),
        "length_baseline": baseline,
        "arms": {
            name: {k: dataclasses.asdict(v) if isinstance(v, Estimate) else v for k, v in arm.items()}
            for name, arm in arms.items()
        },
        "findings": [dataclasses.asdict(found) for found in results],
    }
    write_text(args.output / "hypotheses.json", json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()

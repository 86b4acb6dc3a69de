"""Study of five hypotheses about training reward models: `python studies/hypotheses.py OUT TRAIN VAL [OPTION=VALUE …]`.

TRAIN and VAL are Parquet files with a column `prompt`. Training uses a random subset of the pairs. Validation is
limited to 50 pairs of each prompt, so that no prompt decides alone. Its prompts are divided: early stopping evaluates
one part, and figures are of the other part. The trials are the presets `ARMS` with each seed. A trial with a result is
only read, so a stopped command can be repeated.

The criteria were fixed before the runs. A positive effect supports the hypothesis. The verdict is `better` if the whole
95 % interval is above 0, and `worse` if the whole interval is below minus the loss that the hypothesis allows. It is
`equivalent` if no part of the interval is below that bound. Otherwise it is `inconclusive`. If a hypothesis has two
parts, the weaker one decides.

H1  Pair-atomic, length-sorted micro-batches with exact pair weights give the gradient of one padded pass over the same
    pairs (largest difference at most 1e-4 of the largest entry, float32; above that: worse) in less CPU time
    (log ratio above 0). The distance of the mean of micro-batch means from that gradient is reported too.
H2  The scheduler (ablation_a2 against ablation_a1) lowers test NLL minus training NLL of the last weights (above 0).
H3  Label smoothing (ablation_a3 against ablation_a2) lowers the test ECE of the last weights (above 0). The difference
    in accuracy is reported too, with an allowed loss of 2 points, and decides nothing.
H4  LoRA of rank 16 (lora_r16 against full_finetune) is at most 3 points of test accuracy worse (above -0.03);
    inconclusive if full fine-tuning's own accuracy is not significantly above chance. The ratios of pairs a second of
    the optimizer steps (claimed: at least 3) and of peak memory (below 0.6) are reported too, and decide nothing.
H5  Early stopping (ablation_a4's best weights against ablation_a3's last) costs at most 0.005 nats of test NLL (above
    -0.005) and saves steps (share above 0).

Arms share seeds and test pairs, so all effects are paired. `rm_optimizer.core.metrics.effects` describes their
intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int
from scipy.special import log_expit

from rm_optimizer import BradleyTerryRM, PreferenceDataset, TrainConfig, compose, typed
from rm_optimizer.core.metrics.effects import Outcome, PairedScores
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import crossed_mean
from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.tokens.audit import length_baseline
from rm_optimizer.core.tokens.batching import AnyPairBatch, BatchShape, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.loader import MacroBatches
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.evaluation.pair_rewards import score_pairs
from rm_optimizer.experiments.training_trials import require_shared
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import replacing, write_text
from rm_optimizer.records.provenance import commit, machine, versions
from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.records.run_options import FREE, flat, is_among, options_of
from rm_optimizer.reporting.tables import new_table, output_console
from rm_optimizer.schema.config import Attention
from rm_optimizer.training.callbacks.checkpoints import checkpoint_path
from rm_optimizer.training.callbacks.memory_profile import CPU_MEMORY, GPU_MEMORY, PROFILE_ROWS
from rm_optimizer.training.preparation import build_model
from rm_optimizer.training.run import run_training

ARMS = ("ablation_a1", "ablation_a2", "ablation_a3", "ablation_a4", "full_finetune", "lora_r16")
"""Presets of `configs/experiment` trained for each seed."""
GAP_ARMS = ("ablation_a1", "ablation_a2")
"""Presets for which the training pairs are scored too."""
STOPPING_ARM = "ablation_a4"
CLAIMS = {
    "h1": "pair-aware batching takes less CPU time at an equal gradient",
    "h2": "the scheduler narrows the gap between test and training NLL",
    "h3": "label smoothing lowers the test ECE",
    "h4": "LoRA is within 3 points of full fine-tuning",
    "h5": "early stopping costs at most 0.005 nats and saves steps",
}
"""The hypotheses in short form."""
GRADIENT_TOLERANCE = 1e-4
SMOOTHING_MARGIN, LORA_MARGIN, STOPPING_MARGIN = 0.02, 0.03, 0.005
"""Loss of accuracy that H3's further number and H4 allow, and nats of test NLL that H5 allows for early stopping."""
LORA_COSTS = {"speed": (3.0, 1), "memory": (0.6, -1)}
"""Bounds of LoRA's ratios of pairs a second and of peak memory in H4's further numbers; -1 for an upper bound."""
COST_ARMS = ("full_finetune", "lora_r16")
"""Presets whose steps are timed. Arms of equal options share a trial, so full fine-tuning's can be another arm's."""


@dataclass(frozen=True)
class Finding:
    """The effect and verdict of a hypothesis.

    Args:
        name: name of the effect, which starts with the hypothesis's number.
        effect: estimate with its interval, positive if it supports the hypothesis.
        margin: loss that the hypothesis allows.
        verdict: outcome by the criteria.
        also: further numbers and words.
    """

    name: str
    effect: Estimate
    margin: float
    verdict: Outcome
    also: Mapping[str, float | str | None] = field(default_factory=dict)


def outcome(estimate: Estimate, margin: float = 0.0) -> Outcome:
    """Outcome of an arm by its effect, which is positive if the arm is better, and a one-sided margin.

    `better` with the whole interval above 0, `worse` with the whole interval below `-margin`, `equivalent` (no worse
    than the margin) with none of it below `-margin`, else `inconclusive`.

    Args:
        estimate: the effect with its 95 % interval.
        margin: loss that does not matter, not negative.
    """
    low, high = estimate.low, estimate.high
    if low is None or high is None:
        return "inconclusive"
    if low > 0:
        return "better"
    if low >= -margin:
        return "equivalent"
    return "worse" if high < -margin else "inconclusive"


def both(first: Outcome, second: Outcome) -> Outcome:
    """Outcome of the weaker one of a hypothesis's two parts."""
    return next(word for word in ("worse", "inconclusive", "equivalent", "better") if word in (first, second))


def batching_finding(rows: Sequence[Mapping[str, float]]) -> Finding:
    """H1, from the rows of `batching_cost.batching_row`; macro-batches are independent draws."""
    ratio = crossed_mean(np.array([row["log_time_ratio"] for row in rows]), 0.0, len(rows)).estimate
    worst = max(row["gradient_difference"] for row in rows)
    means = float(np.mean([row["mean_of_means_difference"] for row in rows]))
    also = {"max_gradient_difference": worst, "mean_of_means_difference": means, "time_ratio": math.exp(ratio.value)}
    found: Outcome = outcome(ratio) if worst <= GRADIENT_TOLERANCE else "worse"
    return Finding("h1_pair_aware_log_time_ratio", ratio, 0.0, found, also)


def training_findings(
    test: Mapping[str, Float[np.ndarray, "seeds pairs"]],
    train: Mapping[str, Float[np.ndarray, "seeds pairs"]],
    saved: Float[np.ndarray, " seeds"],
    prompts: Sequence[str],
    costs: Mapping[str, Float[np.ndarray, "seeds 2"]] | None,
) -> Iterator[Finding]:
    """Effects and verdicts of H2 to H5.

    Args:
        test: each arm's margins on the test pairs.
        train: margins of `GAP_ARMS` on the training pairs.
        saved: share of steps that early stopping saved, for each seed.
        prompts: prompt of each test pair.
        costs: pairs a second and peak bytes of each run of `COST_ARMS`; None where some were not measured.
    """
    fitted = {arm: -log_expit(margins).mean(axis=1) for arm, margins in train.items()}
    first, second = GAP_ARMS
    gap = PairedScores(test[second], test[first], prompts).crossed("nll", fitted[second] - fitted[first]).estimate
    yield Finding("h2_scheduler_gap", gap, 0.0, outcome(gap))
    ece = PairedScores(test["ablation_a3"], test["ablation_a2"], prompts).effect("ece")
    kept = PairedScores(test["ablation_a3"], test["ablation_a2"], prompts).effect("accuracy")
    accuracy = {"accuracy": kept.value, "accuracy_within_2_points": outcome(kept, SMOOTHING_MARGIN)}
    yield Finding("h3_smoothing_ece", ece, 0.0, outcome(ece), accuracy)
    lora = PairedScores(test["lora_r16"], test["full_finetune"], prompts).effect("accuracy")
    full = PairedScores(test["full_finetune"], None, prompts).effect("accuracy")
    learned: Outcome = "better" if full.low is not None and full.low > 0.5 else "inconclusive"
    decided = outcome(lora, LORA_MARGIN) if learned == "better" else learned
    ratios = {} if costs is None else lora_costs(*(costs[arm] for arm in COST_ARMS))
    yield Finding("h4_lora_accuracy", lora, LORA_MARGIN, decided, {"full_above_chance": learned, **ratios})
    nll = PairedScores(test[STOPPING_ARM], test["ablation_a3"], prompts).effect("nll")
    steps = crossed_mean(saved, 0.0, len(saved)).estimate
    also = {"steps_saved": steps.value, "steps_saved_low": steps.low, "steps_saved_high": steps.high}
    weaker = both(outcome(nll, STOPPING_MARGIN), outcome(steps))
    yield Finding("h5_early_stopping_nll", nll, STOPPING_MARGIN, weaker, also)


def lora_costs(full: Float[np.ndarray, "seeds 2"], lora: Float[np.ndarray, "seeds 2"]) -> dict[str, float | str | None]:
    """LoRA's pairs a second and peak memory over those of full fine-tuning, with intervals over seeds and outcomes.

    Args:
        full: pairs a second and peak bytes of full fine-tuning, one row a seed.
        lora: the same numbers with LoRA.
    """
    found: dict[str, float | str | None] = {}
    for (name, (bound, sign)), logs in zip(LORA_COSTS.items(), np.log(lora / full).T, strict=True):
        beyond = crossed_mean(sign * (logs - math.log(bound)), 0.0, len(logs)).estimate  # positive: as claimed
        ends = (beyond.low, beyond.high)[::sign]
        for end, log in zip(("", "_low", "_high"), (beyond.value, *ends), strict=True):
            found[f"{name}_ratio{end}"] = None if log is None else bound * math.exp(sign * log)
        found[f"{name}_as_claimed"] = outcome(beyond)
    return found


def draw_splits(folder: Path, train: str, val: str, sizes: Mapping[str, int]) -> dict[str, Path]:
    """Write random subsets of two Parquet files with a prompt column, unless they exist already.

    Every arm trains on the pairs of `train`, and early stopping evaluates those of `select`. All figures are of the
    pairs of `test`, none of which has a prompt of `select`.

    Args:
        folder: folder of the subsets.
        train: file of training pairs.
        val: file of validation pairs.
        sizes: the numbers of `SIZES`.
    """
    splits = {name: folder / f"{name}.parquet" for name in ("train", "select", "test")}
    if splits["test"].is_file():  # written last
        return splits
    rng = np.random.default_rng(0)
    tables = pq.read_table(train), pq.read_table(val)
    chosen = np.sort(rng.permutation(len(tables[0]))[: sizes["num_train"]])
    most = sizes["num_select"], sizes["num_test"]
    select, test = divided(tables[1]["prompt"].to_pylist(), sizes["pairs_per_prompt"], most, rng)
    drawn = tables[0].take(chosen), tables[1].take(select), tables[1].take(test)
    for path, table in zip(splits.values(), drawn, strict=True):
        with replacing(path) as temporary:
            pq.write_table(table, temporary)
    return splits


def divided(
    prompts: Sequence[str], pairs_per_prompt: int, sizes: tuple[int, int], rng: np.random.Generator
) -> tuple[Int[np.ndarray, " first"], Int[np.ndarray, " second"]]:
    """Rows of two random parts without a common prompt, with at most `pairs_per_prompt` rows of each prompt.

    Rows are taken in random order until a part is full, so a prompt with very many rows usually gets the most allowed.

    Args:
        prompts: prompt of each row.
        pairs_per_prompt: most rows of one prompt.
        sizes: most rows of the two parts; the prompts are divided in this proportion.
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


@dataclass(frozen=True)
class Gradients:
    """Gradient of the summed loss and number of pairs of each micro-batch, and CPU seconds of all."""

    sums: list[Float[np.ndarray, " parameters"]]
    pairs: list[int]
    seconds: float

    @property
    def exact(self) -> Float[np.ndarray, " parameters"]:
        """Gradient of the mean over pairs."""
        return np.asarray(sum(self.sums) / sum(self.pairs))

    @property
    def mean_of_means(self) -> Float[np.ndarray, " parameters"]:
        """Gradient of the mean of the micro-batches' mean losses."""
        return np.asarray(sum(g / n for g, n in zip(self.sums, self.pairs, strict=True)) / len(self.sums))


def gradients(model: BradleyTerryRM, batches: Sequence[AnyPairBatch]) -> Gradients:
    """The gradient of each micro-batch; only passes are timed."""
    sums, pairs, seconds = [], [], 0.0
    for batch in batches:
        model.zero_grad()
        started = time.process_time()
        torch.autograd.backward(bradley_terry_pair_losses(*batch.split(model.rewards_of(batch))).sum())
        seconds += time.process_time() - started
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy())
        pairs.append(batch.num_pairs)
    return Gradients(sums, pairs, seconds)


def batching_row(pair_aware: Gradients, padded: Gradients) -> dict[str, float]:
    """Comparison on one macro-batch: log ratio of times, and distances of gradients from that of the padded pass."""
    exact, norm = padded.exact, np.linalg.norm
    return {
        "log_time_ratio": math.log(padded.seconds / pair_aware.seconds),
        "gradient_difference": float(np.abs(pair_aware.exact - exact).max() / np.abs(exact).max()),
        "mean_of_means_difference": float(norm(pair_aware.mean_of_means - exact) / norm(exact)),
    }


SIZES = {"num_train": 1200, "num_select": 200, "num_test": 800, "pairs_per_prompt": 50}
"""Most pairs for training, for early stopping, for the test, and of one prompt in validation."""
BATCHING_LENGTH, BATCHING_PAIRS, BATCHING_STEPS, ONE_PASS = 256, 16, 4, 10**9
"""For H1: most tokens, pairs of a macro-batch, macro-batches of a seed, and a token budget for one pass."""
OWNED = (
    *("experiment", "optimizer", "schedule", "adapter", "loss", "seed", "output_dir", "hydra.run.dir", "resume"),
    *("publish", "data", "model.lora_lr", "training.max_steps", "training.early_stopping", "training.monitor"),
    *("training.checkpoint_every", "training.evals_per_epoch", "profile_memory"),
)
"""Options, and groups of them, that the study sets."""
SHARED = (
    *("optimizer.weight_decay=0.0", "training.eval_at_start=false", "training.num_bootstrap=100"),
    *("training.progress=false", "logger.tensorboard=false", "output_dir=OUT", "profile_memory=true"),
)


def config_of(arm: str, seed: int, splits: Mapping[str, Path], overrides: Sequence[str]) -> TrainConfig:
    """An arm's preset with the options that all arms share; LoRA takes ten times the rate of full fine-tuning."""
    first = typed(compose([f"experiment={ARMS[0]}", "output_dir=OUT", *overrides]), TrainConfig)
    rate, epochs = first.model.adamw_lr, first.training.epochs
    if epochs != int(epochs):
        raise ConfigError(f"training.epochs of this study must be a whole number, got {epochs}")
    steps = int(epochs) * math.ceil(pq.read_metadata(splits["train"]).num_rows / first.batching.batch_size)
    given = [item for item in overrides if item.partition("=")[0] not in ("model.adamw_lr", "training.epochs")]
    own = [
        f"experiment={arm}",
        f"model.lora_lr={10 * rate}" if arm.startswith("lora") else f"model.adamw_lr={rate}",
        f"data.train={in_quotes(str(splits['train'].resolve()))}",
        f"data.val={in_quotes(str(splits['select'].resolve()))}",
        f"training.epochs={int(epochs)}",
        f"training.max_steps={steps}",
        f"training.checkpoint_every={steps}",  # the last weights
        f"training.evals_per_epoch={4 if arm == STOPPING_ARM else 1}",  # only early stopping reads evaluations
        f"seed={seed}",
    ]
    return typed(compose([*given, *own, *SHARED]), TrainConfig)


def trial(config: TrainConfig, scored: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Result of an arm's run, read from the folder or measured; without early stopping, of the last weights.

    Arms of equal options share it. Its name does not depend on the paths of the pairs.

    Args:
        config: options of the run.
        scored: files of pairs to score, by name.
        folder: folder of the study.
    """
    known = [item for item in flat(options_of(config)) if not is_among(item[0], (*FREE, "data.train", "data.val"))]
    name = hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()[:16]
    path, run_dir, started = folder / "trials" / f"{name}.json", folder / "run", time.process_time()
    if path.is_file():
        return dict(json.loads(path.read_text()))
    shutil.rmtree(run_dir, ignore_errors=True)
    result = run_training(replace(config, output_dir=str(run_dir)))
    is_best = config.training.early_stopping.enabled
    weights = Path(result.export) if is_best else checkpoint_path(run_dir, result.steps)
    model = BradleyTerryRM.from_pretrained(weights, max_length=config.model.max_length)
    found = {
        "margins": {part: margins(config, model, pairs) for part, pairs in scored.items()},
        "saved": 1 - result.steps / (config.training.max_steps or result.steps),
        "scored_step": result.best_step if is_best else result.steps,
        "parameters": result.parameters,
        "cpu_seconds": time.process_time() - started,
        "cost": cost(run_dir / PROFILE_ROWS),
    }
    write_text(path, json.dumps(found) + "\n")
    shutil.rmtree(run_dir)
    return found


def cost(profile: Path) -> list[float]:
    """Pairs a second of the median step of a run, and its largest peak of memory in bytes."""
    steps = pd.read_csv(profile)
    return [steps["pairs_per_second"].median(), steps[[GPU_MEMORY[0], CPU_MEMORY[1]]].max(axis=None)]


def margins(config: TrainConfig, model: BradleyTerryRM, pairs: Path) -> list[float]:
    """Margins of all pairs of a file, in order; 0 where both conversations are equal after truncation."""
    data = PreferenceDataset(str(pairs))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    half = config.hardware.precision == "bf16-mixed"
    with torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext():
        tokens = tokenize_pairs(data.pairs, model.renderer, None)
        rewards = score_pairs(model, tokens, data, token_budget=16384, prefix_sharing=False)
    found = np.zeros(len(data))
    found[rewards.pair_index] = rewards.margin
    return found.tolist()


def batching_rows(config: TrainConfig, seed: int, splits: Mapping[str, Path], folder: Path) -> list[dict[str, float]]:
    """H1's measurements on one seed's macro-batches, in float32 on one CPU thread, with both kinds of batches."""
    path = folder / "batching" / f"seed-{seed}.json"
    if path.is_file():
        return list(json.loads(path.read_text()))
    data = PreferenceDataset(str(splits["train"]))
    longer: dict[str, Any] = {"max_length": BATCHING_LENGTH, "attn_implementation": Attention.auto}
    model = build_model(replace(config.model, **(longer if config.model.path else {})), data, seed).train()
    tokens = tokenize_pairs(data.pairs, model.renderer, None)
    collator = PairCollator(tokens, data.pairs, model.renderer.pad_token_id)
    budgets = {"pair_aware": config.batching.micro_token_budget, "padded": ONE_PASS}
    orders = {
        name: MacroBatches(collator, BatchShape(BATCHING_PAIRS, budget), seed=seed) for name, budget in budgets.items()
    }
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # CPU seconds of several threads contain their waiting for each other
    try:
        gradients(model, orders["pair_aware"][0].micro[-1:])  # warms up
        for step in range(BATCHING_STEPS):  # the order of the two kinds alternates
            found = {name: gradients(model, orders[name][step].micro) for name in sorted(orders, reverse=step % 2 == 0)}
            rows.append(batching_row(found["pair_aware"], found["padded"]))
    finally:
        torch.set_num_threads(threads)
    write_text(path, json.dumps(rows, indent=1) + "\n")
    return rows


def run(out: Path, train: str, val: str, overrides: Sequence[str], seeds: int = 5, **sizes: int) -> dict[str, Any]:
    """Report of all trials, which are read or run; it is written as `hypotheses.json`.

    Args:
        out: folder of the study.
        train: Parquet file of training pairs.
        val: Parquet file of validation pairs.
        overrides: options of every run, as name=value.
        seeds: number of seeds, which start at 0.
        **sizes: numbers of pairs in place of `SIZES`.

    Raises:
        ConfigError: if an option differs between the arms, or the folder was begun with other options.
    """
    require_shared(overrides, dict.fromkeys(OWNED, "the arms differ in it, or share one value"), "this study")
    settings = {"train": train, "val": val, "overrides": list(overrides), **SIZES, **sizes}
    if not (path := out / "settings.json").is_file():
        write_text(path, json.dumps(settings) + "\n")
    elif json.loads(path.read_text()) != settings:
        raise ConfigError(f"{out} was begun with other options, see {path}; name another folder")
    splits = draw_splits(out / "data", train, val, SIZES | sizes)
    configs = {(arm, seed): config_of(arm, seed, splits, overrides) for seed in range(seeds) for arm in ARMS}
    rows = [row for seed in range(seeds) for row in batching_rows(configs[ARMS[0], seed], seed, splits, out)]
    scored = {arm: {part: splits[part] for part in ("test", *(["train"] if arm in GAP_ARMS else []))} for arm in ARMS}
    trials = {arm: [trial(configs[arm, seed], scored[arm], out) for seed in range(seeds)] for arm in ARMS}
    test = {arm: np.array([found["margins"]["test"] for found in trials[arm]]) for arm in ARMS}
    fitted = {arm: np.array([found["margins"]["train"] for found in trials[arm]]) for arm in GAP_ARMS}
    prompts = pq.read_table(splits["test"])["prompt"].to_pylist()
    saved = np.array([found["saved"] for found in trials[STOPPING_ARM]])
    timed = all("cost" in found for arm in COST_ARMS for found in trials[arm])  # trials before 0.3 are not
    costs = {arm: np.array([found["cost"] for found in trials[arm]]) for arm in COST_ARMS} if timed else None
    report = {
        "settings": settings | {"seeds": seeds},
        **{"versions": versions(), "machine": machine(), "commit": commit()},
        "length_baseline": length_baseline(PreferenceDataset(str(splits["test"])).pairs).value,
        "arms": {
            arm: {name: PairedScores(test[arm], None, prompts).effect(name) for name in ("accuracy", "nll", "ece")}
            | {name: np.mean([found[name] for found in trials[arm]]).item() for name in ("scored_step", "cpu_seconds")}
            | {"parameters": trials[arm][0]["parameters"]}
            for arm in ARMS
        },
        "findings": [batching_finding(rows), *training_findings(test, fitted, saved, prompts, costs)],
    }
    write_text(out / "hypotheses.json", json.dumps(json_values(report), indent=1) + "\n")
    return report


def show(report: Mapping[str, Any]) -> None:
    """Print a table of the arms, a table of the claims, and the further numbers of each claim."""
    console = output_console()
    arms = new_table("arms, on the test pairs", "arm", "accuracy", "NLL", "ECE", "scored step", "parameters", "CPU s")
    for name, arm in report["arms"].items():
        scores = [f"{arm[score]:.3f}" for score in ("accuracy", "nll", "ece")]
        arms.add_row(name, *scores, f"{arm['scored_step']:.0f}", f"{arm['parameters']:,}", f"{arm['cpu_seconds']:.0f}")
    claims = new_table("claims", "", "claim", "effect", "allowed loss", "verdict")
    for found in report["findings"]:
        number = found.name[:2]
        claims.add_row(number.upper(), CLAIMS[number], f"{found.effect:+.4f}", f"{found.margin:g}", found.verdict)
    console.print(arms, claims)
    for found in report["findings"]:
        for name, value in found.also.items():
            shown = "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else value
            console.print(f"{found.name[:2].upper()}: {name.replace('_', ' ')} {shown}", highlight=False)
    console.print(f"'the longer response is better' gets {report['length_baseline']:.3f} on the same pairs")


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of trials and report")
    parser.add_argument("train", help="Parquet file of training pairs")
    parser.add_argument("val", help="Parquet file of validation and test pairs")
    parser.add_argument("overrides", nargs="*", help="options of every run, as for rm-opt train")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each arm")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    given = vars(parser.parse_intermixed_args())
    try:
        show(run(given.pop("out"), given.pop("train"), given.pop("val"), given.pop("overrides"), **given))
    except RMOptimizerError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

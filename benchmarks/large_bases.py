"""LoRA runs on one base in bfloat16 and in float32: peak memory at 100M parameters, and held-out accuracy.

Memory: three steps under bf16 autocast on a decoder of 100M random parameters, in passes of 128 tokens, each arm in a
new process. It is the highest resident set over the steps, less that over the steps of a run on a small base, which the
process makes first; so libraries are left out.
A model of that size does not learn in minutes on a CPU. Accuracy is therefore that of a small decoder that was trained
on the synthetic world and then, with a new head, gets an adapter on other pairs. The arms take turns for each seed, on
the same pairs in the same order. The interval is of the paired difference over all held-out pairs and seeds (percentile
bootstrap over pairs).

    python benchmarks/large_bases.py
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.records.run_folder import PAIR_REWARDS_FILE
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.training.callbacks.memory_profile import PROFILE_ROWS
from rm_optimizer.training.run import run_training

ARMS = ("float32", "bfloat16")
SHAPE = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 256}
QUIET = ("hardware=cpu", "logger.tensorboard=false", "training.progress=false", "training.eval_at_start=false")
PRECISION = "hardware.precision=bf16-mixed"  # as hardware=h100 has it


def train(folder: Path, *options: str) -> None:
    run_training(typed(compose([*QUIET, "training.num_bootstrap=100", *options, f"output_dir={folder}"]), TrainConfig))


def adapted(base: Path, dtype: str) -> Sequence[str]:
    return ("model=custom", f"model.path={base}", f"model.dtype={dtype}", "adapter=lora", "optimizer.lr=1e-2")


def save_base(model: BradleyTerryRM, folder: Path) -> int:
    """Save the model without its head; the number of its parameters."""
    base = model.model.base_model
    base.save_pretrained(folder)
    model.renderer.tokenizer.save_pretrained(folder)
    return sum(each.numel() for each in base.parameters())


def peak(bases: Sequence[Path], dtype: str, queue: multiprocessing.Queue[int]) -> None:
    """Bytes of three steps on the second base over those on the first, in this process."""
    peaks = []
    for base in bases:
        with tempfile.TemporaryDirectory() as folder:
            few = ("data.synthetic.num_train=64", "data.synthetic.num_val=16", "training.max_steps=3")
            passes = ("model.max_length=64", "batching.batch_size=8", "batching.micro_token_budget=128")
            train(Path(folder), *adapted(base, dtype), *few, *passes, "profile_memory=true", PRECISION)
            with open(Path(folder, PROFILE_ROWS), newline="") as file:
                peaks.append(max(int(row["rss_peak_bytes"]) for row in csv.DictReader(file)))
    queue.put(peaks[1] - peaks[0])


def correct(base: Path, dtype: str, seed: int) -> list[bool]:
    """Held-out pairs that a run ranks correctly."""
    with tempfile.TemporaryDirectory() as folder:
        world = ("data.synthetic.num_train=1000", "data.synthetic.num_val=400", "data.synthetic.seed=1")
        train(Path(folder), *adapted(base, dtype), *world, "model.max_length=96", f"seed={seed}", PRECISION)
        rows = [json.loads(line) for line in Path(folder, PAIR_REWARDS_FILE).read_text().splitlines()]
    return [row["chosen"] > row["rejected"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    context = multiprocessing.get_context("spawn")
    peaks: dict[str, int] = {}
    right: dict[str, list[bool]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        tokenizer = train_tokenizer(rendered_texts(synthetic_world(SyntheticConfig(num_train=500)).train), 2048)
        model = BradleyTerryRM.from_config(SHAPE | HEADS, tokenizer, max_length=64, seed=0)
        print(f"parameters: {save_base(model, large)}", flush=True)
        train(Path(folder, "run"), "model=tiny", "data.synthetic.num_train=4000", "data.synthetic.num_val=50")
        save_base(BradleyTerryRM.from_pretrained(str(Path(folder, "run"))), small)
        for arm in ARMS:
            queue: multiprocessing.Queue[int] = context.Queue()
            process = context.Process(target=peak, args=((small, large), arm, queue))
            process.start()
            peaks[arm] = queue.get(timeout=600)
            process.join()
            print(f"{arm}_peak_bytes: {peaks[arm]}", flush=True)
        print(f"peak_memory_ratio: {peaks['bfloat16'] / peaks['float32']:.3f}", flush=True)
        for seed in range(args.seeds):
            for arm in ARMS[:: -1 if seed % 2 else 1]:
                right[arm] += correct(small, arm, seed)
    for arm in ARMS:
        print(f"{arm}_accuracy: {np.mean(right[arm]):.4f}")
    differences = np.subtract(right["bfloat16"], right["float32"], dtype=float).reshape(args.seeds, -1).mean(axis=0)
    draws = np.random.default_rng(0).choice(differences, (2000, len(differences))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    print(f"accuracy_difference: {differences.mean():+.4f}")
    print(f"accuracy_difference_interval: {low:+.4f} {high:+.4f}")


if __name__ == "__main__":
    main()

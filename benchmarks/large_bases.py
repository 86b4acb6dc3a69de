"""Runs on one base in bfloat16 and in float32: peak memory at 100M parameters, and held-out accuracy and loss.

Memory: three steps under bf16 autocast on a decoder of 100M random parameters, in passes of 128 tokens, each arm in a
new process. It is the highest resident set over the steps, less that over the steps of a run on a small base, which the
process makes first; so libraries are left out.
A model of that size does not learn in minutes on a CPU. Accuracy is therefore that of a small decoder that was trained
on the synthetic world and then, with a new head, gets an adapter on other pairs. The arms take turns for each seed, on
the same pairs in the same order. The interval is of the paired difference over all held-out pairs and seeds (percentile
bootstrap over pairs).

    python benchmarks/large_bases.py             # LoRA
    python benchmarks/large_bases.py --full      # every weight

With `--full` all weights train, in 32-true for the accuracy. The arms in bfloat16 round each weight at random, keep a
copy of it in float32 between the steps (master weights), or round it to the nearest number; the package does the first.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.optim import algorithms
from rm_optimizer.records.run_folder import PAIR_REWARDS_FILE
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.training.callbacks.memory_profile import PROFILE_ROWS
from rm_optimizer.training.run import run_training

ARMS = ("float32", "bfloat16")
ROUNDINGS = ("bfloat16", "masters", "nearest")
"""What `--full` compares with float32."""
SHAPE = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 256}
QUIET = ("hardware=cpu", "logger.tensorboard=false", "training.progress=false", "training.eval_at_start=false")
PRECISION = "hardware.precision=bf16-mixed"  # as hardware=h100 has it


def train(folder: Path, *options: str) -> None:
    run_training(typed(compose([*QUIET, "training.num_bootstrap=100", *options, f"output_dir={folder}"]), TrainConfig))


def options_of(base: Path, arm: str, *, full: bool) -> Sequence[str]:
    dtype = "float32" if arm == "float32" else "bfloat16"
    how = ("optimizer.lr=3e-4",) if full else ("adapter=lora", "optimizer.lr=1e-2")
    return ("model=custom", f"model.path={base}", f"model.dtype={dtype}", *how)


@contextmanager
def rounding(arm: str) -> Iterator[None]:
    """Context in which weights in bfloat16 are stepped as the arm has it."""
    masters: dict[Tensor, Tensor] = {}

    def step_master(optimizer: Optimizer, weight: Tensor) -> None:
        stored = weight.data
        weight.data = masters.setdefault(weight, stored.float())
        optimizer.step()
        weight.data = stored.copy_(weight.data)

    if arm == "masters":
        with mock.patch.object(algorithms, "_step_alone", step_master):
            yield
    elif arm == "nearest":
        with mock.patch.object(algorithms, "round_at_random", Tensor.bfloat16):
            yield
    else:
        yield


def save_base(model: BradleyTerryRM, folder: Path) -> int:
    """Save the model without its head; the number of its parameters."""
    base = model.model.base_model
    base.save_pretrained(folder)
    model.renderer.tokenizer.save_pretrained(folder)
    return sum(each.numel() for each in base.parameters())


def peak(bases: Sequence[Path], arm: str, full: bool, queue: multiprocessing.Queue[int]) -> None:
    """Bytes of three steps on the second base over those on the first, in this process."""
    peaks = []
    for base in bases:
        with tempfile.TemporaryDirectory() as folder:
            few = ("data.synthetic.num_train=64", "data.synthetic.num_val=16", "training.max_steps=3")
            passes = ("model.max_length=64", "batching.batch_size=8", "batching.micro_token_budget=128")
            train(Path(folder), *options_of(base, arm, full=full), *few, *passes, "profile_memory=true", PRECISION)
            with open(Path(folder, PROFILE_ROWS), newline="") as file:
                peaks.append(max(int(row["rss_peak_bytes"]) for row in csv.DictReader(file)))
    queue.put(peaks[1] - peaks[0])


def held_out(base: Path, arm: str, seed: int, full: bool) -> list[tuple[bool, float]]:
    """Correctness and loss of each held-out pair after a run."""
    with tempfile.TemporaryDirectory() as folder, rounding(arm):
        world = ("data.synthetic.num_train=1000", "data.synthetic.num_val=400", "data.synthetic.seed=1")
        precision = () if full else (PRECISION,)
        train(
            Path(folder),
            *(*options_of(base, arm, full=full), *world, "model.max_length=96", f"seed={seed}", *precision),
        )
        rows = [json.loads(line) for line in Path(folder, PAIR_REWARDS_FILE).read_text().splitlines()]
    margins = [row["chosen"] - row["rejected"] for row in rows]
    return [(margin > 0, float(np.logaddexp(0, -margin))) for margin in margins]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="train every weight")
    parser.add_argument("--hidden-layers", type=int, default=SHAPE["num_hidden_layers"], help="of the large base")
    args = parser.parse_args()
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    context = multiprocessing.get_context("spawn")
    peaks: dict[str, int] = {}
    arms = ("float32", *ROUNDINGS) if args.full else ARMS
    found: dict[str, list[tuple[bool, float]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        tokenizer = train_tokenizer(rendered_texts(synthetic_world(SyntheticConfig(num_train=500)).train), 2048)
        shape = SHAPE | HEADS | {"num_hidden_layers": args.hidden_layers}
        model = BradleyTerryRM.from_config(shape, tokenizer, max_length=64, seed=0)
        print(f"parameters: {save_base(model, large)}", flush=True)
        train(Path(folder, "run"), "model=tiny", "data.synthetic.num_train=4000", "data.synthetic.num_val=50")
        save_base(BradleyTerryRM.from_pretrained(str(Path(folder, "run"))), small)
        for arm in ARMS:
            queue: multiprocessing.Queue[int] = context.Queue()
            process = context.Process(target=peak, args=((small, large), arm, args.full, queue))
            process.start()
            peaks[arm] = queue.get(timeout=600)
            process.join()
            print(f"{arm}_peak_bytes: {peaks[arm]}", flush=True)
        print(f"peak_memory_ratio: {peaks['bfloat16'] / peaks['float32']:.3f}", flush=True)
        for seed in range(args.seeds):
            for arm in arms[:: -1 if seed % 2 else 1]:
                found[arm] += held_out(small, arm, seed, args.full)
    values = {arm: np.array(rows, dtype=float).reshape(args.seeds, -1, 2) for arm, rows in found.items()}
    for arm in arms:
        accuracy, loss = values[arm].mean(axis=(0, 1))
        print(f"{arm}_accuracy: {accuracy:.4f}\n{arm}_loss: {loss:.4f}")
    for arm in arms[1:]:
        differences = (values[arm] - values["float32"]).mean(axis=0)
        draws = np.random.default_rng(0).choice(differences, (2000, len(differences))).mean(axis=1)
        for name, mean, low, high in zip(
            ("accuracy", "loss"), differences.mean(axis=0), *np.quantile(draws, [0.025, 0.975], axis=0), strict=True
        ):
            print(f"{arm}_{name}_difference: {mean:+.4f} [{low:+.4f}, {high:+.4f}]")


if __name__ == "__main__":
    main()

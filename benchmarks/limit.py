"""Share of this machine's limit that training and scoring of a model reach; `make bench` for the quick start's model.

The limit is the rate of the products with the model's own matrices (the output; in training also the gradients of
input and weight), measured alone in the same process, for as many rows as the largest pass has tokens. The work is what
the unique tokens of a decoder, or the real ones of an encoder, need: no padding, no second pass over a shared prompt,
attention by the keys that a query attends to (`ModelFlops`). `share_of_limit` is work over rate over the median
seconds of a step; the rest is attention's own kernels, norms, the optimizer, the loader and dispatch.

    python benchmarks/limit.py                              # the quick start's model
    python benchmarks/limit.py model=qwen data.train=pairs.jsonl hardware=h100
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import evaluation_batches
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.records.accelerator import fastest_device, synchronize
from rm_optimizer.records.provenance import machine
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.adapters import AdapterKind
from rm_optimizer.schema.config import PrefixSharing
from rm_optimizer.training.callbacks.memory_profile import PROFILE_ROWS, ModelFlops
from rm_optimizer.training.data.run_data import data_module, load_data
from rm_optimizer.training.run import quiet, run_training

STEPS, SCORED_PAIRS = 8, 64
REPEATS = 5
"""Timings of each product, of which the fastest counts."""


def product_rate(
    model: torch.nn.Module,
    rows: int,
    dtype: torch.dtype,
    *,
    backward: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Operations a second of `clock` of the products with all matrices, embeddings left out, at this number of rows."""
    layers = [each for each in model.modules() if not isinstance(each, torch.nn.Embedding)]
    weights = [each.weight for each in layers if isinstance(getattr(each, "weight", None), torch.Tensor)]
    shapes = Counter(tuple(each.shape) for each in weights if each.ndim == 2 and min(each.shape) > 1)
    device, work, seconds = weights[0].device, 0.0, 0.0
    for (outputs, inputs), count in shapes.items():
        weight, value = (torch.randn(n, inputs, dtype=dtype, device=device) for n in (outputs, rows))
        slope, fastest = torch.randn(rows, outputs, dtype=dtype, device=device), float("inf")
        for _ in range(REPEATS):
            started = clock()
            value @ weight.T
            if backward:
                slope @ weight, slope.T @ value
            synchronize(device)
            fastest = min(fastest, clock() - started)
        work, seconds = work + count * (6 if backward else 2) * rows * inputs * outputs, seconds + count * fastest
    return work / seconds


def scoring(model: BradleyTerryRM, pairs: PreferenceDataset, budget: int) -> tuple[float, float, int]:
    """Operations of the rewards of pairs, the median seconds that they take, and the tokens of the largest pass."""
    flops = ModelFlops.of_model(model)
    assert flops is not None, "training has counted this model"
    pad, shares = model.pad_choice.token_id, model.supports_prefix_sharing() is None
    tokens = tokenize_pairs(pairs.pairs, model.renderer, None)
    found = evaluation_batches(tokens, pairs.pairs, pad_token_id=pad, token_budget=budget, prefix_sharing=shares)
    batches, times = [batch.to(model.device) for batch in found], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with model.inference():
            for batch in batches:
                model.rewards_of(batch)
        synchronize(model.device)
        times.append(time.perf_counter() - started)
    work = sum(map(replace(flops, backward=0, trained=0).of_batch, batches))
    return work, median(times), max(batch.num_padded_tokens for batch in batches)


def measure(options: Sequence[str], precision: str, folder: Path) -> dict[str, float]:
    """Rate of the products and shares of it in one precision."""
    own = [f"training.max_steps={STEPS}", "training.eval_at_start=false", "training.progress=false"]
    own += [f"hardware.precision={precision}", "profile_memory=true", f"output_dir={folder}"]
    config = typed(compose([*options, *own]), TrainConfig)
    if config.adapter.kind != AdapterKind.none or config.model.freeze is not None:
        raise ConfigError("measured are runs that train the whole model; leave adapter and model.freeze out")
    data, config = load_data(config), quiet(config, in_memory=True)
    train = data.train.subset(STEPS * config.batching.batch_size, config.seed)
    data = replace(data, train=train, val=data.val.subset(SCORED_PAIRS, config.seed))
    run_training(config, data=data)
    with (folder / PROFILE_ROWS).open(encoding="utf-8") as file:
        seconds = median([float(row["step_seconds"]) for row in csv.DictReader(file)][1:])
    model = BradleyTerryRM.from_pretrained(folder).requires_grad_(True)
    if config.hardware.accelerator != "cpu":
        model.to(fastest_device())
    flops = ModelFlops.of_model(model)
    if flops is None:
        raise ConfigError("the operations of this model are not known: it has experts, windows or recurrence")
    config.batching.prefix_sharing = PrefixSharing.off if model.supports_prefix_sharing() else PrefixSharing.on
    steps = data_module(data, config, model).macro_batches()
    passes = [[flops.of_batch(each) for each in steps[step].micro] for step in range(1, STEPS)]
    rows = max(each.num_padded_tokens for each in steps[1].micro)
    dtype = torch.bfloat16 if "bf16" in precision else torch.float32
    rate = product_rate(model.model, rows, dtype, backward=True)
    found = {"product_gflops": rate / 1e9, "train_share_of_limit": median(map(sum, passes)) / rate / seconds}
    with torch.autocast(model.device.type, dtype, enabled=dtype == torch.bfloat16):
        operations, seconds, rows = scoring(model, data.val, config.batching.eval_token_budget)
    rate = product_rate(model.model, rows, dtype, backward=False)
    return found | {"score_share_of_limit": operations / rate / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="options of `rm-opt train`")
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-mixed"])
    args = parser.parse_args()
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    found = {}
    for precision in args.precisions:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[precision] = measure(args.options, precision, Path(folder))
            except RMOptimizerError as error:
                sys.exit(f"error: {error}")
    print(f"machine: {machine()['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for precision, values in found.items():
        for name, value in values.items():
            print(f"{name}_{precision.partition('-')[0]}: {value:.3g}")


if __name__ == "__main__":
    main()

"""Share of this machine's limit that training and scoring of a model reach; `make bench` for the quick start's model.

The limit is the rate of the products with the model's own matrices (the output; in training also the gradients of
input and weight), measured alone in the same process, for as many rows as the largest pass has tokens. The work is what
the unique tokens of a decoder, or the real ones of an encoder, need: no padding, no second pass over a shared prompt,
attention by the keys that a query attends to (`ModelFlops`). `share_of_limit` is work over rate over the median
seconds of a step. The rest is in the profile of the last steps on a CPU, by PyTorch's profiler: parts of a step's
seconds for products, attention's kernels, other arithmetic (norms, activations, sums), copies, the optimizer with
clipping, and dispatch (Python, autograd and views); `wait` is the time between two steps (loader and trainer) over a
step. The profiler itself lengthens dispatch.

    python benchmarks/limit.py                              # the quick start's model
    python benchmarks/limit.py model.architecture.model_type=bert '~model.architecture.num_key_value_heads'
    python benchmarks/limit.py model=qwen data.train=pairs.jsonl hardware=h100
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytorch_lightning as pl
import torch
from torch.profiler import ProfilerActivity, profile

from rm_optimizer.core.classifier.head import head_side_modules
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import evaluation_batches, pair_collator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.records.accelerator import fastest_device, synchronize
from rm_optimizer.records.provenance import machine
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.adapters import AdapterKind
from rm_optimizer.schema.config import PrefixSharing
from rm_optimizer.training.callbacks.memory_profile import PROFILE_ROWS, ModelFlops, computed_tokens
from rm_optimizer.training.data.run_data import data_module, load_data
from rm_optimizer.training.run import quiet, run_training

STEPS, PROFILED, SCORED_PAIRS = 10, 3, 64
REPEATS = 5
"""Timings of each product, of which the fastest counts."""
KINDS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "linear", "_mkl_linear", "mkldnn_linear"),
    "copies": (
        *(
            "copy_",
            "cat",
            "stack",
            "clone",
            "index",
            "index_select",
            "index_copy",
            "index_copy_",
            "index_add_",
            "fill_",
        ),
        *("gather", "scatter_add_", "embedding", "embedding_dense_backward", "constant_pad_nd", "index_put_", "zero_"),
    ),
    "dispatch": (
        *("as_strided", "slice", "transpose", "t", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze"),
        *("select", "split", "split_with_sizes", "narrow", "detach", "alias", "empty", "empty_like", "empty_strided"),
        *("resize_", "to", "_to_copy", "unbind", "item", "_local_scalar_dense", "matmul", "permute", "contiguous"),
    ),
}
"""Operators of `aten` by kind; names with `attention` are attention, and the others arithmetic."""


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the profiler's library, which writes a line at each start and stop, from standard error."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class StepProfile(pl.Callback):
    """Parts of the seconds of the steps from `first` on, on a CPU."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.parts: Counter[str] = Counter()
        self._seconds = self._ended = 0.0
        self._profile: profile | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, index: int
    ) -> None:
        """Start the profiler and the clock."""
        if trainer.global_step >= self.first and pl_module.device.type == "cpu":
            self.parts["wait"] += time.perf_counter() - self._ended
            self._profile = profile(activities=[ProfilerActivity.CPU])
            with _silence():
                self._profile.start()
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: object) -> None:
        """Stop both, and add the step's parts."""
        if self._profile is None:
            self._ended = time.perf_counter()
            return
        seconds = time.perf_counter() - self._began
        with _silence():
            self._profile.stop()
        events = self._profile.events()
        backward = max(each.time_range.end for each in events if each.name.startswith("autograd::engine"))
        stepped = max(each.time_range.end for each in events if each.name.startswith("Optimizer.step"))
        found = Counter(optimizer=(stepped - backward) / 1e6)
        for event in events:
            name = event.name.rpartition("::")[2]
            kind = next((kind for kind, names in KINDS.items() if name in names), "arithmetic")
            if event.name.startswith(("aten::", "mkl")) and event.time_range.start < backward and kind != "dispatch":
                found["attention" if "attention" in name else kind] += event.self_cpu_time_total / 1e6
        found["dispatch"] = seconds - sum(found.values())
        self.parts += found
        self._seconds, self._ended = self._seconds + seconds, time.perf_counter()

    def shares(self) -> dict[str, float]:
        """Parts of the profiled seconds, largest first; none on a GPU."""
        return {f"part_{kind}": part / self._seconds for kind, part in self.parts.most_common()}


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
    flops = operations_of(model)
    assert flops is not None, "training has counted this model"
    pad, shares = model.pad_choice.token_id, model.supports_prefix_sharing() is None
    tokens = tokenize_pairs(pairs.pairs, model.renderer, None)
    collator = pair_collator(tokens, pairs.pairs, pad, prefix_sharing=shares)
    found = evaluation_batches(collator, np.arange(len(tokens)), budget)
    batches, times = [batch.to(model.device) for batch in found], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with model.inference():
            for batch in batches:
                model.rewards_of(batch)
        synchronize(model.device)
        times.append(time.perf_counter() - started)
    work = sum(map(replace(flops, backward=0, trained=0).of_batch, batches))
    return work, median(times), max(map(computed_tokens, batches))


def operations_of(model: BradleyTerryRM) -> ModelFlops | None:
    """The counts of a model, without the layers of its head, which compute one vector a sequence."""
    flops, parts = ModelFlops.of_model(model), map(model.model.get_submodule, head_side_modules(model.model))
    head = sum(weight.numel() for part in parts for weight in part.parameters() if weight.ndim > 1)
    if flops is None:
        return None
    return replace(flops, forward=flops.forward - head, backward=flops.backward - head, trained=flops.trained - head)


def measure(options: Sequence[str], precision: str, folder: Path, steps: int = STEPS) -> dict[str, float]:
    """Rate of the products and shares of it in one precision; the last of the steps are profiled."""
    own = [f"training.max_steps={steps}", "training.eval_at_start=false", "training.progress=false"]
    own += [f"hardware.precision={precision}", "profile_memory=true", f"output_dir={folder}"]
    config = typed(compose([*options, *own]), TrainConfig)
    if config.adapter.kind != AdapterKind.none or config.model.freeze is not None:
        raise ConfigError("measured are runs that train the whole model; leave adapter and model.freeze out")
    data, config = load_data(config), quiet(config, in_memory=True)
    train = data.train.subset(steps * config.batching.batch_size, config.seed)
    data = replace(data, train=train, val=data.val.subset(SCORED_PAIRS, config.seed))
    watched = StepProfile(steps - PROFILED)
    run_training(config, data=data, callbacks=[watched])
    with (folder / PROFILE_ROWS).open(encoding="utf-8") as file:
        seconds = median([float(row["step_seconds"]) for row in csv.DictReader(file)][1 : steps - PROFILED])
    model = BradleyTerryRM.from_pretrained(folder).requires_grad_(True)
    if config.hardware.accelerator != "cpu":
        model.to(fastest_device())
    flops = operations_of(model)
    if flops is None:
        raise ConfigError("the operations of this model are not known: it has experts, windows or recurrence")
    config.batching.prefix_sharing = PrefixSharing.off if model.supports_prefix_sharing() else PrefixSharing.on
    batches = data_module(data, config, model).macro_batches()
    passes = [[flops.of_batch(each) for each in batches[step].micro] for step in range(1, steps - PROFILED)]
    rows = max(map(computed_tokens, batches[1].micro))
    dtype = torch.bfloat16 if "bf16" in precision else torch.float32
    rate = product_rate(model.model, rows, dtype, backward=True)
    found = {"product_gflops": rate / 1e9, "train_share_of_limit": median(map(sum, passes)) / rate / seconds}
    found |= watched.shares()
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

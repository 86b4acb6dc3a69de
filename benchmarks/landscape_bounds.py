"""Share of eigenvalues marked converged that are off by more than the tolerance, on dense Hessians of tiny models.

Six architectures of about 1,000 parameters besides embeddings, each untrained and after `--steps` steps on the
synthetic world, with the Hessian of the Bradley-Terry loss over a few pairs written out in float64 as truth. From each
of `--starts` starting vectors Lanczos finds the top 1, 3, 5, 10 and 20, and 5 and 20 of each end: 245 runs a matrix.
Shares are of values after the search for overlooked ones; `wrong_runs` are shares of runs without it, and `with_check`
with it. `products_over_oracle` are means, before the search, beyond the smallest Krylov space with the right values.

    python benchmarks/landscape_bounds.py
    python benchmarks/landscape_bounds.py --starts 4 --families llama --steps 0
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from statistics import fmean

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from landscape_oracle import oracle_products
from landscape_subjects import some
from torch import Tensor

from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.batching import AnyPairBatch, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.landscape.operators.base import HessianOperator, MatrixOperator
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.landscape.solvers.krylov import KrylovState
from rm_optimizer.landscape.solvers.lanczos import Eigenpairs, End, lanczos
from rm_optimizer.landscape.solvers.overlooked import with_overlooked
from rm_optimizer.landscape.solvers.reference import full_spectrum
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.data import SyntheticConfig

FAMILIES = ("bert", "llama", "qwen3", "gpt2", "deberta-v2", "modernbert")
SHAPE = {
    "hidden_size": 12,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}
OTHER_FIELDS = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 6},
    "gpt2": {"n_embd": 12, "n_inner": 12, "n_head": 2, "n_layer": 1, "n_positions": 128},
}
CASES: tuple[tuple[str, int, End], ...] = (
    ("top1", 1, "largest"),
    ("top3", 3, "largest"),
    ("top5", 5, "magnitude"),
    ("top10", 10, "magnitude"),
    ("top20", 20, "magnitude"),
    ("5+5", 5, "both"),
    ("20+20", 20, "both"),
)
TOLERANCE = 1e-3


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Eigenvalues marked converged that are wrong, on dense Hessians.")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 60], help="training steps; a matrix of each")
    parser.add_argument("--starts", type=int, default=35, help="starting vectors of each matrix and case")
    parser.add_argument("--num-pairs", type=int, default=5, help="pairs that the loss is averaged over")
    return parser.parse_args()


def matrices(args: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Dense Hessians by name."""
    pairs = synthetic_world(SyntheticConfig(num_train=256, num_val=2)).train
    tokenizer = train_tokenizer(rendered_texts(pairs), 300)
    for family in args.families:
        fields = ({} if family == "gpt2" else SHAPE) | OTHER_FIELDS.get(family, {}) | {"model_type": family}
        model = BradleyTerryRM.from_config(fields, tokenizer, max_length=96, seed=0)
        perturb(model)
        collator = PairCollator(tokenize_pairs(pairs, model.renderer, None), pairs, model.renderer.pad_token_id)
        batches = some(collator, len(pairs), 4096)
        done = 0
        for steps in sorted(args.steps):
            train(model, batches, steps - done)
            done = steps
            measured = some(collator, args.num_pairs, 100_000)
            with measuring(model, measured, LossConfig(), params=inner(model), dtype=torch.float64) as objective:
                operator = HessianOperator(objective, product="reverse")
                found = full_spectrum(operator)
                yield f"{family}_{steps}_steps", (found.vectors.T * found.values) @ found.vectors


def inner(model: BradleyTerryRM) -> list[str]:
    """Names of the parameters that are no tables of tokens or places."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in tables]


def perturb(model: BradleyTerryRM) -> None:
    """Weights large enough for curvature outside the head."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def train(model: BradleyTerryRM, batches: list[AnyPairBatch], steps: int) -> None:
    """Take steps over the batches in turn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        bradley_terry_pair_losses(*batch.split(model.rewards_of(batch))).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def truth(values: Tensor, top_k: int, which: End) -> Tensor:
    """The wanted among descending values."""
    if which == "magnitude":
        return values[values.abs().argsort(descending=True)[:top_k]].sort(descending=True).values
    return values[:top_k] if which == "largest" else torch.cat([values[:top_k], values[-top_k:]])


def wrong(found: Eigenpairs, expected: Tensor) -> tuple[int, int]:
    """Values marked converged that are off, and values marked converged."""
    converged = torch.tensor(found.converged)
    is_off = (found.values - expected).abs() > TOLERANCE * expected.abs()
    return int((is_off & converged).sum()), int(converged.sum())


def measure(operator: MatrixOperator, values: Tensor, starts: int) -> list[tuple[str, int, int, int, int, int | None]]:
    """Rows of case, wrong values without the search and with it, values marked, products, and those of the oracle."""
    rows = []
    for case, top_k, which in CASES:
        expected = truth(values, top_k, which)
        check = partial(with_overlooked, operator, which=which, tolerance=TOLERANCE)
        for seed in range(starts):
            state = KrylovState()
            found = lanczos(operator, top_k, which=which, tolerance=TOLERANCE, seed=seed, state=state)
            off, marked = wrong(found, expected)
            left = wrong(check(found, seed=seed + 1000), expected)[0] if all(found.converged) else off
            oracle = oracle_products(state, expected.tolist(), top_k, which)
            rows.append((case, off, left, marked, found.num_products, oracle))
    return rows


def main() -> None:
    """Print the shares of each matrix, and of all."""
    args = options()
    everything, results = list[tuple[str, int, int, int, int, int | None]](), dict[str, float]()
    for name, matrix in matrices(args):
        values = torch.linalg.eigvalsh(matrix).flip(0)
        rows = measure(MatrixOperator((matrix + matrix.T) / 2), values, args.starts)
        off, left, marked = (sum(row[part] for row in rows) for part in (1, 2, 3))
        results[f"converged_but_wrong_share_{name}"] = left / max(marked, 1)
        everything += rows
        note = f"{left} of {marked:,} values, {off} without the search; {len(rows)} runs, {len(values):,} parameters"
        print(f"  {name}: {note}", flush=True)
    worst = max(results.values())
    for case, *_ in CASES:
        rows = [row for row in everything if row[0] == case]
        over = [row[4] - row[5] for row in rows if row[5] is not None]
        print(f"  {case}: at most {max(over)} products over the oracle; {len(rows) - len(over)} runs never reach it")
        results[f"wrong_runs_{case}"] = fmean(row[1] > 0 for row in rows)
        results[f"wrong_runs_with_check_{case}"] = fmean(row[2] > 0 for row in rows)
        results[f"products_{case}"] = fmean(row[4] for row in rows)
        results[f"products_over_oracle_{case}"] = fmean(over)
    results |= {"runs": len(everything), "converged_but_wrong_share": worst}
    for name, value in results.items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()

"""How fast a transformer's linear layers train on this CPU, library by library, and what bf16-mixed makes of a step.

PyTorch gives float32 matrix products on x86 to MKL, which is slow on some processors, and bf16 ones to oneDNN. Measured
are forward and backward passes of `torch.nn.functional.linear` in float32 and bf16, of the same layer through oneDNN's
float32 kernels, and of float32 tensors whose products oneDNN may round to bf16 (`torch.backends.mkldnn.matmul`); then a
training step of a small decoder under `hardware.precision=32-true` and `bf16-mixed`. Routes take turns in every round,
in an order drawn anew, and ratios are medians of ratios within a round, so that a busy machine slows both alike. With
one thread, the default, seconds are those of the processor, which other processes do not lengthen.

    python benchmarks/fp32_linears.py
    python benchmarks/fp32_linears.py --threads 8 --rounds 15
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.schema.data import SyntheticConfig

TOKENS, HIDDEN = (512, 2048), (384, 768, 1536)
BASELINE = "default"


class OneDNNLinear(torch.autograd.Function):
    """`x W'` with all three products through oneDNN's float32 kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The layer's output."""
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of input and weight."""
        x, weight = ctx.saved_tensors
        by_input = onednn_product(gradient, weight.T.contiguous())
        return by_input, onednn_product(gradient.T.contiguous(), x.T.contiguous())


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out


@contextlib.contextmanager
def bf16_products() -> Iterator[None]:
    """Float32 tensors whose products oneDNN may round to bf16."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


Route = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def trained(linear: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Route:
    """Forward and backward pass of a layer: its output and both gradients."""

    def run(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = (tensor.to(dtype).requires_grad_() for tensor in (x, weight))
        out = linear(x, weight)
        return out.detach(), *torch.autograd.grad(out, (x, weight), gradient.to(dtype))

    return run


def internally_bf16(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with bf16_products():
        return trained(nn.functional.linear)(x, weight, gradient)


ROUTES: dict[str, Route] = {
    BASELINE: trained(nn.functional.linear),
    "onednn": trained(OneDNNLinear.apply),
    "internal_bf16": internally_bf16,
    "bf16": trained(nn.functional.linear, torch.bfloat16),
}


def seconds(run: Callable[[], Any]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    run()
    return clock() - began


def rounds_of(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in every round, after one round that is not counted."""
    order, taken = list(runs), {name: list[float]() for name in runs}
    rng = random.Random(0)
    for turn in range(rounds + 1):
        rng.shuffle(order)
        for name in order:
            spent = seconds(runs[name])
            if turn:
                taken[name].append(spent)
    return taken


def speedup(taken: dict[str, list[float]], name: str, baseline: str) -> float:
    return statistics.median(base / own for base, own in zip(taken[baseline], taken[name], strict=True))


def relative_error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def measure_layer(tokens: int, hidden: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each route, and the largest relative error of its three results against float64."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, tokens, hidden, generator=generator)
    weight = torch.randn(hidden, hidden, generator=generator)
    inputs = (x, weight, gradient)
    exact = (x.double() @ weight.double().T, gradient.double() @ weight.double(), gradient.double().T @ x.double())
    errors = {name: relative_error(route(*inputs), exact) for name, route in ROUTES.items()}
    # Weights and inputs arrive in bf16 where a model keeps them so: casts are no part of a product.
    halves = tuple(tensor.bfloat16() for tensor in inputs)
    runs = {name: (lambda r=route, n=name: r(*(halves if n == "bf16" else inputs))) for name, route in ROUTES.items()}
    return rounds_of(runs, rounds), errors


def report_layers(rounds: int) -> dict[str, float]:
    speedups: dict[str, list[float]] = {name: [] for name in ROUTES}
    rates: list[float] = []
    errors: dict[str, float] = dict.fromkeys(ROUTES, 0.0)
    print(f"{'tokens x hidden':>16}" + "".join(f"{name + ' GFLOP/s':>24}" for name in ROUTES))
    for tokens in TOKENS:
        for hidden in HIDDEN:
            taken, found = measure_layer(tokens, hidden, rounds)
            operations = 6e-9 * tokens * hidden * hidden
            row = {name: operations / statistics.median(values) for name, values in taken.items()}
            print(f"{tokens:>8} x {hidden:<5}" + "".join(f"{rate:>24.0f}" for rate in row.values()), flush=True)
            rates.append(row[BASELINE])
            for name in ROUTES:
                speedups[name].append(speedup(taken, name, BASELINE))
                errors[name] = max(errors[name], found[name])
    result = {"default_gflops": statistics.geometric_mean(rates)}
    for name in ROUTES:
        if name != BASELINE:
            result[f"{name}_over_default"] = statistics.geometric_mean(speedups[name])
        result[f"{name}_relative_error"] = errors[name]
    return result


def training_step(precision: str) -> Callable[[], float]:
    """One optimizer step of a decoder of 8M parameters on 16 pairs, as `hardware.precision` has it computed."""
    pairs = synthetic_world(SyntheticConfig(num_train=200, num_val=2)).train
    tokenizer = train_tokenizer(rendered_texts(pairs), 1024)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}
    architecture = {"model_type": "llama", "num_key_value_heads": 6, **shape}
    model = BradleyTerryRM.from_config(architecture, tokenizer, max_length=128, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    chosen, rejected = torch.randint(3, len(tokenizer), (2, 16, 64), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(chosen)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model.compute_loss(chosen, mask, rejected, mask)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def report_step(rounds: int) -> dict[str, float]:
    steps = {precision: training_step(precision) for precision in ("32-true", "bf16-mixed")}
    first = {precision: step() for precision, step in steps.items()}
    taken = rounds_of(steps, rounds)
    return {
        "step_seconds_32_true": statistics.median(taken["32-true"]),
        "step_bf16_mixed_over_32_true": speedup(taken, "bf16-mixed", "32-true"),
        "step_bf16_mixed_loss_difference": abs(first["bf16-mixed"] - first["32-true"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers on this CPU, library by library.")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each route (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    for name, value in (report_layers(arguments.rounds) | report_step(arguments.rounds)).items():
        digits = max(2, 1 - math.floor(math.log10(value))) if value else 2
        print(f"{name}: {value:.{digits}f}")


if __name__ == "__main__":
    main()

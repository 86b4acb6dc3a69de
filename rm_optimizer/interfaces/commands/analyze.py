"""`rm-opt analyze`: the short flags of `python -m rm_optimizer.analyze`."""

from __future__ import annotations

from typing import Annotated

from typer import Context, Option

from rm_optimizer.interfaces.launch import as_overrides, become


def analyze(
    ctx: Context,
    checkpoint: Annotated[str | None, Option("--checkpoint", "-c", help="Run folder, model or .ckpt.")] = None,
    kind: Annotated[str | None, Option("--type", "-t", help="What to measure; a landscape preset.")] = None,
    data: Annotated[str | None, Option("--data", "-d", help="Pairs; a run's own unless given.")] = None,
    top_k: Annotated[str | None, Option("--top-k", "-k", help="Eigenvalues to compute.")] = None,
    method: Annotated[str | None, Option("--method", help="How to compute them.")] = None,
    pairs: Annotated[str | None, Option("--pairs", help="Pairs that the loss is averaged over.")] = None,
    params: Annotated[str | None, Option("--params", help="trainable, head, lora or a pattern of names.")] = None,
) -> None:
    """Measure the loss landscape of a model: `rm-opt analyze RUN --type hessian`.

    RUN is what `--checkpoint` names. Types: hessian, gauss_newton, fisher, density, slices, surface, layers,
    trajectory, evolution, between. The flags are short for the commonest options; everything else is passed on as it
    stands: `landscape.num_points=41`, `--cfg job` to see all of them.
    """
    rest = list(ctx.args)
    if checkpoint is None and rest and "=" not in rest[0] and not rest[0].startswith(("-", "~")):
        checkpoint = rest.pop(0)
    given = {
        "checkpoint": checkpoint,
        "landscape": kind,
        "data.train": data,
        "landscape.top_k": top_k,
        "landscape.method": method,
        "landscape.num_pairs": pairs,
        "landscape.params": params,
    }
    become("rm_optimizer.analyze", [*as_overrides(given), *rest])

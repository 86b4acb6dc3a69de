"""`rm-opt train` and `rm-opt analyze`: short flags for `python -m rm_optimizer.train` and `… .analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Context, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.launch import as_overrides, become, names_data, names_model


def train(
    ctx: Context,
    model: Annotated[str | None, Option("--model", "-m", help="Model preset, or path or hub id of a model.")] = None,
    optimizer: Annotated[str | None, Option("--optimizer", "-o", help="Optimizer preset.")] = None,
    data: Annotated[str | None, Option("--data", "-d", help="Training pairs: file, folder or hub name.")] = None,
    epochs: Annotated[str | None, Option("--epochs", "-e", help="Passes over the pairs.")] = None,
    batch_size: Annotated[str | None, Option("--batch-size", "-b", help="Pairs in one optimizer step.")] = None,
) -> None:
    """Train a reward model. Options are written name=value: `rm-opt train optimizer=adamw optimizer.lr=1e-5`.

    The flags below are short forms of common options. Hydra's own flags work too: `--cfg job` prints the composed
    options, `--multirun` runs a sweep, and `--config-dir DIR` adds presets.
    """
    if model is not None and "=" in model and not Path(model).exists():  # as after Hydra's own -m
        raise ConfigError(f"-m takes a model preset or path, got '{model}'; for a sweep write --multirun {model}")
    given = {
        "model.path" if model is not None and names_model(model) else "model": model,
        "optimizer": optimizer,
        "data.train" if data is not None and names_data(data) else "data": data,
        "training.epochs": epochs,
        "batching.batch_size": batch_size,
    }
    become("rm_optimizer.train", [*as_overrides(given), *ctx.args])


def analyze(
    ctx: Context,
    checkpoint: Annotated[
        str | None, Option("--checkpoint", "-c", help="Run folder, model or .ckpt to analyze.")
    ] = None,
    kind: Annotated[str | None, Option("--type", "-t", help="Landscape preset that selects the measurement.")] = None,
    data: Annotated[str | None, Option("--data", "-d", help="Preference pairs; default: the run's own.")] = None,
    top_k: Annotated[str | None, Option("--top-k", "-k", help="Eigenvalues to compute.")] = None,
    method: Annotated[str | None, Option("--method", help="Method that computes the result.")] = None,
    pairs: Annotated[str | None, Option("--pairs", help="Number of pairs to average the loss over.")] = None,
    params: Annotated[
        str | None, Option("--params", help="Parameters: trainable, head, lora or a name pattern.")
    ] = None,
) -> None:
    """Measure the loss landscape of a model. Example: `rm-opt analyze RUN --type hessian`.

    RUN is the same as `--checkpoint RUN`. Types: hessian, gauss_newton, fisher, density, slices, surface, layers,
    trajectory, evolution, between. The flags below are short forms of common options. All other options are written
    name=value, such as `landscape.num_points=41`; `--cfg job` prints them.
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

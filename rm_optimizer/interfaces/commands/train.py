"""`rm-opt train` and `rm-opt analyze`: short flags for the modules of these names; and the cost of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Context, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.launch import as_overrides, become, names_data, names_model
from rm_optimizer.interfaces.outputs import write_json


@dataclass(frozen=True)
class TrainFlags:
    """Short forms of common options of training, each with its flag and help."""

    model: Annotated[str | None, Option("--model", "-m", help="Model preset, or path or hub id of a model.")] = None
    optimizer: Annotated[str | None, Option("--optimizer", "-o", help="Optimizer preset.")] = None
    data: Annotated[str | None, Option("--data", "-d", help="Training pairs: file, folder or hub name.")] = None
    epochs: Annotated[str | None, Option("--epochs", "-e", help="Passes over the pairs.")] = None
    batch_size: Annotated[str | None, Option("--batch-size", "-b", help="Pairs in one optimizer step.")] = None

    def overrides(self) -> list[str]:
        """The flags in Hydra's grammar.

        Raises:
            ConfigError: if the model is an override, as after Hydra's own -m.
        """
        model, data = self.model, self.data
        if model is not None and "=" in model and not Path(model).exists():
            raise ConfigError(f"-m takes a model preset or path, got '{model}'; for a sweep write --multirun {model}")
        given = {
            "model.path" if model is not None and names_model(model) else "model": model,
            "optimizer": self.optimizer,
            "data.train" if data is not None and names_data(data) else "data": data,
            "training.epochs": self.epochs,
            "batching.batch_size": self.batch_size,
        }
        return as_overrides(given)


def train(ctx: Context, flags: TrainFlags) -> None:
    """Train a reward model. Options are written name=value: `rm-opt train optimizer=adamw optimizer.lr=1e-5`.

    The flags below are short forms of common options. Hydra's own flags work too: `--cfg job` prints the composed
    options, `--multirun` runs a sweep, and `--config-dir DIR` adds presets.
    """
    become("rm_optimizer.train", [*flags.overrides(), *ctx.args])


def estimate(
    ctx: Context,
    flags: TrainFlags,
    chip: Annotated[str | None, Option("--chip", help="Chip to tell the hours on, such as H100.")] = None,
    measure: Annotated[
        bool, Option("--measure", help="Also run three steps here, and tell the hours by them.")
    ] = False,
    json_file: Annotated[Path | None, Option("--json", help="Also write the numbers to this JSON file.")] = None,
) -> None:
    """Estimate the memory, disk and time of a training run. It takes the options of `rm-opt train`.

    It reads the configuration of the model, not its weights, and the pairs.
    """
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.schema import TrainConfig
    from rm_optimizer.training.callbacks.memory_profile import PEAK_BF16_FLOPS
    from rm_optimizer.training.estimate import estimate_run, peak_of_chip
    from rm_optimizer.training.run import measured

    overrides = [*flags.overrides(), *ctx.args]
    chip = chip or next((name for name in PEAK_BF16_FLOPS if f"hardware={name.lower()}" in overrides), None)
    if chip is not None:
        peak_of_chip(chip)
    found = estimate_run(checked(overrides, TrainConfig, writable=False))
    print(*found.sentences(chip), sep="\n")
    if measure:
        print(measured(checked(overrides, TrainConfig, writable=False), found.steps))
    write_json(json_file, found.to_json())


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

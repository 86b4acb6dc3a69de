"""`rm-opt evaluate`: a saved model on preference pairs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.pairs import Reading
from rm_optimizer.reporting.pictures import draw_evaluation, print_evaluation
from rm_optimizer.training.evaluate import evaluate_checkpoint


def evaluate_and_print(
    checkpoint: str,
    sources: Sequence[str],
    reading: Reading,
    *,
    output_dir: Path | None,
    token_budget: int,
    num_bootstrap: int,
    seed: int,
) -> None:
    """Print the metrics, and write them with the rewards of every pair and the plots into a folder.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        sources: pairs to evaluate on, together.
        reading: how rows are read.
        output_dir: the folder; None names one below `outputs/evaluate` by date and time.
        token_budget: tokens, padding included, of one pass.
        num_bootstrap: resamples over prompts for the intervals.
        seed: seed of the resamples.

    Raises:
        DataError: if the pairs cannot be read.
        CheckpointError: if the model cannot be loaded.
        ConfigError: if the folder cannot be written.
    """
    data = reading.load(sources)
    folder = _made(output_dir or Path("outputs", "evaluate", f"{datetime.now():%Y-%m-%d/%H-%M-%S}"))
    metrics = evaluate_checkpoint(
        checkpoint, data, output_dir=folder, token_budget=token_budget, num_bootstrap=num_bootstrap, seed=seed
    )
    draw_evaluation(folder, metrics)
    print_evaluation(f"{checkpoint} on {', '.join(sources)}", metrics)
    if data.skipped:
        print(f"{len(data.skipped)} bad rows dropped")
    print(f"metrics, rewards and plots: {folder}")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output must be a folder that can be written, got '{folder}' ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--output must be a folder that can be written, got '{folder}' (read-only)")
    return folder

"""`rm-opt evaluate`: a saved model on preference pairs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, Interrupted, RMOptimizerError, did_you_mean
from rm_optimizer.evaluation.saved_model import Evaluation, evaluate_model
from rm_optimizer.interfaces.local_model import load_local
from rm_optimizer.interfaces.pairs import PairOptions
from rm_optimizer.records.progress import progress
from rm_optimizer.reporting.pictures import draw_evaluation, print_evaluation

RESULTS = Path("outputs", "evaluate")
"""Folder of the results of evaluations for which none is named."""
_OF_OTHERS = ("options.json", "run.json", "config.json")


def evaluate_and_print(
    checkpoint: str,
    sources: Sequence[str],
    pair_options: PairOptions,
    *,
    by: Sequence[str],
    output_dir: Path | None,
    max_length: int | None,
    token_budget: int,
    num_bootstrap: int,
    seed: int,
    input_form: str | None,
) -> None:
    """Print the metrics, and write them with the rewards of every pair and the plots into a folder.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        sources: pairs to evaluate on, together.
        pair_options: options for reading rows.
        by: columns whose values are reported separately, beside source and subset.
        output_dir: the folder; None names one below `outputs/evaluate` by date and time.
        max_length: tokens kept of a sequence; None takes the stored number, or the model's.
        token_budget: tokens, padding included, of one pass.
        num_bootstrap: resamples over prompts for the intervals.
        seed: seed of the resamples.
        input_form: the value of `--input-form`.

    Raises:
        DataError: if the pairs cannot be read.
        CheckpointError: if the model cannot be loaded.
        ConfigError: if the folder cannot be written, or a column of `by` is unknown.
        Interrupted: if the user stops it.
    """
    data = pair_options.load(sources)
    _require_columns(data, by)
    folder = _made(output_dir or RESULTS / f"{datetime.now():%Y-%m-%d/%H-%M-%S}")
    try:
        model = load_local(checkpoint, max_length=max_length, input_form=input_form)
        with progress("evaluating", "responses") as show:
            evaluation = evaluate_model(
                model,
                data,
                checkpoint=checkpoint,
                output_dir=folder,
                partial_dir=output_dir or RESULTS,
                token_budget=token_budget,
                num_bootstrap=num_bootstrap,
                seed=seed,
                by=by,
                on_progress=show,
            )
    except (RMOptimizerError, KeyboardInterrupt) as error:
        with suppress(OSError):
            folder.rmdir()  # only where it is still empty
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted("stopped; the same command goes on from the responses scored so far") from None
        raise
    draw_evaluation(folder, evaluation.metrics)
    _print(checkpoint, sources, evaluation, folder)


def _print(checkpoint: str, sources: Sequence[str], evaluation: Evaluation, folder: Path) -> None:
    what = ", ".join(sources) if len(sources) <= 3 else f"{len(sources)} sources"
    print_evaluation(f"{checkpoint} on {what}", evaluation)
    if evaluation.num_skipped:
        print(f"rows that give no pair: {evaluation.num_skipped}")
    print(f"metrics, rewards and plots: {folder}")


def _require_columns(data: PreferenceDataset, by: Sequence[str]) -> None:
    known = {name for pair in data.pairs for name in pair.metadata}
    for column in by:
        if column not in known:
            raise ConfigError(did_you_mean("--by column", column, known))


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output must be a folder that can be written, got '{folder}' ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--output must be a folder that can be written, got '{folder}' (read-only)")
    if found := [name for name in _OF_OTHERS if (folder / name).exists()]:
        raise ConfigError(
            f"--output must not be the folder of a run or a model, got '{folder}' (it holds {found[0]}); name another"
        )
    return folder

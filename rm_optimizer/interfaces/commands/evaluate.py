"""`rm-opt evaluate`: metrics of a saved model on preference pairs."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.interfaces.outputs import filling, made_folder
from rm_optimizer.interfaces.pairs import PairOptions
from rm_optimizer.interfaces.saved_model import SavedModel

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.pair import PreferencePair
    from rm_optimizer.core.tokens.dataset import PreferenceDataset

RESULTS = Path("outputs", "evaluate")
"""Default folder of results."""


def evaluate(
    saved: SavedModel,
    sources: Annotated[list[str], Option("--data", "-d", help="Pairs: file, folder or pattern; may be repeated.")],
    pair_options: PairOptions,
    output: Annotated[
        Path | None, Option("--output", help="Folder for JSON and plots; default: one by time in outputs/evaluate.")
    ] = None,
    by: Annotated[
        list[str], Option("--by", metavar="COLUMN", help="Also report metrics by this column; may be repeated.")
    ] = [],  # noqa: B006
    thresholds: Annotated[
        list[float],
        Option("--threshold", metavar="REWARD", help="Also report TPR and FPR at this reward; may be repeated."),
    ] = [],  # noqa: B006
    token_budget: Annotated[
        int, Option("--token-budget", min=1, help="Most tokens in one forward pass, padding included.")
    ] = 16384,
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")] = 1000,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the resamples.")] = 0,
) -> None:
    """Measure a reward model on preference pairs.

    Prints a table, and writes JSON and plots. Repeat a stopped command to continue it.
    """
    from rm_optimizer.evaluation.saved_model import evaluate_model
    from rm_optimizer.records.files import held
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.reporting.run_report import draw_evaluation, print_evaluation

    data = pair_options.load(sources)
    known = {name for pair in data.pairs for name in pair.metadata}
    for column in by:
        if column not in known:
            raise ConfigError(did_you_mean("--by column", column, known))
    folder = made_folder(output or RESULTS / f"{datetime.now():%Y-%m-%d/%H-%M-%S}")
    with held(folder, "evaluation"):
        with filling(folder):
            model = saved.load()
            with progress("evaluating", "responses") as show:
                evaluation = evaluate_model(
                    model,
                    data,
                    checkpoint=saved.checkpoint,
                    output_dir=folder,
                    partial_dir=output or RESULTS,
                    token_budget=token_budget,
                    num_bootstrap=bootstrap,
                    seed=seed,
                    by=by,
                    thresholds=thresholds,
                    on_progress=show,
                )
        draw_evaluation(folder, evaluation.metrics)
        what = ", ".join(sources) if len(sources) <= 3 else f"{len(sources)} sources"
        print_evaluation(f"{saved.checkpoint} on {what}", evaluation)
        if evaluation.num_skipped:
            print(f"rows that give no pair: {evaluation.num_skipped}")
        _report_votes(folder, data, model.beta, bootstrap, seed)
        print(f"metrics, rewards and plots: {folder}")


def _report_votes(folder: Path, data: PreferenceDataset, beta: float, bootstrap: int, seed: int) -> None:
    """Compare the model with the votes of annotators, if pairs have votes."""
    import numpy as np

    from rm_optimizer.data_efficiency.votes import vote_calibration, votes_of
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.reporting.labels import report_votes

    pairs: defaultdict[str, deque[PreferencePair]] = defaultdict(deque)
    for pair in data.pairs:
        pairs[pair.pair_id].append(pair)
    rows = RunFolder(folder).pair_rewards()
    if (votes := votes_of([pairs[row.pair_id].popleft() for row in rows])) is not None:
        margins = np.array([row.chosen - row.rejected for row in rows])[votes.positions]
        report_votes(vote_calibration(margins, votes, beta=beta, num_bootstrap=bootstrap, seed=seed), folder)

"""`rm-opt doctor`: a model, and the pairs it is trained on, checked for what breaks reward models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from rm_optimizer.interfaces.pairs import PairOptions
from rm_optimizer.interfaces.saved_model import SavedModel, length_note

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.dataset import PreferenceDataset
    from rm_optimizer.core.pairs.trained_pairs import TrainedPairs
    from rm_optimizer.doctor.diagnosis import Diagnosis


def doctor(
    saved: SavedModel,
    pair_options: PairOptions,
    sources: Annotated[list[str], Option("--data", "-d", help="Pairs, each one split; may be repeated.")] = [],  # noqa: B006
    json_file: Annotated[Path | None, Option("--json", help="Also write the diagnosis here.")] = None,
    show_all: Annotated[bool, Option("--all", help="Also print the checks that are ok.")] = False,
    max_pairs: Annotated[int, Option("--max-pairs", min=1, help="Pairs, over all splits, to score.")] = 256,
    token_budget: Annotated[int, Option("--token-budget", min=1, help="Tokens of one pass, padding included.")] = 8192,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of samples and random labels.")] = 0,
) -> None:
    """Check what breaks reward models, in a model and its pairs; exits with 4 if a check fails, 0 on warnings."""
    from rm_optimizer.core.pairs.trained_pairs import TrainedPairs
    from rm_optimizer.interfaces.json_option import printed_beside, write_json
    from rm_optimizer.reporting.doctor_table import print_diagnosis

    data = pair_options.load_splits(sources, "--data")
    model = saved.load(seed)
    data = {name: dataset.accepted_by(model.renderer) for name, dataset in data.items()}
    trained = TrainedPairs.recorded(saved.checkpoint)
    diagnosis = _with_progress(model, data, trained, max_pairs=max_pairs, token_budget=token_budget, seed=seed)
    with printed_beside(json_file):
        print_diagnosis(diagnosis, show_all=show_all)
        if dropped := [row for dataset in data.values() for row in dataset.skipped]:
            print(f"rows that give no pair: {len(dropped)}, the first: {dropped[0]}")
        if note := length_note(model):
            print(f"note: {note}")
    write_json(json_file, diagnosis.to_json())
    raise Exit(diagnosis.exit_code)


def _with_progress(
    model: BradleyTerryRM,
    data: dict[str, PreferenceDataset],
    trained: TrainedPairs | None,
    *,
    max_pairs: int,
    token_budget: int,
    seed: int,
) -> Diagnosis:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from rm_optimizer.doctor.doctor import diagnose

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading")
        return diagnose(
            model,
            data,
            seed=seed,
            trained=trained,
            max_pairs=max_pairs,
            token_budget=token_budget,
            on_stage=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )

"""`rm-opt doctor`: checks of a model and its training pairs for common defects of reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from rm_optimizer.interfaces.outputs import printed_beside, write_json
from rm_optimizer.interfaces.pairs import PairOptions
from rm_optimizer.interfaces.saved_model import SavedModel, length_note
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.registry import import_plugins


def doctor(
    saved: SavedModel,
    pair_options: PairOptions,
    sources: Annotated[list[str], Option("--data", "-d", help="Pairs of one split; may be repeated.")] = [],  # noqa: B006
    json_file: Annotated[Path | None, Option("--json", help="Also write the diagnosis to this JSON file.")] = None,
    show_all: Annotated[bool, Option("--all", help="Also print the checks that passed.")] = False,
    max_pairs: Annotated[int, Option("--max-pairs", min=1, help="Most pairs to score, over all splits.")] = 256,
    token_budget: Annotated[
        int, Option("--token-budget", min=1, help="Most tokens in one forward pass, padding included.")
    ] = 8192,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of samples and random labels.")] = 0,
    plugins: Annotated[list[str], Option("--plugin", help="Module that registers checks; may be repeated.")] = [],  # noqa: B006
) -> None:
    """Check a model and its pairs for common defects.

    Exits with 4 if a check fails, and with 0 if there are only warnings.
    """
    from rm_optimizer.core.pairs.overlap import TrainedPairs
    from rm_optimizer.doctor.doctor import diagnose
    from rm_optimizer.records.ledger import stages
    from rm_optimizer.records.locations import resolve_source
    from rm_optimizer.records.run_folder import DOCTOR_FILE, RunFolder
    from rm_optimizer.reporting.doctor_table import print_diagnosis
    from rm_optimizer.training.folder.model_card import write_card
    from rm_optimizer.training.folder.record import RunResult

    import_plugins(plugins)
    data = pair_options.load_splits(sources, "--data")
    model = saved.load(seed)
    data = {name: dataset.accepted_by(model.renderer) for name, dataset in data.items()}
    trained = TrainedPairs.recorded(saved.checkpoint)
    limits = {"max_pairs": max_pairs, "token_budget": token_budget}
    with stages() as on_stage:
        diagnosis = diagnose(model, data, seed=seed, trained=trained, on_stage=on_stage, **limits)
    with printed_beside(json_file):
        print_diagnosis(diagnosis, show_all=show_all)
        if dropped := [row for dataset in data.values() for row in dataset.skipped]:
            print(f"rows that give no pair: {len(dropped)}, the first: {dropped[0]}")
        if note := length_note(model):
            print(f"note: {note}")
    write_json(json_file, diagnosis.to_json())
    run = RunFolder.of(saved.checkpoint)
    result = None if run is None else RunResult.read(run.path)
    if run is not None and result is not None and Path(resolve_source(saved.checkpoint).location) == run.export:
        write_text(run.path / DOCTOR_FILE, diagnosis.to_json() + "\n")
        print(f"kept in {run.path / DOCTOR_FILE}, and in the model's card {write_card(run.path, result)}")
    raise Exit(diagnosis.exit_code)

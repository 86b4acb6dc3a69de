"""`rm-opt doctor`: a model, and the pairs it is trained on, checked for what breaks reward models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.pairs.trained_pairs import TrainedPairs
from rm_optimizer.doctor.diagnosis import Diagnosis
from rm_optimizer.doctor.doctor import diagnose
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.json_option import printed_beside, write_json
from rm_optimizer.interfaces.local_model import length_note, load_local
from rm_optimizer.interfaces.pairs import PairOptions
from rm_optimizer.reporting.doctor_table import print_diagnosis


def diagnose_and_print(
    checkpoint: str,
    sources: Sequence[str],
    pair_options: PairOptions,
    *,
    json_file: Path | None,
    max_length: int | None,
    max_pairs: int,
    token_budget: int,
    seed: int,
    show_all: bool = False,
    input_form: str | None = None,
) -> int:
    """Print the diagnosis, write it as JSON where asked, and return the exit code.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads, a base model included.
        sources: pairs, each one data set.
        pair_options: options for reading rows.
        json_file: where the diagnosis goes as JSON.
        max_length: tokens kept of a sequence; None takes the stored number, or the model's.
        max_pairs: pairs, over all sources, whose rewards are computed.
        token_budget: tokens, padding included, of one pass.
        seed: of samples, folds, random labels and bootstraps.
        show_all: print the checks that are ok as well.
        input_form: the value of `--input-form`.

    Returns:
        0 if nothing failed, warnings or not; `diagnosis.FAILED_EXIT_CODE` otherwise.

    Raises:
        CheckpointError: if the model cannot be loaded.
        DataError: if pairs cannot be read.
        ConfigError: if an option is out of range or the JSON file cannot be written.
    """
    data = _datasets(sources, pair_options)
    model = load_local(checkpoint, max_length=max_length, input_form=input_form, seed=seed)
    data = {name: dataset.accepted_by(model.renderer) for name, dataset in data.items()}
    trained = TrainedPairs.recorded(checkpoint)
    diagnosis = _with_progress(model, data, trained, max_pairs=max_pairs, token_budget=token_budget, seed=seed)
    with printed_beside(json_file):
        print_diagnosis(diagnosis, show_all=show_all)
        if dropped := [row for dataset in data.values() for row in dataset.skipped]:
            print(f"rows that give no pair: {len(dropped)}, the first: {dropped[0]}")
        if note := length_note(model):
            print(f"note: {note}")
    write_json(json_file, diagnosis.to_json())
    return diagnosis.exit_code


def _datasets(sources: Sequence[str], pair_options: PairOptions) -> dict[str, PreferenceDataset]:
    """Data sets by file name, or by the whole source where two names are equal."""
    names = [Path(source).name for source in sources]
    keys = names if len(set(names)) == len(names) else list(sources)
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--data must name each source once, got {', '.join(sources)}")
    return dict(zip(keys, (pair_options.load(source) for source in sources), strict=True))


def _with_progress(
    model: BradleyTerryRM,
    data: dict[str, PreferenceDataset],
    trained: TrainedPairs | None,
    *,
    max_pairs: int,
    token_budget: int,
    seed: int,
) -> Diagnosis:
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

"""`rm-opt evaluate`, `leaderboard`, `doctor` and `report`: measurements of saved models and runs."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Context, Exit, Option

from rm_optimizer.errors import ConfigError, DataError, require_known
from rm_optimizer.interfaces import inputs
from rm_optimizer.interfaces.field_flags import refuse_unread
from rm_optimizer.interfaces.inputs import RayWorkers, SavedModel, TokenBudget, TokenizedPairOptions, length_note
from rm_optimizer.interfaces.outputs import filling, made_folder, printed_beside, write_json
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.data import Spelling
from rm_optimizer.schema.registry import import_plugins
from rm_optimizer.training.processes import launched_processes

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.pair import PreferencePair
    from rm_optimizer.evaluation.list_rules import Credit
    from rm_optimizer.evaluation.suite_scores import SuiteScores

RESULTS = Path("outputs", "evaluate")
"""Default folder of results."""


@dataclass(frozen=True)
class ScoringOptions:
    """Options of every evaluation, each with its flag and help."""

    output: Annotated[
        Path | None, Option("--output", help="Folder for JSON and plots; default: one by time in outputs/evaluate.")
    ] = None
    token_budget: TokenBudget = 16384
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")] = 1000
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the resamples.")] = 0
    ray: RayWorkers = None

    @property
    def partial_dir(self) -> Path:
        """Folder of the rewards so far, from which a repeated command continues."""
        return self.output or RESULTS

    def made_folder(self) -> Path:
        """Make the folder of the results."""
        return made_folder(self.output or RESULTS / f"{datetime.now():%Y-%m-%d/%H-%M-%S}")


def evaluate(
    context: Context,
    saved: SavedModel,
    pair_options: TokenizedPairOptions,
    scoring: ScoringOptions,
    others: Annotated[list[str] | None, Argument(help="Further models, for --suite.")] = None,
    sources: Annotated[
        list[str], Option("--data", "-d", help="Pairs: file, folder or pattern; may be repeated. See --suite.")
    ] = [],  # noqa: B006
    suite: Annotated[
        str | None,
        Option("--suite", metavar="NAME", help="Benchmark, or its YAML file; --data [SET=]FILE is a local copy."),
    ] = None,
    by: Annotated[
        list[str], Option("--by", metavar="COLUMN", help="Also report metrics by this column; may be repeated.")
    ] = [],  # noqa: B006
    thresholds: Annotated[
        list[float],
        Option("--threshold", metavar="REWARD", help="Also report TPR and FPR at this reward; may be repeated."),
    ] = [],  # noqa: B006
) -> None:
    """Measure a reward model on preference pairs, or models on a benchmark.

    Prints a table, and writes JSON and plots. Repeat a stopped command to continue it.
    """
    if suite is not None:
        unread = ("format", "columns", "winner", "layout", "kwise_rule", "label", "over_long", "by", "thresholds")
        refuse_unread(context, "with --suite", *unread)
        models = [saved, *(replace(saved, checkpoint=name) for name in others or ())]
        if not inputs.follows(context, [model.load for model in models], scoring.ray):
            _evaluate_suite(models, suite, sources, pair_options, scoring)
        return
    if not sources:
        raise ConfigError("missing option '--data'; name the pairs, or a benchmark with --suite")
    if others:
        raise ConfigError(f"several models need --suite NAME, got {saved.checkpoint} and {', '.join(others)}")
    if inputs.follows(context, [saved.load], scoring.ray):
        return

    data = pair_options.load(sources)
    known = {name for pair in data.pairs for name in pair.metadata}
    for column in by:
        require_known("--by column", column, known)

    import numpy as np

    from rm_optimizer.data_efficiency.votes import vote_calibration, votes_of
    from rm_optimizer.evaluation.saved_model import evaluate_model, load_in
    from rm_optimizer.records.files import held
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.reporting.labels import report_votes
    from rm_optimizer.reporting.run_report import draw_evaluation
    from rm_optimizer.reporting.tables import print_evaluation

    folder, seed, token_budget = scoring.made_folder(), scoring.seed, scoring.token_budget
    with held(folder, "evaluation"):
        with filling(folder):
            model, turned = load_in(saved.dtype, saved.load_as, data, token_budget=token_budget, seed=seed)
            with progress("evaluating", "responses") as show:
                evaluation = evaluate_model(
                    model,
                    data,
                    checkpoint=saved.checkpoint,
                    output_dir=folder,
                    partial_dir=scoring.partial_dir,
                    turned=turned,
                    token_budget=token_budget,
                    num_bootstrap=scoring.bootstrap,
                    seed=seed,
                    by=by,
                    thresholds=thresholds,
                    num_workers=scoring.ray,
                    on_progress=show,
                )
        draw_evaluation(folder, evaluation.metrics)
        what = ", ".join(sources) if len(sources) <= 3 else f"{len(sources)} sources"
        print_evaluation(f"{saved.checkpoint} on {what}", evaluation)
        if evaluation.num_skipped:
            print(f"rows that give no pair: {evaluation.num_skipped}")
        by_id: defaultdict[str, deque[PreferencePair]] = defaultdict(deque)
        for pair in data.pairs:
            by_id[pair.pair_id].append(pair)
        scored = RunFolder(folder).pair_rewards()
        if (votes := votes_of([by_id[row.pair_id].popleft() for row in scored])) is not None:
            margins = np.array([row.chosen - row.rejected for row in scored])[votes.positions]
            calibration = vote_calibration(margins, votes, beta=model.beta, num_bootstrap=scoring.bootstrap, seed=seed)
            report_votes(calibration, folder)
        print(f"metrics, rewards and plots: {folder}")


def _evaluate_suite(
    models: Sequence[SavedModel],
    name: str,
    sources: Sequence[str],
    pair_options: TokenizedPairOptions,
    scoring: ScoringOptions,
) -> None:
    """Score each model on a suite, one a device, print tables, and write JSON, Parquet and a plot.

    Several processes or workers on Ray share the responses of one model after the other.
    """
    from rm_optimizer.core.streaming.workers import change_model
    from rm_optimizer.evaluation.saved_model import ResponseScorer
    from rm_optimizer.evaluation.suite import Suite, read_suite
    from rm_optimizer.evaluation.suite_scores import RESERVED, score_on_suite, suite_result
    from rm_optimizer.records.files import held
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.reporting.suite import print_suite, write_suite

    names = [*(model.checkpoint for model in models), *RESERVED]
    if len({*names}) < len(names):
        told = f"each model must be named once, and none {', '.join(RESERVED)} (a folder can be ./{RESERVED[1]})"
        raise ConfigError(f"{told}; got {', '.join(names[: len(models)])}")
    suite = Suite.of(name)
    with Spelling.flags.used():
        items = read_suite(suite, sources, pair_options.bad_rows())
    folder = scoring.made_folder()
    free, loading = SimpleQueue[str | None](), Lock()
    processes = launched_processes()
    places = [None] if scoring.ray or (processes is not None and processes.world_size > 1) else inputs.devices()
    for device in places:
        free.put(device)

    def scored(saved: SavedModel) -> tuple[SuiteScores, list[Credit]]:
        """Scores of a model on a device that is free."""
        device = free.get()
        try:
            with loading:  # which sets options of libraries for a while
                model = saved.load(device=device)
            if note := length_note(model):
                print(f"note: {saved.checkpoint}: {note}", file=sys.stderr)
            shown = progress(f"{saved.checkpoint} on {suite.name}", "responses")
            with shown if len(places) == 1 else nullcontext(lambda done, total: None) as show:
                scorer = ResponseScorer(
                    token_budget=scoring.token_budget, folder=scoring.partial_dir, num_workers=scoring.ray,
                    on_progress=show,
                )  # fmt: skip
                found = score_on_suite(model, saved.checkpoint, items, scorer)
            if saved is not models[-1]:
                change_model()
            return found
        finally:
            free.put(device)

    with held(folder, "evaluation"):
        with filling(folder):
            pool = ThreadPoolExecutor(len(places))
            try:
                found = [*map(scored, models)] if len(places) == 1 else [*pool.map(scored, models)]
            finally:
                pool.shutdown(cancel_futures=True)
        result = suite_result(items, found, num_bootstrap=scoring.bootstrap, seed=scoring.seed)
        write_suite(result, folder)
        print_suite(result)
        print(f"scores and plot: {folder}")


def leaderboard(
    folder: Annotated[Path, Argument(help="Folder of results of `rm-opt evaluate --suite`, also in folders below it.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: FOLDER/report.")] = None,
) -> None:
    """Write a page on all models that were evaluated on suites.

    It compares them by stored results, of each model the newest, and scores nothing.
    """
    from rm_optimizer.reporting.folder_page import REPORT_FOLDER
    from rm_optimizer.reporting.suite import print_suite, stored_results, suite_document

    results = stored_results(folder)
    for result in results:
        print_suite(result)
    page = suite_document(results, "Leaderboard").write(output or folder / REPORT_FOLDER)
    print(f"page: {page}")


def doctor(
    saved: SavedModel,
    pair_options: TokenizedPairOptions,
    sources: Annotated[list[str], Option("--data", "-d", help="Pairs of one split; may be repeated.")] = [],  # noqa: B006
    json_file: Annotated[Path | None, Option("--json", help="Also write the diagnosis to this JSON file.")] = None,
    show_all: Annotated[bool, Option("--all", help="Also print the checks that passed.")] = False,
    max_pairs: Annotated[int, Option("--max-pairs", min=1, help="Most pairs to score, over all splits.")] = 256,
    token_budget: TokenBudget = 8192,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of samples and random labels.")] = 0,
    plugins: Annotated[list[str], Option("--plugin", help="Module that registers checks; may be repeated.")] = [],  # noqa: B006
) -> None:
    """Check a model and its pairs for common defects.

    Exits with 4 if a check fails, and with 0 if there are only warnings.
    """
    from rm_optimizer.core.storage.model_files import TrainedPairs
    from rm_optimizer.doctor.doctor import diagnose
    from rm_optimizer.records.ledger import stages
    from rm_optimizer.records.locations import resolve_source
    from rm_optimizer.records.run_folder import DOCTOR_FILE, RunFolder
    from rm_optimizer.reporting.run_report import print_diagnosis
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


def report(
    folder: Annotated[Path, Argument(help="Folder of a finished run, several runs or a study.")],
    output: Annotated[Path | None, Option("--output", "-o", help="Folder of the page; default: FOLDER/report.")] = None,
    form: Annotated[
        Literal["html", "md"], Option("--format", help="html writes the page; md prints Markdown for a pull request.")
    ] = "html",
) -> None:
    """Write a page about a run, several runs or a study.

    It shows results with intervals, pictures and settings, and lists missing parts. It needs no network.
    """
    if not folder.is_dir():
        raise DataError(f"no folder {folder}; name the folder of a finished run, of several runs or of a study")
    from rm_optimizer.reporting.folder_page import folder_markdown, write_page

    if form == "md":
        print(folder_markdown(folder), end="")
    else:
        print(f"page: {write_page(folder, output)}")

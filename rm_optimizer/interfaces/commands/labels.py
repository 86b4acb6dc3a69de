"""`rm-opt select`, `label`, `label-import` and `scaling`: choice of pairs to label, answers, and their worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from rm_optimizer.errors import ConfigError, Interrupted
from rm_optimizer.interfaces.commands.compare import Executors, Workers
from rm_optimizer.interfaces.field_flags import refuse_unread
from rm_optimizer.interfaces.inputs import PairOptions, SavedModel, follows

if TYPE_CHECKING:
    import numpy as np

    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble

DEFAULT_RULE = "boundary_optimal"


def select(
    context: Context,
    source: PairOptions,
    pool: Annotated[str, Argument(help="Unlabeled pairs: columns prompt, response_a and response_b; or any pairs.")],
    k: Annotated[int, Option("--k", min=1, help="Number of pairs to choose; all if the pool has fewer.")],
    out: Annotated[
        Path, Option("--out", help="File for the questions: .csv, .jsonl (also for Argilla) or .json (Label Studio).")
    ],
    model: Annotated[
        str | None, Option("--model", help="Saved reward model to improve by the labels, or an ensemble's folder.")
    ] = None,
    rule: Annotated[str, Option("--rule", help="Acquisition function that chooses the pairs.")] = DEFAULT_RULE,
    labeled: Annotated[list[str], Option("--labeled", help="Pairs that already have labels; may be repeated.")] = [],  # noqa: B006
    subsample: Annotated[int | None, Option("--subsample", min=1, help="Choose from this many random pairs.")] = None,
    cache: Annotated[
        Path | None,
        Option("--cache", help="Folder for computed features; with it, a repeated command continues a stopped one."),
    ] = None,
    workers: Annotated[
        int, Option("--ray-workers", min=0, help="Ray workers that compute features; 0: this process.")
    ] = 0,
    max_length: Annotated[
        int | None, Option("--max-length", min=8, help="Longest sequence in tokens; the rest is cut.")
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of ties, random draws and the order of responses.")] = 0,
) -> None:
    """Choose the pairs to label, and write them as questions.

    These are the pairs whose labels help the model most. People answer the questions here or in another tool.
    """
    from rm_optimizer.data_efficiency.feature_rules import acquisition_function
    from rm_optimizer.data_efficiency.pool import read_pool
    from rm_optimizer.data_efficiency.questions import questions_of, require_question_file, write_questions
    from rm_optimizer.evaluation.score_file import require_new
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.records.locations import ENSEMBLE_FILE

    acquire = acquisition_function(rule)
    if not acquire.reads_model:
        refuse_unread(context, f"with --rule {rule}, which reads no model", "model", "cache", "workers", "max_length")
    elif model is None:
        raise ConfigError(f"--rule {rule} reads a model: add --model, or take --rule random or length_stratified")
    elif (Path(model) / ENSEMBLE_FILE).is_file():
        refuse_unread(context, "with an ensemble, whose members have different features", "cache", "workers")
    require_question_file(out, "--out")
    require_new(out)
    if follows(context, [lambda: None if model is None else _scorer(model, max_length)], workers):
        return
    pairs, is_labeled = _pool(source, pool, labeled, subsample, seed)
    if not (left := int((~is_labeled).sum())):
        raise ConfigError(f"--labeled names all {len(is_labeled):,} pairs of {pool}, so there is none to choose from")
    scorer = None if model is None else _scorer(model, max_length)
    try:
        with progress("reading the pool", "pairs") as show:
            options: dict[str, Any] = {"is_labeled": is_labeled, "folder": cache, "ray_workers": workers}
            read = read_pool(pairs, scorer, **options, on_progress=lambda done: show(done, len(pairs)))
    except KeyboardInterrupt:
        again = "goes on from the pairs read so far" if cache is not None else "starts again; --cache DIR keeps them"
        raise Interrupted(f"stopped; the same command {again}") from None
    found = acquire.select(read, min(k, left), seed=seed)
    questions = questions_of(pairs, found, seed=seed)
    write_questions(questions, out)
    print(f"{len(found):,} of {left:,} unlabeled pairs by rule {rule}: {out}")
    print(f"rm-opt label {out} asks them here; rm-opt label-import {out} --out FILE reads the answers")


def label_import(
    answers: Annotated[Path, Argument(help="Answered questions: CSV, JSONL, or an export of Argilla or Label Studio.")],
    out: Annotated[Path, Option("--out", help="JSON Lines file for the preference pairs, for `data.train`.")],
) -> None:
    """Turn answered questions into training pairs. The label of a question is the mean of its answers."""
    from rm_optimizer.data_efficiency.questions import read_answers
    from rm_optimizer.evaluation.score_file import require_new
    from rm_optimizer.records.files import write_json_lines

    require_new(out)
    found = read_answers(answers)
    if not found.pairs:
        raise ConfigError(
            f"{answers} holds {found.num_open + found.num_skipped:,} questions and no answer; answer some first"
        )
    rows = [{**pair.to_dict(), **pair.metadata} for pair in found.pairs]
    for row in rows:
        del row["metadata"], row["margin"]
    write_json_lines(out, rows)
    print(f"{len(found.pairs):,} pairs of {found.num_answers:,} answers: {out}")
    print(
        f"questions skipped: {found.num_skipped:,}, still open: {found.num_open:,}; answers that repeat another: "
        f"{found.num_repeated:,}"
    )
    if found.num_contradicted:
        print(f"questions with different answers: {found.num_contradicted:,}; their label is the answers' mean")


def _pool(
    source: PairOptions, pool: str, labeled: list[str], subsample: int | None, seed: int
) -> tuple[PreferenceDataset, np.ndarray]:
    """Pairs to choose from followed by labeled ones, and a mask of the labeled ones."""
    import numpy as np

    from rm_optimizer.core.rows.readers import read_rows
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.data_efficiency.questions import asked_once
    from rm_optimizer.records.orders import random_positions

    of_pool = source
    if Path(pool).is_file() and not source.columns:  # its sides are the two responses if it names no better one
        _, first = next(read_rows(pool, lambda number, reason: None), (0, {}))
        if {"response_a", "response_b"} <= first.keys() and not {"chosen", "winner"} & first.keys():
            of_pool = replace(source, columns=["chosen=response_a", "rejected=response_b"], label=0.5)
    pairs = of_pool.load(pool)
    known = [] if not labeled else [*source.load(labeled)]
    asked = asked_once(pairs)
    if num_repeats := len(pairs) - len(asked):
        print(f"{num_repeats:,} pairs of the pool repeat another one, in this or the other order, and are asked once")
    ids = asked_once(known).keys()
    left = [pair for key, pair in asked.items() if key not in ids]
    if subsample is not None and subsample < len(left):
        print(f"choosing among {subsample:,} random pairs of {len(left):,}")
        left = [left[position] for position in random_positions(len(left), subsample, [seed, 2])]
    is_labeled = np.arange(len(left) + len(known)) >= len(left)
    return PreferenceDataset([*left, *known]), is_labeled


def _scorer(model: str, max_length: int | None) -> BradleyTerryRM | RewardModelEnsemble:
    from rm_optimizer.rl_coupling.ensemble_folder import ENSEMBLE_FILE, load_ensemble

    def load(checkpoint: str) -> BradleyTerryRM:
        return SavedModel(checkpoint, max_length).load()

    if (Path(model) / ENSEMBLE_FILE).is_file():
        return load_ensemble(Path(model), load=load)
    return load(model)


def label(
    questions: Annotated[Path, Argument(help="File of questions from rm-opt select: CSV, JSONL or JSON.")],
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port of the page; 0 picks a free one.")] = 0,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the sides on which responses are shown.")] = 0,
) -> None:
    """Ask the questions on a local page. Keys: A, B, T for a tie, S to skip, U to undo.

    Every answer is saved at once, in NAME.labels.jsonl next to the questions. Repeat a stopped command to continue it.
    """
    from rm_optimizer.data_efficiency.labeling_page import PageServer, open_answer_log
    from rm_optimizer.data_efficiency.questions import read_questions

    read = read_questions(questions)
    found = {item.pair_id: item for item, _ in read}
    answered = {item.pair_id for item, chances in read if any(chance is not None for chance in chances)}
    with (
        open_answer_log(questions, [*found.values()], answered=answered, seed=seed) as log,
        PageServer(log, questions.name, port) as server,
    ):
        print(f"{log.num_questions - log.num_answered:,} of {log.num_questions:,} questions are open")
        print(f"open {server.url}\nCtrl-C stops; the same command goes on", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
        print(f"{log.num_answered:,} of {log.num_questions:,} questions are answered")
    if (share := log.first_share) is not None:
        print(f"the response shown first was preferred in {share} of the answers; half means no habit of a side")
    print(f"rm-opt label-import {questions} --out FILE reads the answers")


OWNED: Mapping[str, str] = {
    "data.max_pairs": "--sizes says how many pairs",
    "data.split_seed": "each run has its own seed",
    "seed": "--seeds says how many",
    "output_dir": "runs are in the folder of the study",
    "hydra.run.dir": "runs are in the folder of the study",
}
"""Options that the study sets itself, each with the reason."""


def scaling(
    folder: Annotated[Path, Argument(help="Folder of the study.")],
    overrides: Annotated[list[str] | None, Argument(help="Options of all runs, as for rm-opt train.")] = None,
    sizes: Annotated[
        str | None,
        Option(
            "--sizes", help="Numbers of training pairs, such as 500,1000,2000,4000; default: all, halved four times."
        ),
    ] = None,
    seeds: Annotated[int, Option("--seeds", min=2, help="Runs at each size.")] = 3,
    gain: Annotated[float, Option("--gain", help="Gain in accuracy to plan for, in percentage points.")] = 2.0,
    executor: Executors = "process",
    workers: Workers = None,
) -> None:
    """Estimate how many more pairs a gain in accuracy needs.

    Trains at several sizes, and fits accuracy and NLL over the number of pairs. Writes scaling.json and pictures of the
    curves into FOLDER. Repeat a stopped command to continue it.
    """
    from rm_optimizer.data_efficiency.scaling import measure_scaling
    from rm_optimizer.experiments.study import TrialLines
    from rm_optimizer.experiments.training_trials import require_shared
    from rm_optimizer.experiments.trial import executor_named
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.reporting.labels import print_scaling, write_scaling
    from rm_optimizer.schema import TrainConfig

    require_shared(overrides or [], OWNED, "a scaling study")
    try:
        given = None if sizes is None else [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--sizes must be whole numbers with commas between them, got '{sizes}'") from None
    config = checked(overrides or [], TrainConfig, writable=False)
    report = measure_scaling(
        config,
        folder,
        sizes=given,
        num_seeds=seeds,
        gain=gain / 100,
        executor=executor_named(executor, workers),
        watch=TrialLines.of,
    )
    write_scaling(report, folder)
    print_scaling(report)
    print(f"numbers and pictures: {folder}")

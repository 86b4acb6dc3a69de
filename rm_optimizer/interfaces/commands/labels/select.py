"""`rm-opt select` and `rm-opt label-import`: the choice of pairs to label, and the import of people's labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from rm_optimizer.errors import ConfigError, Interrupted
from rm_optimizer.interfaces.field_flags import refuse_unread
from rm_optimizer.interfaces.pairs import PairOptions

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
    from rm_optimizer.rl_coupling.ensemble_folder import ENSEMBLE_FILE

    acquire = acquisition_function(rule)
    if not acquire.reads_model:
        refuse_unread(context, f"with --rule {rule}, which reads no model", "model", "cache", "workers", "max_length")
    elif model is None:
        raise ConfigError(f"--rule {rule} reads a model: add --model, or take --rule random or length_stratified")
    elif (Path(model) / ENSEMBLE_FILE).is_file():
        refuse_unread(context, "with an ensemble, whose members have features of their own", "cache", "workers")
    require_question_file(out, "--out")
    require_new(out)
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

    from rm_optimizer.core.pairs.orders import random_positions
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.data_efficiency.questions import asked_once

    pairs = _unlabeled(source, pool)
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


def _unlabeled(source: PairOptions, pool: str) -> PreferenceDataset:
    """Pairs of the pool's file; its sides are `response_a` and `response_b` if it names no better one."""
    from rm_optimizer.core.rows.readers import read_rows

    if Path(pool).is_file() and not source.columns:
        _, first = next(read_rows(pool, lambda number, reason: None), (0, {}))
        if {"response_a", "response_b"} <= first.keys() and not {"chosen", "winner"} & first.keys():
            return replace(source, columns=["chosen=response_a", "rejected=response_b"], label=0.5).load(pool)
    return source.load(pool)


def _scorer(model: str, max_length: int | None) -> BradleyTerryRM | RewardModelEnsemble:
    from rm_optimizer.interfaces.saved_model import SavedModel
    from rm_optimizer.rl_coupling.ensemble_folder import ENSEMBLE_FILE, load_ensemble

    def load(checkpoint: str) -> BradleyTerryRM:
        return SavedModel(checkpoint, max_length).load()

    if (Path(model) / ENSEMBLE_FILE).is_file():
        return load_ensemble(Path(model), load=load)
    return load(model)

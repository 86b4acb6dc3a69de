"""`rm-opt score`: rewards, printed or written as a column of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError, Interrupted, did_you_mean
from rm_optimizer.interfaces.saved_model import SavedModel, cut_notes, notes_on

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Prompt
    from rm_optimizer.evaluation.score_file import CountedRewards, CountingScorer, ScoredFile
    from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble

USAGE = "give either --prompt TEXT and --response TEXT, or an input and an output file"
REPORT_SUFFIX = ".report.json"
"""Suffix of the file that describes the rewards of an output: model, length limit and counts of cut texts."""


def score(
    saved: SavedModel,
    in_file: Annotated[Path | None, Argument(help="JSONL (also .gz), CSV or Parquet file to score.")] = None,
    out_file: Annotated[Path | None, Argument(help="File for the same rows with a column `reward`.")] = None,
    prompt: Annotated[str | None, Option("--prompt", help="Prompt of the responses to score.")] = None,
    responses: Annotated[list[str], Option("--response", help="Response to score; may be repeated.")] = [],  # noqa: B006
    token_budget: Annotated[
        int, Option("--token-budget", min=1, help="Most tokens in one forward pass, padding included.")
    ] = 16384,
    ensemble: Annotated[
        str | None,
        Option("--ensemble", help="For an ensemble's folder: mean, min or uwo, which combine its members."),
    ] = None,
    penalty: Annotated[
        float, Option("--penalty", min=0, help="Standard deviations that uwo subtracts from the mean.")
    ] = 1.0,
) -> None:
    """Print rewards of responses, or add them to a file.

    The output file has a column `reward`. Repeat a stopped command to continue a file.
    """
    names_responses = prompt is not None and bool(responses) and in_file is None and out_file is None
    names_files = prompt is None and not responses and in_file is not None and out_file is not None
    if not (names_responses or names_files):
        raise ConfigError(USAGE)
    if names_responses:
        _require_texts(prompt or "", responses)
    members = None if ensemble is None else _ensemble(saved, ensemble, penalty, token_budget)
    if members is None and (Path(saved.checkpoint) / "ensemble.json").is_file():
        raise ConfigError(f"{saved.checkpoint} is an ensemble; add --ensemble mean, min or uwo")
    if names_responses and members is not None:
        _print_predictions(members, prompt or "", responses)
    elif names_responses:
        _print_scores(saved, prompt or "", responses, token_budget)
    elif members is not None:
        _score_by_ensemble(members, saved.checkpoint, in_file or Path(), out_file or Path())
    else:
        _score_to_file(saved, in_file or Path(), out_file or Path(), token_budget)


class LocalScorer:
    """A saved reward model with a limit on the memory of a forward pass.

    Args:
        model: the model, on its device.
        token_budget: most tokens in one forward pass, padding included.
    """

    def __init__(self, model: BradleyTerryRM, token_budget: int) -> None:
        self.model = model
        self.token_budget = token_budget

    def score_counted(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> CountedRewards:
        """Rewards of the responses in the given order, and counts of cut prompts and responses."""
        from rm_optimizer.evaluation.score_file import score_counted

        return score_counted(self.model, prompts, responses, token_budget=self.token_budget)


def _require_texts(prompt: str, responses: Sequence[str]) -> None:
    if not prompt.strip():
        raise ConfigError("--prompt must not be empty")
    if not all(response.strip() for response in responses):
        raise ConfigError("--response must not be empty")


def _ensemble(saved: SavedModel, aggregation: str, penalty: float, token_budget: int) -> RewardModelEnsemble:
    from rm_optimizer.rl_coupling.ensemble import Aggregation
    from rm_optimizer.rl_coupling.ensemble_folder import load_ensemble

    if aggregation not in list(Aggregation):
        raise ConfigError(did_you_mean("--ensemble", aggregation, Aggregation))
    return load_ensemble(
        Path(saved.checkpoint),
        aggregation=aggregation,
        penalty=penalty,
        load=lambda source: replace(saved, checkpoint=source).load(),
        token_budget=token_budget,
    )


def _print_predictions(members: RewardModelEnsemble, prompt: str, responses: Sequence[str]) -> None:
    """Print the combined reward of each response and its spread over members, one response on each line."""
    predictions, cut = members.predict_counted([prompt] * len(responses), responses)
    for reward, found in zip(cut.rewards, predictions, strict=True):
        print(f"{reward:.6f} ± {found.std_reward:.6f}{'  uncertain' if found.is_high_uncertainty else ''}")
    for note in cut_notes("the members' lengths", len(responses), cut.num_prompt_cut, cut.num_response_cut):
        print(f"warning: {note}", file=sys.stderr)


def _score_by_ensemble(members: RewardModelEnsemble, checkpoint: str, source: Path, target: Path) -> None:
    """Write `source` with a column of combined rewards to `target`, continuing an earlier call that was stopped."""
    identity = members.digest()
    scored = _scored(members, source, target, identity)
    _write_report(target, scored, {"model": checkpoint, "model_digest": identity, "aggregation": members.aggregation})
    print(f"{scored.num_rows} rows scored by {len(members)} members: {target}")
    counts = (scored.num_responses, scored.num_prompt_cut or 0, scored.num_response_cut or 0)
    for note in cut_notes("the members' lengths", *counts):
        print(f"warning: {note}")


def _print_scores(saved: SavedModel, prompt: str, responses: Sequence[str], token_budget: int) -> None:
    """Print one reward on each line, in the order of the responses; truncation is reported on standard error."""
    from rm_optimizer.core.pairs.pair import require_finite

    model = saved.load()
    counted = LocalScorer(model, token_budget).score_counted([prompt] * len(responses), responses)
    require_finite(counted.rewards, lambda index: f"response {index + 1}")
    for reward in counted.rewards:
        print(f"{reward:.6f}")
    for note in notes_on(model, len(responses), counted.num_prompt_cut, counted.num_response_cut):
        print(f"warning: {note}", file=sys.stderr)


def _score_to_file(saved: SavedModel, source: Path, target: Path, token_budget: int) -> None:
    """Write `source` with a `reward` column to `target`, continuing an earlier call that was stopped.

    A JSON file beside the target records the model of the rewards and the truncation.
    """
    from rm_optimizer.core.model.identity import scorer_digest

    model = saved.load()
    identity = scorer_digest(model)
    scored = _scored(LocalScorer(model, token_budget), source, target, identity)
    _write_report(target, scored, {"model": saved.checkpoint, "model_digest": identity, "max_length": model.max_length})
    print(f"{scored.num_rows} rows scored: {target}")
    for note in notes_on(model, scored.num_responses, scored.num_prompt_cut or 0, scored.num_response_cut or 0):
        print(f"warning: {note}")


def _scored(scorer: CountingScorer, source: Path, target: Path, identity: str) -> ScoredFile:
    """Score a file and show a progress bar.

    Raises:
        Interrupted: if the user stops it.
    """
    from rm_optimizer.evaluation.score_file import score_file
    from rm_optimizer.records.ledger import progress

    try:
        with progress("scoring", "rows") as show:
            return score_file(scorer, source, target, scorer_name=identity, on_progress=lambda rows: show(rows, None))
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the rows scored so far") from None


def _write_report(target: Path, scored: ScoredFile, model: Mapping[str, str | int | None]) -> None:
    from rm_optimizer.records.files import write_text

    report = {**model, **asdict(scored)}
    write_text(target.with_name(target.name + REPORT_SUFFIX), json.dumps(report, indent=2) + "\n")

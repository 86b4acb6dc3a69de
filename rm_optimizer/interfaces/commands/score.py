"""`rm-opt score`: rewards, printed or written as a column of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError, Interrupted, did_you_mean
from rm_optimizer.interfaces.saved_model import SavedModel, cut_notes, length_note
from rm_optimizer.records.files import write_text

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Prompt
    from rm_optimizer.evaluation.score_file import CountedRewards
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
    if names_responses and not (prompt or "").strip():
        raise ConfigError("--prompt must not be empty")
    if not all(response.strip() for response in responses):
        raise ConfigError("--response must not be empty")
    if ensemble is None and (Path(saved.checkpoint) / "ensemble.json").is_file():
        raise ConfigError(f"{saved.checkpoint} is an ensemble; add --ensemble mean, min or uwo")
    scorer: LocalScorer | RewardModelEnsemble
    if ensemble is None:
        scorer = LocalScorer(saved.load(), token_budget)
        where, default = f"{scorer.model.max_length} tokens", length_note(scorer.model)
    else:
        scorer, where, default = _ensemble(saved, ensemble, penalty, token_budget), "the members' lengths", None
    if in_file is None or out_file is None:
        num_cut, stream = _print_scores(scorer, prompt or "", responses), sys.stderr
        num = len(responses)
    else:
        num, *num_cut = _score_file(scorer, saved.checkpoint, in_file, out_file)
        stream = sys.stdout
    for note in (*cut_notes(where, num, *num_cut), *([default] if default else [])):
        print(f"warning: {note}", file=stream)


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


def _print_scores(scorer: LocalScorer | RewardModelEnsemble, prompt: str, responses: Sequence[str]) -> list[int]:
    """Print the reward of each response, one on each line, and return the counts of cut prompts and responses.

    An ensemble also prints the spread over its members.
    """
    from rm_optimizer.core.pairs.pair import require_finite

    prompts = [prompt] * len(responses)
    if isinstance(scorer, LocalScorer):
        counted = scorer.score_counted(prompts, responses)
        require_finite(counted.rewards, lambda index: f"response {index + 1}")
        lines = [f"{reward:.6f}" for reward in counted.rewards]
    else:
        predictions, counted = scorer.predict_counted(prompts, responses)
        lines = [
            f"{reward:.6f} ± {found.std_reward:.6f}{'  uncertain' if found.is_high_uncertainty else ''}"
            for reward, found in zip(counted.rewards, predictions, strict=True)
        ]
    print("\n".join(lines))
    return [counted.num_prompt_cut, counted.num_response_cut]


def _score_file(
    scorer: LocalScorer | RewardModelEnsemble, checkpoint: str, source: Path, target: Path
) -> tuple[int, ...]:
    """Write `source` with a column `reward` to `target`, continuing an earlier call that was stopped.

    A JSON file beside the target describes the rewards. Returns the number of responses, and of cut ones.
    """
    from rm_optimizer.core.model.identity import scorer_digest
    from rm_optimizer.evaluation.score_file import score_file
    from rm_optimizer.records.ledger import progress

    about: dict[str, str | int] = {"model": checkpoint}
    if isinstance(scorer, LocalScorer):
        about |= {"model_digest": scorer_digest(scorer.model), "max_length": scorer.model.max_length}
        by = ""
    else:
        about |= {"model_digest": scorer.digest(), "aggregation": scorer.aggregation}
        by = f" by {len(scorer)} members"
    name = str(about["model_digest"])
    try:
        with progress("scoring", "rows") as show:
            scored = score_file(scorer, source, target, scorer_name=name, on_progress=lambda rows: show(rows, None))
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the rows scored so far") from None
    write_text(target.with_name(target.name + REPORT_SUFFIX), json.dumps(about | asdict(scored), indent=2) + "\n")
    print(f"{scored.num_rows} rows scored{by}: {target}")
    return scored.num_responses, scored.num_prompt_cut or 0, scored.num_response_cut or 0

"""`rm-opt score`: rewards of responses, printed or added to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from rm_optimizer.errors import ConfigError, Interrupted, require_known
from rm_optimizer.interfaces import inputs
from rm_optimizer.interfaces.inputs import RayWorkers, SavedModel, TokenBudget, cut_notes, length_note
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.data import Spelling

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble

USAGE = "give either --prompt TEXT and --response TEXT, or an input and an output file"
REPORT_SUFFIX = ".report.json"
"""Suffix of the file that describes the rewards of an output: model, length limit and counts of cut texts."""


def score(
    context: Context,
    saved: SavedModel,
    in_file: Annotated[Path | None, Argument(help="JSONL (also .gz), CSV or Parquet file to score.")] = None,
    out_file: Annotated[Path | None, Argument(help="File for the same rows with a column `reward`.")] = None,
    prompt: Annotated[str | None, Option("--prompt", help="Prompt of the responses to score.")] = None,
    responses: Annotated[list[str], Option("--response", help="Response to score; may be repeated.")] = [],  # noqa: B006
    token_budget: TokenBudget = 16384,
    ensemble: Annotated[
        str | None,
        Option("--ensemble", help="For an ensemble's folder: mean, min or uwo, which combine its members."),
    ] = None,
    penalty: Annotated[
        float, Option("--penalty", min=0, help="Standard deviations that uwo subtracts from the mean.")
    ] = 1.0,
    ray: RayWorkers = None,
    layout: Annotated[
        str | None,
        Option("--layout", metavar="MAPPING", help="{columns: …, parse: …, encoding: …} of the file, or a YAML file."),
    ] = None,
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
    for name, value in (("--ray", ray), ("--layout", layout)) if names_responses else ():
        if value is not None:
            raise ConfigError(f"{name} needs an input and an output file")
    if not all(response.strip() for response in responses):
        raise ConfigError("--response must not be empty")
    if ensemble is None and (Path(saved.checkpoint) / "ensemble.json").is_file():
        raise ConfigError(f"{saved.checkpoint} is an ensemble; add --ensemble mean, min or uwo")
    scorer: BradleyTerryRM | RewardModelEnsemble
    if ensemble is None:
        scorer = saved.load()
        where, default = f"{scorer.max_length} tokens", length_note(scorer)
    else:
        scorer, where, default = _ensemble(saved, ensemble, penalty, token_budget), "the members' lengths", None
    if inputs.follows(context, [lambda: scorer], ray):
        return
    if in_file is None or out_file is None:
        num_cut, stream = _print_scores(scorer, prompt or "", responses, token_budget), sys.stderr
        num = len(responses)
    else:
        num, *num_cut = _score_file(scorer, saved.checkpoint, in_file, out_file, token_budget, ray, layout)
        stream = sys.stdout
    for note in (*cut_notes(where, num, *num_cut), *([default] if default else [])):
        print(f"warning: {note}", file=stream)


def _ensemble(saved: SavedModel, aggregation: str, penalty: float, token_budget: int) -> RewardModelEnsemble:
    from rm_optimizer.rl_coupling.ensemble import Aggregation
    from rm_optimizer.rl_coupling.ensemble_folder import load_ensemble

    require_known("--ensemble", aggregation, Aggregation)
    return load_ensemble(
        Path(saved.checkpoint),
        aggregation=aggregation,
        penalty=penalty,
        load=lambda source: replace(saved, checkpoint=source).load(),
        token_budget=token_budget,
    )


def _print_scores(
    scorer: BradleyTerryRM | RewardModelEnsemble, prompt: str, responses: Sequence[str], token_budget: int
) -> list[int]:
    """Print the reward of each response, one on each line, and return the counts of cut prompts and responses.

    An ensemble also prints the spread over its members.
    """
    from rm_optimizer.core.metrics.estimate import require_finite
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.evaluation.score_file import score_counted

    prompts = [prompt] * len(responses)
    if isinstance(scorer, BradleyTerryRM):
        counted = score_counted(scorer, prompts, responses, token_budget=token_budget)
        require_finite(counted.rewards, lambda index: f"response {index + 1}")
        lines = [f"{reward:.6f}" for reward in counted.rewards]
    else:
        predictions, counted = scorer.predict_counted(prompts, responses)
        lines = [
            f"{reward:.6f} ± {found.std_reward:.6f}{'  uncertain' if found.is_high_uncertainty else ''}"
            for reward, found in zip(counted.rewards, predictions, strict=True)
        ]
    print("\n".join(lines))
    return [counted.num_prompt_cut or 0, counted.num_response_cut or 0]


def _score_file(
    scorer: BradleyTerryRM | RewardModelEnsemble,
    checkpoint: str,
    source: Path,
    target: Path,
    token_budget: int,
    num_workers: int | None,
    layout: str | None,
) -> tuple[int, ...]:
    """Write `source` with a column `reward` to `target`, continuing an earlier call that was stopped.

    A JSON file next to the target describes the rewards. Returns the number of responses, and of cut ones.
    """
    from rm_optimizer.core.classifier.quantization import dtype_name
    from rm_optimizer.core.model.identity import scorer_digest
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.evaluation.score_file import score_file
    from rm_optimizer.records.ledger import progress

    about: dict[str, str | int] = {"model": checkpoint}
    if isinstance(scorer, BradleyTerryRM):
        dtype = dtype_name(scorer.model.dtype)
        about |= {"model_digest": scorer_digest(scorer), "max_length": scorer.max_length, "dtype": dtype}
        by = ""
    else:
        about |= {"model_digest": scorer.digest(), "aggregation": scorer.aggregation}
        by = f" by {len(scorer)} members"
    name = str(about["model_digest"])
    try:
        with progress("scoring", "rows") as show, Spelling.flags.used():
            scored = score_file(
                scorer,
                source,
                target,
                scorer_name=name,
                token_budget=token_budget,
                layout=inputs.spelled(layout),
                num_workers=num_workers,
                on_progress=lambda rows: show(rows, None),
            )
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the rows scored so far") from None
    write_text(target.with_name(target.name + REPORT_SUFFIX), json.dumps(about | asdict(scored), indent=2) + "\n")
    print(f"{scored.num_rows} rows scored{by}: {target}")
    return scored.num_responses, scored.num_prompt_cut or 0, scored.num_response_cut or 0

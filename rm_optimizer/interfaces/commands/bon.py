"""`rm-opt bon`: best-of-n responses of a policy by a reward model, and the reward gained by each n."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from rm_optimizer.errors import ConfigError, DataError, Interrupted, RewardServerUnavailable
from rm_optimizer.interfaces.commands.policy_options import PolicyOptions, load_judge, require_other
from rm_optimizer.interfaces.inputs import SavedModel, cut_notes, length_note
from rm_optimizer.schema.rlhf import WORLD

if TYPE_CHECKING:
    import numpy as np

    from rm_optimizer.core.base import Scorer
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Prompt
    from rm_optimizer.rl_coupling.policy_simulation import RankedResponses

WORLD_PROMPTS = 64
"""Default number of prompts of the synthetic world."""
FEWEST_POINTS = 4
"""Least number of values of n, and of prompts, to fit an over-optimization curve."""


def bon(
    context: Context,
    saved: SavedModel,
    out_file: Annotated[Path, Argument(help="JSON Lines file for the prompts with their ranked responses.")],
    responses: PolicyOptions,
    n: Annotated[int, Option("--n", min=1, help="Responses for each prompt.")] = 16,
    gold: Annotated[
        str | None, Option("--gold", help="Reward model that judges the selection, or `world` for its gold reward.")
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the responses and of the intervals.")] = 0,
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")] = 1000,
    server: Annotated[
        str | None, Option("--server", help="Score with this reward server, which has CHECKPOINT's weights.")
    ] = None,
) -> None:
    """Rank a policy's responses by a reward model.

    Also estimates the reward of the best of 1, 2, 4, … responses. Repeat a stopped command to continue it.
    OUT.curve.json and OUT.curve.png hold the curve. With --gold, OUT.overoptimization.json and its picture show from
    which n on more selection makes responses worse.
    """
    policy, completions = responses.policy, responses.completions
    if policy is None and completions is None:
        raise ConfigError("give either --policy MODEL, or --completions FILE of saved responses")
    responses.check(context, "n")
    if policy not in (None, WORLD) and responses.prompts is None:
        raise ConfigError("--policy MODEL needs --prompts FILE")
    from rm_optimizer.evaluation.response_files import read_prompts
    from rm_optimizer.evaluation.score_file import cut_counts
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler, rank_file, read_ranked

    curve_file = out_file.with_suffix(".curve.json")
    most = responses.num_prompts or (WORLD_PROMPTS if responses.prompts is None else sys.maxsize)
    texts: Sequence[Prompt] = [] if policy is None else responses.read_prompts(most)
    chosen = None if policy is None else responses.load()
    judge = None if gold is None else load_judge(gold, texts or list(read_prompts(completions or Path())))
    try:
        with _scorer(saved, server) as (model, scorer), progress("ranking", "prompts") as show:
            if judge is not None:
                require_other(judge, model)
            if chosen is None:
                counts = rank_file(scorer, completions or Path(), out_file, on_progress=show)
            else:
                sampler = BestOfNSampler(chosen, scorer, n, seed=seed)
                counts = sampler.sample_to_file(texts, out_file, on_progress=show)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the prompts ranked so far") from None
    except RewardServerUnavailable as error:
        raise RewardServerUnavailable(f"{error}; the same command goes on from the prompts ranked so far") from error
    ranked, proxy = read_ranked(out_file)
    _report(curve_file, ranked, proxy, judge, bootstrap, seed)
    prompts_cut, responses_cut = counts.num_prompt_cut, counts.num_response_cut
    if prompts_cut is None or responses_cut is None:  # a server does not count them, so the model's local copy does
        of_each = [cut_counts(model.encode([row.prompt] * len(row.responses), row.responses)) for row in ranked]
        prompts_cut, responses_cut = (sum(side) for side in zip(*of_each, strict=True))
    cut = cut_notes(f"{model.max_length} tokens", counts.num_responses, prompts_cut, responses_cut)
    for note in filter(None, (*cut, length_note(model))):
        print(f"warning: {note}")
    print(f"prompts: {len(ranked)}, each with {proxy.shape[1]} ranked responses: {out_file}")


def _report(
    curve_file: Path,
    ranked: Sequence[RankedResponses],
    proxy: np.ndarray,
    judge: Scorer | None,
    num_bootstrap: int,
    seed: int,
) -> None:
    """Write, draw and print the curve, and that against the gold reward."""
    import numpy as np

    from rm_optimizer.records.files import write_text
    from rm_optimizer.reporting.figures import save_figure
    from rm_optimizer.reporting.results import plot_best_of_n, plot_overoptimization
    from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
    from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve

    gold = None
    if judge is not None:
        groups = judge.score_groups([row.prompt for row in ranked], [row.responses for row in ranked])
        gold = np.array([rewards.tolist() for rewards in groups])
    curve = BestOfNCurve.measure(proxy, gold, num_bootstrap=num_bootstrap, seed=seed)
    write_text(curve_file, curve.to_json() + "\n")
    save_figure(plot_best_of_n(curve), curve_file.with_suffix(".png"))
    has_gold = gold is not None
    print("     n   KL (nats, at most)   proxy reward" + ("                gold reward" if has_gold else ""))
    for point in curve.points:
        print(f"{point.n:6,}   {point.kl_bound:18.2f}   {point.proxy!s:24}{f'   {point.gold}' if has_gold else ''}")
    if gold is None:
        return
    if min(len(curve.points), len(ranked)) < FEWEST_POINTS:
        print(f"no over-optimization curve: it needs {FEWEST_POINTS} prompts with {2 ** (FEWEST_POINTS - 1)} responses")
        return
    try:
        over = OveroptimizationCurve.of_best_of_n(proxy, gold, num_bootstrap=num_bootstrap, seed=seed)
    except DataError as error:  # the ranked responses and the curve are written and are right
        print(f"warning: {error}")
        return
    file = curve_file.with_suffix("").with_suffix(".overoptimization.json")
    write_text(file, over.to_json() + "\n")
    save_figure(plot_overoptimization(over), file.with_suffix(".png"))
    print(over.verdict("the largest n"))


@contextmanager
def _scorer(saved: SavedModel, server: str | None) -> Iterator[tuple[BradleyTerryRM, Scorer]]:
    """The model, and its scorer: the model itself, or a client of the server with its weights."""
    model = saved.load()
    if server is None:
        yield model, model
        return
    from rm_optimizer.rl_coupling.trainer_rewards import serving

    with serving(server, model, saved.checkpoint, option="--server") as client:
        print(f"server: {server} answers with version {client.version}")
        yield model, client

"""`rm-opt bon`: best-of-n responses of a policy by a reward model, and what choosing among more of them gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError, DataError, Interrupted, RewardServerUnavailable, did_you_mean
from rm_optimizer.interfaces.saved_model import SavedModel, cut_notes, length_note
from rm_optimizer.schema.rlhf import WORLD

if TYPE_CHECKING:
    import numpy as np

    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Prompt, Scorer
    from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
    from rm_optimizer.rl_coupling.policy_simulation import Policy, RankedResponses

BACKENDS = ("transformers", "vllm")
FEWEST_POINTS = 4
"""Values of n, and prompts, from which an over-optimization curve is fitted."""


def bon(
    saved: SavedModel,
    out_file: Annotated[Path, Argument(help="JSON Lines of prompts with their ranked responses.")],
    policy: Annotated[
        str | None, Option("--policy", help="Causal language model that answers, or `world`, the quick start's.")
    ] = None,
    prompts: Annotated[Path | None, Option("--prompts", help="File with a column `prompt`; for a policy.")] = None,
    completions: Annotated[Path | None, Option("--completions", help="Rank these saved responses instead.")] = None,
    n: Annotated[int, Option("--n", min=1, help="Responses to each prompt.")] = 16,
    num_prompts: Annotated[int | None, Option("--num-prompts", min=1, help="First prompts only.")] = None,
    gold: Annotated[
        str | None, Option("--gold", help="Reward model that judges the selection, or `world`: its gold reward.")
    ] = None,
    backend: Annotated[str, Option("--backend", help="Generation: transformers, or vllm with its extra.")] = BACKENDS[
        0
    ],
    max_new_tokens: Annotated[int, Option("--max-new-tokens", min=1, help="Most tokens of a response.")] = 128,
    temperature: Annotated[float, Option("--temperature", help="Divisor of the policy's logits.")] = 1.0,
    top_p: Annotated[float, Option("--top-p", help="Probability mass to draw from.")] = 1.0,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the responses and of the intervals.")] = 0,
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Resamples for the intervals.")] = 1000,
    server: Annotated[
        str | None, Option("--server", help="Reward server with CHECKPOINT's weights, to score by it.")
    ] = None,
) -> None:
    """Rank responses of a policy by a reward model, and estimate the best of n for every n up to their number.

    A stopped command goes on when repeated. OUT.curve.json and OUT.curve.png hold the curve; with
    --gold, OUT.overoptimization.json and its picture say where more selection makes responses worse.
    """
    _require_one_source(policy, prompts, completions)
    if backend not in BACKENDS:
        raise ConfigError(did_you_mean("--backend", backend, BACKENDS))
    from rm_optimizer.core.rows.response_files import read_prompts
    from rm_optimizer.records.progress import progress
    from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler, rank_file, read_ranked

    curve_file = out_file.with_suffix(".curve.json")
    texts: Sequence[Prompt] = [] if policy is None else _prompts(prompts, num_prompts)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    chosen = None if policy is None else _policy(policy, backend, options)
    judge = None if gold is None else _judge(gold, texts or list(read_prompts(completions or Path())))
    try:
        with _scorer(saved, server) as (model, scorer), progress("ranking", "prompts") as show:
            if chosen is None:
                rank_file(scorer, completions or Path(), out_file, on_progress=show)
            else:
                BestOfNSampler(chosen, scorer, n, seed=seed).sample_to_file(texts, out_file, on_progress=show)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the same command goes on from the prompts ranked so far") from None
    except RewardServerUnavailable as error:
        raise RewardServerUnavailable(f"{error}; the same command goes on from the prompts ranked so far") from error
    ranked, proxy = read_ranked(out_file)
    _report(curve_file, ranked, proxy, judge, bootstrap, seed)
    for note in _notes(model, ranked):
        print(f"warning: {note}")
    print(f"prompts: {len(ranked)}, each with {proxy.shape[1]} ranked responses: {out_file}")


def _require_one_source(policy: str | None, prompts: Path | None, completions: Path | None) -> None:
    """Refuse any but a policy with its prompts, or saved responses."""
    if (policy is None) == (completions is None):
        raise ConfigError("give either --policy MODEL, or --completions FILE of saved responses")
    if completions is not None and prompts is not None:
        raise ConfigError("--prompts is for --policy; --completions brings its own prompts")
    if policy is not None and policy != WORLD and prompts is None:
        raise ConfigError("--policy MODEL needs --prompts FILE")


def _notes(model: BradleyTerryRM, ranked: Sequence[RankedResponses]) -> list[str]:
    """Sentences on what the rewards do not see."""
    cut = [0, 0]
    for row in ranked:
        for encoding in model.encode([row.prompt] * len(row.responses), row.responses):
            cut[0] += encoding.prompt_cut > 0
            cut[1] += encoding.response_cut > 0
    notes = cut_notes(f"{model.max_length} tokens", sum(len(row.responses) for row in ranked), *cut)
    note = length_note(model)
    return notes if note is None else [*notes, note]


def _report(
    curve_file: Path,
    ranked: Sequence[RankedResponses],
    proxy: np.ndarray,
    judge: Scorer | None,
    num_bootstrap: int,
    seed: int,
) -> None:
    """Write, draw and print the curve."""
    import numpy as np

    from rm_optimizer.records.files import write_text
    from rm_optimizer.reporting.policy_plots import plot_best_of_n, plot_overoptimization
    from rm_optimizer.reporting.style import save_figure
    from rm_optimizer.rl_coupling.best_of_n_curve import BestOfNCurve
    from rm_optimizer.rl_coupling.overoptimization import OveroptimizationCurve

    gold = None
    if judge is not None:
        scores = judge.score_groups([row.prompt for row in ranked], [row.responses for row in ranked])
        gold = np.array([score.tolist() for score in scores])
    curve = BestOfNCurve.measure(proxy, gold, num_bootstrap=num_bootstrap, seed=seed)
    write_text(curve_file, curve.to_json() + "\n")
    save_figure(plot_best_of_n(curve), curve_file.with_suffix(".png"))
    _print(curve)
    if gold is None or len(curve.points) < FEWEST_POINTS or len(ranked) < FEWEST_POINTS:
        return
    over = OveroptimizationCurve.of_best_of_n(proxy, gold, num_bootstrap=num_bootstrap, seed=seed)
    over_file = curve_file.with_suffix("").with_suffix(".overoptimization.json")
    write_text(over_file, over.to_json() + "\n")
    save_figure(plot_overoptimization(over), over_file.with_suffix(".png"))
    print(over.verdict("the largest n"))


def _print(curve: BestOfNCurve) -> None:
    has_gold = curve.points[0].gold is not None
    print("     n   KL (nats, at most)   proxy reward" + ("                gold reward" if has_gold else ""))
    for point in curve.points:
        gold = f"   {point.gold}" if has_gold else ""
        print(f"{point.n:6,}   {point.kl_bound:18.2f}   {point.proxy!s:24}{gold}")


def _prompts(path: Path | None, most: int | None) -> list[Prompt]:
    """Prompts of a file, or those of the synthetic world that training does not see."""
    if path is None:
        from rm_optimizer.core.pairs.synthetic import PreferenceWorld

        return list(PreferenceWorld(0).prompts()[: most or 64])
    from rm_optimizer.core.rows.response_files import read_prompts

    found = [prompt for _, prompt in zip(range(most or 2**62), read_prompts(path), strict=False)]
    if not found:
        raise DataError(f"{path}: there are no prompts")
    return found


def _policy(name: str, backend: str, options: dict[str, float]) -> Policy:
    from rm_optimizer.rl_coupling.language_policies import TransformersPolicy, VLLMPolicy

    if name == WORLD:
        from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
        from rm_optimizer.rl_coupling.world_policy import WorldPolicy

        return WorldPolicy(PreferenceWorld(0, gold=Gold()))
    try:
        return (VLLMPolicy if backend == "vllm" else TransformersPolicy)(name, **options)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"--{str(error).replace('_', '-', 2)}") from error


def _judge(name: str, prompts: Sequence[Prompt]) -> Scorer:
    """The model that judges; the world's gold reward must know all prompts before any is ranked."""
    if name == WORLD:
        from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
        from rm_optimizer.rl_coupling.world_policy import WorldGold

        judge = WorldGold(PreferenceWorld(0, gold=Gold()))
        judge.score(prompts, ["."] * len(prompts))
        return judge
    return SavedModel(name).load()


@contextmanager
def _scorer(saved: SavedModel, server: str | None) -> Iterator[tuple[BradleyTerryRM, Scorer]]:
    """The model, and what scores: itself, or a client of the server that has its weights."""
    model = saved.load()
    if server is None:
        yield model, model
        return
    from rm_optimizer.rl_coupling.reward_server import serving

    with serving(server, model, saved.checkpoint, option="--server") as client:
        print(f"server: {server} answers with version {client.version}")
        yield model, client

"""`rm-opt rlhf`: reward models from preference pairs, and a policy that TRL optimizes against them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from rm_optimizer.interfaces.launch import as_overrides
from rm_optimizer.schema.rlhf import WORLD

if TYPE_CHECKING:
    from rm_optimizer.rl_coupling.rlhf import PolicyCheckpoint


def rlhf(
    ctx: Context,
    output: Annotated[Path, Argument(help="Folder of the run.")],
    policy: Annotated[str | None, Option("--policy", help="Causal language model; default: world.")] = None,
    prompts: Annotated[str | None, Option("--prompts", help="File with a column `prompt`.")] = None,
    data: Annotated[str | None, Option("--data", "-d", help="Pairs to train the reward models on.")] = None,
    reward_model: Annotated[
        list[str] | None, Option("--reward-model", help="Trained reward model; may be repeated for an ensemble.")
    ] = None,
    server: Annotated[
        str | None, Option("--server", help="Reward server with the weights of the only --reward-model.")
    ] = None,
    gold: Annotated[str | None, Option("--gold", help="Reward model that judges the policy, or `world`.")] = None,
    algorithm: Annotated[str | None, Option("--algorithm", help="grpo or rloo.")] = None,
    steps: Annotated[str | None, Option("--steps", help="Optimizer steps of the policy.")] = None,
) -> None:
    """Train reward models, and optimize a policy against them.

    The policy is optimized with TRL's GRPO or RLOO. Options are written name=value. Options of the policy are named
    rlhf.NAME; reward models take the options of `rm-opt train`. Every checkpoint is measured on fresh
    responses. Repeat a stopped command to continue it.
    """
    from rm_optimizer.experiments.training_trials import require_shared
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.interfaces.outputs import made_folder
    from rm_optimizer.records.quoting import in_quotes
    from rm_optimizer.records.recall import written
    from rm_optimizer.schema.rlhf import RLHFRunConfig

    folder = "OUTPUT is the folder"
    owned = {"hydra.run.dir": folder, "output_dir": folder, "resume": "a repeated command continues"}
    require_shared(ctx.args, owned, "rm-opt rlhf")
    given = {
        "rlhf.policy": policy,
        "rlhf.prompts": prompts,
        "data.train": data,
        "rlhf.server": server,
        "rlhf.gold": gold,
        "rlhf.algorithm": algorithm,
        "rlhf.steps": steps,
    }
    overrides = [*as_overrides(given), *ctx.args, f"hydra.run.dir={in_quotes(str(output))}"]
    if policy not in (None, WORLD) and not any(item.startswith("rlhf=") for item in ctx.args):
        overrides.insert(0, "rlhf=language_model")
    if reward_model:
        overrides.append(f"rlhf.reward_models={written(reward_model)}")
    config = checked(overrides, RLHFRunConfig, name="rlhf")
    made_folder(output)
    from rm_optimizer.experiments.rlhf import run_rlhf  # which a mistyped option does not wait for
    from rm_optimizer.reporting.figures import save_figure
    from rm_optimizer.reporting.results import plot_overoptimization, plot_policy_run

    result = run_rlhf(config, on_stage=lambda stage: print(stage, flush=True), on_checkpoint=_print_checkpoint)
    save_figure(plot_policy_run(result), output / "rlhf.png")
    last = result.checkpoints[-1]
    print(f"proxy reward: {last.proxy_gain} above the start policy's after {last.step} steps")
    if result.best_gold_gain is not None:
        print(
            f"gold reward: {result.best_gold_gain} above the start policy's at its best, after "
            f"{result.best_gold_step} steps; {last.gold_gain} after {last.step}"
        )
    if result.curve is not None:
        save_figure(plot_overoptimization(result.curve), output / "overoptimization.png")
        print(result.curve.verdict("the last checkpoint"))
        if nearer := len(result.checkpoints) - len(result.curve.points):
            print(
                f"checkpoints left out of the fit (not of the fall), nearer to the start than an earlier one: {nearer}"
            )
    if result.stop_reason == "disagreement":
        print(f"stopped: the reward models disagree too much; the policy is from step {result.step}")
    print(f"policy after {result.step} steps: {result.policy}")


def _print_checkpoint(checkpoint: PolicyCheckpoint) -> None:
    """Print a checkpoint's measurements on one line."""
    parts = [f"step {checkpoint.step:4}", f"KL {checkpoint.divergence.value:7.2f}", f"proxy {checkpoint.proxy}"]
    if checkpoint.gold is not None:
        parts.append(f"gold {checkpoint.gold}")
    parts.append(f"tokens {checkpoint.num_tokens.value:.1f}")
    if checkpoint.disagreement is not None:
        parts.append(f"disagreement {checkpoint.disagreement.value:.3f}")
    print("  ".join(parts), flush=True)

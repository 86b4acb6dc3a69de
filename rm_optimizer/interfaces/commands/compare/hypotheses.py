"""`rm-opt compare experiment=hypotheses`: a study that tests five claims about training reward models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.interfaces.commands.compare.trials import Executors, Retries, Workers, print_plan

if TYPE_CHECKING:
    from rm_optimizer.experiments.hypothesis_study import HypothesisReport, HypothesisStudy

FOLDER = Path("outputs", "hypotheses")


def compare_hypotheses(
    data: Annotated[str, Option("--data", help="Training pairs: a Parquet file with a column `prompt`.")],
    val: Annotated[str, Option("--val", help="Validation and test pairs: a Parquet file with a column `prompt`.")],
    overrides: Annotated[
        list[str] | None, Argument(help="experiment=hypotheses, and options of every run, as for rm-opt train.")
    ] = None,
    model: Annotated[str, Option("--model", help="Model preset, hub id or folder.")] = "tiny",
    seeds: Annotated[int, Option("--seeds", min=1, help="Seeds for each arm.")] = 5,
    pairs: Annotated[int, Option("--pairs", min=1, help="Most training pairs, drawn at random.")] = 1200,
    val_pairs: Annotated[int, Option("--val-pairs", min=1, help="Most validation pairs, for early stopping.")] = 200,
    test_pairs: Annotated[int, Option("--test-pairs", min=1, help="Most test pairs, for all results.")] = 800,
    pairs_per_prompt: Annotated[
        int, Option("--pairs-per-prompt", min=1, help="Most validation and test pairs of one prompt.")
    ] = 50,
    output: Annotated[Path, Option("--output", help="Folder for trials and report.")] = FOLDER,
    plan: Annotated[bool, Option("--plan", help="Only print the trials and an estimate of hours.")] = False,
    executor: Executors = "process",
    workers: Workers = None,
    retries: Retries = 2,
) -> None:
    """Test five claims about training reward models.

    Trains the ablation and LoRA presets with several seeds. Repeat a stopped command to continue it. rm-opt compare
    run, status, retry and report work on its folder.
    """
    from rm_optimizer.experiments.hypothesis_study import HypothesisOptions, HypothesisStudy
    from rm_optimizer.schema.compose import model_overrides

    experiments = [item for item in overrides or () if item.startswith("experiment=")]
    if experiments not in ([], ["experiment=hypotheses"]):
        raise ConfigError(
            did_you_mean("experiment of rm-opt compare", experiments[0].partition("=")[2], ["hypotheses"])
        )
    options = HypothesisOptions(
        train=data,
        val=val,
        overrides=(*model_overrides(model), *(item for item in overrides or () if item not in experiments)),
        seeds=seeds,
        num_train=pairs,
        num_test=test_pairs,
        num_select=val_pairs,
        pairs_per_prompt=pairs_per_prompt,
    )
    study = HypothesisStudy(options, output)
    if plan:
        print_plan(output, study.plan())
        return
    run_hypotheses(study, executor, workers, retries)


def run_hypotheses(study: HypothesisStudy, executor: str, workers: int | None, retries: int) -> None:
    """Run the trials that have no result, and print the findings.

    Raises:
        ConfigError: if a trial failed for good.
        Interrupted: if the user stopped it; repeating the call continues it.
    """
    from rm_optimizer.experiments.study.driver import Study
    from rm_optimizer.experiments.study.executors import executor_named
    from rm_optimizer.experiments.study.trial_lines import TrialLines

    study.plan()
    lines = TrialLines.of(Study(study.folder))
    print_hypotheses(study.run(executor_named(executor, workers), retries=retries, on_trial=lines))
    print(f"JSON: {study.folder / 'hypotheses.json'}")


def print_hypotheses(report: HypothesisReport) -> None:
    """Print a table of the arms, a table of the claims, and notes on how to read them."""
    from rm_optimizer.experiments.hypotheses import CLAIMS
    from rm_optimizer.reporting.tables import new_table, output_console

    console = output_console()
    arms = new_table("arms, on the test pairs", "arm", "accuracy", "NLL", "ECE", "scored step", "parameters", "CPU s")
    for name, arm in report.arms.items():
        scores = [f"{score:.3f}" for score in (arm.accuracy, arm.nll, arm.ece)]
        arms.add_row(name, *scores, f"{arm.scored_step:.0f}", f"{arm.parameters:,}", f"{arm.cpu_seconds:.0f}")
    claims = new_table("claims", "", "claim", "effect", "allowed loss", "verdict")
    for found in report.findings:
        number = found.name[:2]
        claims.add_row(number.upper(), CLAIMS[number], f"{found.effect:+.4f}", f"{found.margin:g}", found.verdict)
    console.print(arms)
    console.print(claims)
    for found in report.findings:
        for name, value in found.also.items():
            shown = "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else value
            console.print(f"{found.name[:2].upper()}: {name.replace('_', ' ')} {shown}", highlight=False)
    baseline = report.length_baseline
    console.print(f"'the longer response is better' gets {baseline:.3f} on the same pairs", highlight=False)

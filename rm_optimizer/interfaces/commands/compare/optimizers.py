"""`rm-opt compare --optimizers A,B`: a fair comparison of optimizers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.interfaces.commands.compare.trials import Executors, Workers


@dataclass(frozen=True)
class ComparisonSizes:
    """Sizes of a comparison; None takes the size of the budget."""

    rates: Annotated[int | None, Option("--rates", help="Learning rates to try for each optimizer, odd.")] = None
    tuning_seeds: Annotated[int | None, Option("--tuning-seeds", help="Tuning seeds for each learning rate.")] = None
    pairs: Annotated[int | None, Option("--pairs", help="Most training pairs, drawn at random.")] = None
    val_pairs: Annotated[int | None, Option("--val-pairs", help="Most validation pairs.")] = None
    test_pairs: Annotated[int | None, Option("--test-pairs", help="Most test pairs.")] = None
    pairs_per_prompt: Annotated[
        int | None, Option("--pairs-per-prompt", help="Most validation and test pairs of one prompt.")
    ] = None
    curvature_pairs: Annotated[
        int | None, Option("--curvature-pairs", help="Training pairs to measure curvature on; 0: no curvature.")
    ] = None


def compare_optimizers(
    optimizers: Annotated[str, Option("--optimizers", help="Names separated by commas: adam,adamw,muon.")],
    data: Annotated[str, Option("--data", help="Training pairs: a file, folder or hub name.")],
    sizes: ComparisonSizes,
    overrides: Annotated[list[str] | None, Argument(help="Options of every run, as for rm-opt train.")] = None,
    seeds: Annotated[int | None, Option("--seeds", help="Final seeds for each optimizer.")] = None,
    val: Annotated[
        str | None, Option("--val", help="Validation pairs; default: those of some training prompts.")
    ] = None,
    test: Annotated[
        str | None, Option("--test", help="Test pairs; default: those of half the validation prompts.")
    ] = None,
    model: Annotated[str, Option("--model", help="Model preset, hub id or folder.")] = "tiny",
    budget: Annotated[str, Option("--budget", help="Sizes of the comparison: smoke, standard or paper.")] = "standard",
    reference: Annotated[
        str | None, Option("--reference", help="Optimizer to compare the others with; default: adamw.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", help="Folder of the comparison; default: outputs/optimizer_comparison.")
    ] = None,
    plan: Annotated[bool, Option("--plan", help="Only print the number of runs and an estimate of hours.")] = False,
    executor: Executors = "process",
    workers: Workers = None,
) -> None:
    """Compare optimizers with tuned learning rates.

    Tunes each optimizer's rate, trains with new seeds, and compares on test pairs that are used for nothing else.
    Repeat a stopped command to continue it. rm-opt compare run, status, retry and report work on its folder.
    """
    from rm_optimizer.compare import FOLDER, OptimizerComparison

    names = [name.strip() for name in optimizers.split(",") if name.strip()]
    comparison = OptimizerComparison(
        model,
        data,
        names,
        seeds,
        val_path=val,
        test_path=test,
        budget=budget,
        reference=reference,
        output_dir=output or FOLDER,
        overrides=overrides or (),
        executor=executor,
        workers=workers,
        **asdict(sizes),
    )
    print(f"{comparison.plan()}; rates beyond the grids come on top")
    if plan:
        print(f"rm-opt compare run {comparison.folder} starts them")
        return
    comparison.run_experiment()
    print(f"text, JSON and pictures: {comparison.generate_report().parent}")

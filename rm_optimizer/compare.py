"""`OptimizerComparison`: a fair comparison of optimizers, as a Python class."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict, Unpack

from rm_optimizer.core.rows.natural import Texts, texts
from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.experiments.cost import StudyCost, study_cost
from rm_optimizer.experiments.optimizer_comparison.arm_trial import arm_trial
from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings, findings
from rm_optimizer.experiments.optimizer_comparison.setting import FIRST_TUNING_SEED, TUNE, ComparisonOptions, Frozen
from rm_optimizer.experiments.optimizer_comparison.stages import Stages, freeze
from rm_optimizer.experiments.study import Study, TrialLines
from rm_optimizer.experiments.training_trials import config_of
from rm_optimizer.experiments.trial import executor_named
from rm_optimizer.records.files import write_rows, write_text
from rm_optimizer.records.recall import written
from rm_optimizer.reporting.folder_page import REPORT_FOLDER
from rm_optimizer.reporting.optimizer_comparison import findings_document, print_findings
from rm_optimizer.schema.composition import model_overrides

DEFAULT_OPTIMIZERS = ("adam", "adamw", "sgd", "muon", "lion")
FOLDER = Path("outputs", "optimizer_comparison")


class Sizes(TypedDict, total=False):
    """Numbers of a comparison in place of its budget's, as in `ComparisonOptions`."""

    rates: int | None
    tuning_seeds: int | None
    pairs: int | None
    val_pairs: int | None
    test_pairs: int | None
    curvature_pairs: int | None


class OptimizerComparison:
    """Comparison of optimizers on equal terms: equally many learning rates, new paired seeds and unseen test pairs.

    Results are kept in a folder. A comparison that was stopped or killed continues when it is called again. It does
    not repeat finished runs.

    Args:
        model_name: model preset, hub id or folder of the base model.
        data_path: source of the training pairs.
        optimizers: names of at least two optimizers.
        num_seeds: final seeds for each optimizer; None takes the number of the budget.
        epochs: passes over the training pairs of every run; None is the default of a run, 1.
        batch_size: pairs of an optimizer step; None is the model's preset.
        val_path: source of the validation pairs; None takes the pairs of some training prompts.
        test_path: source of the test pairs; None takes the pairs of some validation prompts.
        budget: `smoke` (3 rates, 2 seeds, few pairs), `standard` (5 rates, 5 seeds) or `paper` (7 rates, 10 seeds).
        reference: optimizer to compare the others with; None is adamw, or the first one if adamw is not among them.
        output_dir: folder of the results.
        options: further options of every run, such as `{"model.max_length": 512}`.
        overrides: the same as words of the command line, such as `["model.max_length=512"]`.
        executor: `process` (a new interpreter for each run), `inline` (this process) or `ray`.
        workers: runs at a time; None is one per GPU, or one without GPUs.
        sizes: fields of `Sizes`, such as `rates`, `pairs` or `test_pairs`.

    Raises:
        TypeError: if an argument is unknown or of the wrong type.
        ConfigError: if an option is unknown, out of its range, or would make runs differ in more than the optimizer.
    """

    def __init__(
        self,
        model_name: str,
        data_path: str | Path,
        optimizers: Texts = DEFAULT_OPTIMIZERS,
        num_seeds: int | None = None,
        *,
        epochs: float | None = None,
        batch_size: int | None = None,
        val_path: str | Path | None = None,
        test_path: str | Path | None = None,
        budget: str = "standard",
        reference: str | None = None,
        output_dir: str | Path = FOLDER,
        options: Mapping[str, object] = MappingProxyType({}),
        overrides: Texts = (),
        executor: str = "process",
        workers: int | None = None,
        **sizes: Unpack[Sizes],
    ) -> None:
        if unknown := sizes.keys() - Sizes.__annotations__.keys():
            known = [name for name in signature(OptimizerComparison).parameters if name != "sizes"]
            found = did_you_mean("argument of OptimizerComparison", min(unknown), [*known, *Sizes.__annotations__])
            raise TypeError(f"{found}; any option of a run fits into options={{...}}")
        for name, path in {"data_path": data_path, "val_path": val_path, "test_path": test_path}.items():
            if not isinstance(path, str | os.PathLike | None):
                got = f"must be a file, folder or hub name, got {type(path).__name__}"
                raise TypeError(f"{name} {got}; write the pairs to a file, such as pairs.parquet")
        given = {"training.epochs": epochs, "batching.batch_size": batch_size}
        chosen = {name: value for name, value in given.items() if value is not None} | dict(options)
        self.folder = Path(output_dir)
        self.executor = executor
        self.workers = workers
        self.options = ComparisonOptions.of_budget(
            budget,
            str(data_path),
            texts("optimizers", optimizers),
            reference=reference,
            val=None if val_path is None else str(val_path),
            test=None if test_path is None else str(test_path),
            seeds=num_seeds,
            overrides=(
                *model_overrides(model_name),
                *(f"{name}={written(value)}" for name, value in chosen.items()),
                *texts("overrides", overrides),
            ),
            **sizes,
        )

    @cached_property
    def frozen(self) -> Frozen:
        """The fixed setting of the comparison, written on first access.

        Raises:
            ConfigError: if the folder holds another comparison.
            DataError: if the pairs cannot be used.
        """
        return freeze(self.options, self.folder)

    def plan(self) -> StudyCost:
        """Fix the setting, and estimate the cost from a few measured steps of the reference."""
        frozen, stages = self.frozen, Stages(self.folder)
        arms = sorted(self.options.optimizers, key=lambda name: name != self.options.reference)
        configs = []
        for arm in arms:
            rate = self.options.config(arm).optimizer.lr
            trial = arm_trial(frozen, self.folder, TUNE, arm, rate, FIRST_TUNING_SEED, adamw_lr=None)
            configs += [config_of(trial.spec["options"])] * (stages.num_planned // len(arms))
        return study_cost(configs)

    def run_experiment(self) -> ComparisonFindings:
        """Run the runs that have no result yet, and return the findings.

        Raises:
            ConfigError: if a run failed for good; once the reason is fixed, repeating the call continues.
            Interrupted: if the user stopped it; repeating the call continues.
        """
        _ = self.frozen
        return run_stages(self.folder, self.executor, self.workers)

    def generate_report(self) -> Path:
        """Print the tables of the finished runs, and write page, text, JSON and pictures into `report/` of the folder.

        Returns:
            Path of the text, in Markdown; the pictures are in the same folder.
        """
        return report(self.folder)


def run_stages(folder: Path, executor: str, workers: int | None, *, retries: int = 2) -> ComparisonFindings:
    """Run the runs that have no result yet in the comparison of a folder, and return its findings.

    Args:
        folder: folder of the comparison.
        executor: inline, process or ray.
        workers: runs at a time; None is one per GPU, or one without GPUs.
        retries: further attempts at a failed run.

    Raises:
        ConfigError: if the folder holds no comparison, or a run failed for good.
        Interrupted: if the user stopped it; repeating the call continues.
    """
    stages = Stages(folder)
    finished = sum(stages.result(planned) is not None for planned in stages.trials())
    lines = TrialLines(finished, stages.num_planned)
    status = stages.run(executor_named(executor, workers), retries=retries, on_trial=lines, on_stage=lines.grow)
    if status.errors:
        name, error = next(iter(status.errors.items()))
        raise ConfigError(
            f"{len(status.errors)} runs failed, such as {name}: {error}; fix the cause, then rm-opt compare retry "
            f"{folder}"
        )
    return findings(folder)


def report(folder: Path) -> Path:
    """Print the findings of the comparison in a folder, and write its page, text, numbers and trials.

    Returns:
        Path of the text, in Markdown.
    """
    found, rows = findings(folder), [*Study(folder).rows()]
    print_findings(found)
    document, output = findings_document(found, rows), folder / REPORT_FOLDER
    document.write(output)
    write_text(output / "findings.json", found.to_json() + "\n")
    write_rows(output / "trials.parquet", rows)
    return write_text(output / "report.md", document.markdown(with_figures=True))

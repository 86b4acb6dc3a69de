"""Page of a folder: of a run with its results and missing parts, of several runs, a study or a suite."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from omegaconf import OmegaConf

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.data_efficiency.blame import Blame
from rm_optimizer.doctor.diagnosis import Diagnosis, Status
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments.compared_runs import runs_inside
from rm_optimizer.experiments.study import PLAN_FILE, StudyPlan, compares_optimizers
from rm_optimizer.records import run_folder
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.locations import ENSEMBLE_FILE
from rm_optimizer.records.quoting import shell_word
from rm_optimizer.records.run_folder import METRICS_FILE, PAIR_REWARDS_FILE, RESULT_FILE, RunFolder
from rm_optimizer.records.run_options import flat
from rm_optimizer.reporting import run_report
from rm_optimizer.reporting.blame import BLAME_FILE, blame_parts
from rm_optimizer.reporting.document import Answer, Block, Code, Document, Drawing, Fold, Listing, Part
from rm_optimizer.reporting.readiness import readiness_rows
from rm_optimizer.reporting.tables import TextTable, group_rows, metrics_rows
from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport
from rm_optimizer.schema.landscape import AnalysisType
from rm_optimizer.training.folder.model_card import card_sections, card_summary, card_title
from rm_optimizer.training.folder.record import RunResult

REPORT_FOLDER = "report"
"""Name of the page's folder, in the folder of the run or study."""
_READINESS = Path("readiness", "readiness.json")
RecordT = TypeVar("RecordT", bound=JsonRecord)


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a folder and return its path.

    The same folder gives the same bytes.

    Args:
        folder: folder of a run, of several runs such as a sweep's, of a study, or of models on a suite.
        output: folder to write into; None takes `report/` of the folder.

    Raises:
        ConfigError: if the folder holds a study without a page or without a result, or runs that cannot be compared.
        DataError: if the folder holds neither a study nor a finished run.
    """
    document = _document(folder) or run_document(folder)
    return document.write(output or folder / REPORT_FOLDER)


def folder_markdown(folder: Path) -> str:
    """The numbers of a folder as Markdown for a pull request.

    It raises the errors of `write_page`. For a run it is the card of its model, without the hub's metadata and without
    instructions for the model's use.
    """
    if (document := _document(folder)) is not None:
        return document.markdown()
    result = finished_result(folder)
    return f"# {card_title(result)}\n\n{card_summary(result)}\n\n{card_sections(folder, result)}\n"


def _document(folder: Path) -> Document | None:
    """Content of the page of a study, several runs or a suite.

    None for any other folder.

    Raises:
        ConfigError: if this kind of study has no page, or the runs cannot be compared.
    """
    if compares_optimizers(folder):
        from rm_optimizer.reporting.optimizer_comparison import comparison_document  # only pages of its kind need it

        return comparison_document(folder)
    if (folder / PLAN_FILE).is_file():
        StudyPlan.read(folder)  # raises if the plan is damaged
        raise ConfigError(
            f"{folder} holds a study without a page; there are pages of runs and of comparisons of optimizers; "
            f"rm-opt compare report {folder} reports on other studies"
        )
    if (folder / run_folder.SUITE_FILE).is_file():
        from rm_optimizer.reporting.suite import read_result, suite_document  # imports torch

        if (result := read_result(folder / run_folder.SUITE_FILE)) is not None:
            return suite_document([result], "Models on a suite")
    if not RunFolder(folder).is_used and len(runs_inside(folder)) > 1:
        from rm_optimizer.reporting.comparison import sweep_document  # imports torch

        return sweep_document(folder)
    return None


def finished_result(run_dir: Path) -> RunResult:
    """The result of a finished run.

    Raises:
        DataError: if the folder holds no run, or one that has not ended.
    """
    if (result := RunResult.read(run_dir)) is not None:
        return result
    if not RunFolder(run_dir).is_used:
        raise DataError(
            f"{run_dir} holds no run ({RESULT_FILE} is missing) and no study; name the folder of a finished run, "
            "of several runs, or of a comparison of optimizers"
        )
    if (error := RunFolder(run_dir).divergence) is not None:
        raise DataError(f"{run_dir} holds a run that diverged, so it has no page: {error}")
    raise DataError(
        f"{run_dir} holds a run that has no result yet ({RESULT_FILE} is missing or damaged); finish it with "
        "resume=auto"
    )


def run_document(run_dir: Path) -> Document:
    """Content of the page of a run.

    Args:
        run_dir: the run folder.

    Raises:
        DataError: if the folder holds no run, or one that has not ended.
    """
    result, missing = finished_result(run_dir), list[str]()
    metrics, rows = result.metrics, metrics_rows(result.metrics)
    if result.data.ceiling is not None:
        rows["ceiling (gold reward)"] = result.data.ceiling
    title = f"Validation: {result.data.val_origin}; weights of step {result.best_step:,}, best {result.monitor}"
    table = TextTable(title, ("", "value [95 % interval]"), tuple(rows.items()))
    parts = [
        Part("Result", (Listing("result", table), result.data.notes)),
        Part("Learning curves", _curves(run_dir, result, missing)),
        Part("Calibration and margins", _calibration(run_dir, result, missing)),
        *(
            Part(f"By {column}", (Listing(f"by_{column}", group_rows(metrics, column), first=20),))
            for column in metrics.groups
        ),
        Part("Loss landscape", _landscape(run_dir, missing)),
        Part("Ensemble", _ensemble(run_dir, missing)),
        Part("Readiness for reinforcement learning", _readiness(run_dir, missing)),
        Part("Checks by the doctor", _doctor(run_dir, missing)),
        *_blame(run_dir, missing),
        Part("Settings", _settings(run_dir, result)),
        Part("Missing", (tuple(missing),)),
    ]
    return Document(f"{result.model}, {result.optimizer}, seed {result.seed}", _answer(metrics), parts)


def _stored(
    kind: type[RecordT], file: Path, subject: str, missing: list[str], remedy: str = "", *, name: str = ""
) -> RecordT | None:
    """The record in a file; None if it is missing or damaged.

    Args:
        kind: type of the record.
        file: the file.
        subject: what it is about, in words.
        missing: gains a sentence if the file is damaged, or missing and there is a remedy.
        remedy: sentence on what writes the file.
        name: name of the file in a sentence; empty takes its own.
    """
    try:
        return kind.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing += [f"{subject}: {remedy}"] if remedy else []
    except (ValueError, TypeError, LookupError, AttributeError):
        missing.append(f"{subject}: {name or file.name} is damaged")
    return None


def _blame(run_dir: Path, missing: list[str]) -> list[Part]:
    found = _stored(Blame, run_dir / "blame" / BLAME_FILE, "training pairs that taught the model", missing)
    return [] if found is None else blame_parts(found)


def _curves(run_dir: Path, result: RunResult, missing: list[str]) -> tuple[Block, ...]:
    try:
        history = RunFolder(run_dir).metrics()
        if not history:
            missing.append(f"learning curves: {METRICS_FILE} is missing or empty")
            return ()
        last, steps = int(history[-1]["step"]), result.steps
        loss, accuracy = run_report.plot_loss(history), run_report.plot_accuracy(history, ceiling=result.data.ceiling)
    except (KeyError, TypeError, ValueError):
        missing.append(f"learning curves: {METRICS_FILE} is damaged")
        return ()
    if last < steps:
        missing.append(f"end of the learning curves: {METRICS_FILE} ends at step {last:,} of {steps:,}")
    return (
        Drawing("loss", loss, "Loss on training batches and on validation, by optimizer step"),
        Drawing("accuracy", accuracy, "Accuracy on training batches and on validation, by step"),
    )


def _calibration(run_dir: Path, result: RunResult, missing: list[str]) -> tuple[Block, ...]:
    caption = "How often the model is right, by how sure it is"
    reliability = Drawing("reliability", run_report.plot_reliability(result.metrics), caption)
    try:
        rewards, expected = RunFolder(run_dir).pair_rewards(), result.metrics.num_pairs
    except DataError:
        missing.append(f"histogram of margins: {PAIR_REWARDS_FILE} is missing or damaged")
        return (reliability,)
    if len(rewards) != expected:
        missing.append(f"histogram of margins: {PAIR_REWARDS_FILE} holds {len(rewards):,} of {expected:,} pairs")
        return (reliability,)
    margins = run_report.plot_margins(run_report.margins_of(rewards))
    return reliability, Drawing("margins", margins, "Reward of the better response minus the reward of the other")


def _landscape(run_dir: Path, missing: list[str]) -> tuple[Block, ...]:
    """Figures and numbers of every analysis of a run; empty without one.

    Args:
        run_dir: the run folder.
        missing: gains a sentence on each piece that is missing or damaged.
    """
    folders = sorted({file.parent for kind in ("json", "png") for file in (run_dir / "landscape").glob(f"*/*.{kind}")})
    during = _during_training(run_dir)
    if not folders:
        missing.append(f"loss landscape: rm-opt analyze {shell_word(str(run_dir))} --type hessian measures it")
        return tuple(during)
    from rm_optimizer.reporting.landscape.results import RESULTS, drawings, summary_rows  # imports torch

    drawn: list[Drawing] = []
    tables: list[Fold] = []
    for folder in folders:
        num_missing, own = len(missing), dict[str, Drawing]()
        for file in sorted(folder.glob("*.json")):
            kind = file.stem.removesuffix("_partial")
            if kind not in AnalysisType.__members__:
                continue
            of_run = file.relative_to(run_dir).as_posix()
            if (found := _stored(RESULTS[AnalysisType(kind)], file, "loss landscape", missing, name=of_run)) is None:
                continue
            label, name = f"{folder.name}{', partial' if kind != file.stem else ''}", f"landscape_{folder.name}"
            for each in drawings(found):
                if each.figure is not None:
                    own[each.name] = replace(each, name=f"{name}_{each.name}", caption=f"{each.caption} ({label})")
            rows = tuple(summary_rows(found).items())
            table = TextTable(f"Measured by rm-opt analyze --type {kind}", ("", "value"), rows)
            tables.append(Fold(f"Numbers of {label}", (Listing(name, table),)))
        if not own and len(missing) == num_missing:
            missing.append(f"loss landscape: {folder.name} has no result yet; the same rm-opt analyze goes on")
        drawn += own.values()
    return (*drawn, *during, *tables)


def _during_training(run_dir: Path) -> list[Drawing]:
    """Curvature that training logged; empty without any or if the metrics are damaged."""
    run = RunFolder(run_dir)
    try:
        history = run.metrics()
        if not run_report.has_training_curvature(history):
            return []
        figure = run_report.plot_training_curvature(history, caption=run_report.curvature_caption(run))
    except (KeyError, TypeError, ValueError):
        return []
    return [Drawing("during_training", figure, "Curvature during training")]


def _ensemble(run_dir: Path, missing: list[str]) -> tuple[Block, ...]:
    """Members, scales and agreement of the run's ensemble.

    Empty if the run belongs to no ensemble. An ensemble is searched for in the run folder, its `ensemble/` and its
    parent folder.
    """
    places = [each for each in (run_dir, run_dir / "ensemble", run_dir.parent) if (each / ENSEMBLE_FILE).exists()]
    if not places:
        return ()
    from rm_optimizer.rl_coupling.ensemble_folder import EnsembleRecord  # imports torch

    for folder in places:
        if (record := _stored(EnsembleRecord, folder / ENSEMBLE_FILE, "ensemble", missing)) is None:
            continue
        runs = [RunFolder.of(str(folder / member)) for member in record.members]
        is_own = [run is not None and run.path.resolve() == run_dir.resolve() for run in runs]
        if any(is_own):
            break
    else:
        return ()
    reference, rows = record.reference, []
    for member, run, own, mean, std in zip(record.members, runs, is_own, reference.means, reference.stds, strict=True):
        result = None if run is None else RunResult.read(run.path)
        accuracy = None if result is None else str(result.metrics.accuracy)
        rows.append(("this run" if own else member, accuracy, mean, std))
    caption = (
        f"Members; mean and standard deviation of their rewards on {reference.num_responses:,} reference responses"
    )
    head = ("member", "accuracy [95 %]", "mean reward", "standard deviation")
    threshold = (
        f"A response is uncertain where its standardized rewards spread by more than {reference.threshold:.3f}: at "
        f"most {reference.false_positive_rate:.0%} of responses like the reference ones."
    )
    return Listing("ensemble", TextTable(caption, head, tuple(rows))), threshold, _agreement(runs)


def _agreement(runs: Sequence[RunFolder | None]) -> tuple[str, ...]:
    """Sentences on validation pairs that all members order in the same way.

    The others have a sentence too; there are no sentences if members' pairs differ.
    """
    try:
        rewards = [[] if run is None else run.pair_rewards() for run in runs]
    except DataError:
        return ()
    sides = np.sign(np.array([row.label for row in rewards[0]]) - 0.5)
    if len({tuple((row.pair_id, row.label) for row in rows) for rows in rewards}) != 1 or not sides.any():
        return ()
    # reward of the better response less the other's, for each member
    margins = (np.array([[row.chosen - row.rejected for row in rows] for rows in rewards]) * sides)[:, sides != 0]
    agreed = np.abs(np.sign(margins).sum(0)) == len(margins)
    num_agreed, num_pairs = int(agreed.sum()), agreed.size
    said = [f"All {len(margins)} members order {num_agreed:,} of the {num_pairs:,} validation pairs in the same way."]
    if num_agreed:
        said.append(f"They are right on {int((margins[0, agreed] > 0).sum()):,} of these.")
    if num_agreed < num_pairs:
        right, others = (margins[:, ~agreed] > 0).sum(1).mean(), num_pairs - num_agreed
        said.append(f"On the other {others:,} pairs a member is right on {right:,.1f}, averaged over members.")
    return tuple(said)


def _readiness(run_dir: Path, missing: list[str]) -> tuple[Block, ...]:
    remedy = f"rm-opt readiness {shell_word(str(run_dir))} measures it"
    report = _stored(RLReadinessReport, run_dir / _READINESS, "readiness", missing, remedy, name=str(_READINESS))
    if report is None:
        return ()
    rows = tuple((row.title, str(row.value), row.meaning) for row in readiness_rows(report))
    table = TextTable("Measured on the policy's responses", ("", "value", "scale"), rows)
    return f"Verdict: {report.verdict}. {report.basis}", Listing("readiness", table)


def _doctor(run_dir: Path, missing: list[str]) -> tuple[Block, ...]:
    remedy = f"rm-opt doctor {shell_word(str(run_dir))} --data PAIRS makes them"
    diagnosis = _stored(Diagnosis, run_dir / run_folder.DOCTOR_FILE, "checks", missing, remedy)
    if diagnosis is None:
        return ()
    found = [check for check in diagnosis.checks if check.status in (Status.fail, Status.warn)]
    lines = tuple(f"{check.status.value}, {check.name}: {check.explanation}" for check in found)
    return f"{len(diagnosis.names(Status.ok))} checks are ok.", lines


def _answer(metrics: PairwiseMetrics) -> Answer:
    if metrics.collapse.collapsed:
        return Answer("bad", "The rewards do not tell responses apart", (metrics.collapse.reason,))
    accuracy = f"Accuracy {metrics.accuracy}"
    over = metrics.over_length
    sample = (
        f"On {metrics.num_pairs:,} validation pairs of {metrics.num_prompts:,} prompts; 95 % interval over prompts."
    )
    if math.isnan(over.value) or over.low is None or over.high is None:
        unknown = "Lengths of the responses are unknown, so there is no length baseline."
        return Answer("fair", accuracy, (sample, unknown))
    above = f"Length baseline (“the longer response wins”) {metrics.longer_wins}; accuracy − length baseline {over}."
    if over.low > 0:
        return Answer("good", accuracy, (sample, above))
    worse = over.high < 0
    verdict = "It is below counting characters." if worse else "It is not shown to be above counting characters."
    return Answer("bad" if worse else "fair", accuracy, (sample, above, verdict))


def _settings(run_dir: Path, result: RunResult) -> tuple[Block, ...]:
    """The command line, the machine and the options.

    The line is as it was typed, if Hydra stored it.
    """
    overrides, command = run_dir / ".hydra" / "overrides.yaml", list[Block]()
    if overrides.is_file():
        words = map(str, OmegaConf.load(overrides))
        typed = [shell_word(word) for word in words if not word.startswith(("output_dir=", "resume="))]
        command = ["This command trains it again:", Code(" ".join(["rm-opt", "train", *typed]))]
    seconds, rate = result.wall_seconds, result.pairs_per_second
    facts = {
        "training pairs": f"{result.data.train_pairs:,}, fingerprint {result.data.train_fingerprint}",
        "steps": f"{result.steps:,}, {result.status.value}",
        "trainable parameters": f"{result.parameters:,}",
        "time": f"{seconds / 60:.1f} min" + ("" if rate is None else f", {rate:,.0f} pairs/s"),
        **{f"machine: {name}": value for name, value in result.machine.items()},
        **{f"version of {name}": value for name, value in result.versions.items()},
        "commit": result.commit or "n/a",
    }
    options = "\n".join(f"{name}={json.dumps(value)}" for name, value in sorted(flat(result.config)))
    table = Listing("", TextTable("Run and machine", ("", ""), tuple(facts.items())))
    return *command, table, Fold("All options of the run", (Code(options),))

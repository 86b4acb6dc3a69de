"""The page of a run: result, curves, calibration, groups, landscape, readiness, settings, and missing parts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.doctor.diagnosis import Diagnosis, Status
from rm_optimizer.errors import DataError
from rm_optimizer.records.quoting import shell_word
from rm_optimizer.records.run_command import run_command
from rm_optimizer.records.run_folder import DOCTOR_FILE, METRICS_FILE, PAIR_REWARDS_FILE, RESULT_FILE, RunFolder
from rm_optimizer.records.run_options import flat
from rm_optimizer.reporting.pages.ensemble_section import ensemble_section
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.html import (
    answer,
    bullets,
    code,
    details,
    figures,
    page,
    paragraph,
    section,
    table,
)
from rm_optimizer.reporting.pages.landscape_section import landscape_section
from rm_optimizer.reporting.pictures import margins_of
from rm_optimizer.reporting.plots import plot_accuracy, plot_loss, plot_margins, plot_reliability
from rm_optimizer.reporting.readiness.rows import readiness_rows
from rm_optimizer.reporting.tables import cell_text, metrics_rows
from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport
from rm_optimizer.training.folder.result import RunResult

_READINESS = Path("readiness", "readiness.json")


def run_page(run_dir: Path, exhibits: Exhibits) -> str:
    """The page of a run as HTML.

    Args:
        run_dir: the run folder.
        exhibits: gains the figures and tables of the page.

    Raises:
        DataError: if the folder holds no run, or one that has not ended.
    """
    result = _finished(run_dir)
    parts = _Parts(run_dir, result, exhibits)
    title = f"{result.model}, {result.optimizer}, seed {result.seed}"
    content = [
        _headline(result.metrics),
        _results(result, exhibits),
        section("Learning curves", parts.curves()),
        section("Calibration and margins", parts.calibration()),
        *(_groups(result.metrics, column, exhibits) for column in result.metrics.groups),
        section("Loss landscape", landscape_section(run_dir, result, exhibits, parts.missing)),
        section("Ensemble", ensemble_section(run_dir, exhibits, parts.missing)),
        section("Readiness for reinforcement learning", parts.readiness()),
        section("Checks by the doctor", parts.doctor()),
        _settings(result),
        section("Missing", bullets(parts.missing)),
    ]
    return page(title, content)


def _finished(run_dir: Path) -> RunResult:
    result = RunResult.read(run_dir)
    if result is not None:
        return result
    if not RunFolder(run_dir).is_used:
        raise DataError(
            f"{run_dir} {'holds no run' if run_dir.is_dir() else 'is no folder with a run'} ({RESULT_FILE} is missing) "
            "and no study; name the folder of a finished run, or of a comparison of optimizers. "
            "Several runs: rm-opt compare FOLDER"
        )
    if (error := RunFolder(run_dir).divergence) is not None:
        raise DataError(f"{run_dir} holds a run that diverged, so it has no page: {error}")
    raise DataError(
        f"{run_dir} holds a run that has no result yet ({RESULT_FILE} is missing or torn); finish it with resume=auto"
    )


@dataclass
class _Parts:
    """Parts of the page from further files, and sentences on files that are missing or damaged."""

    run_dir: Path
    result: RunResult
    exhibits: Exhibits
    missing: list[str] = field(default_factory=list)

    def curves(self) -> str:
        ceiling = self.result.data.ceiling
        try:
            history = RunFolder(self.run_dir).metrics()
            if not history:
                self.missing.append(f"learning curves: {METRICS_FILE} is missing or empty")
                return ""
            last, steps = int(history[-1]["step"]), self.result.steps
            loss, accuracy = plot_loss(history), plot_accuracy(history, ceiling=ceiling)
        except (KeyError, TypeError, ValueError):
            self.missing.append(f"learning curves: {METRICS_FILE} is torn")
            return ""
        if last < steps:
            self.missing.append(f"end of the learning curves: {METRICS_FILE} ends at step {last:,} of {steps:,}")
        return figures(
            self.exhibits.figure("loss", loss, "Loss on training batches and on validation, by optimizer step"),
            self.exhibits.figure("accuracy", accuracy, "Accuracy on training batches and on validation, by step"),
        )

    def calibration(self) -> str:
        reliability = plot_reliability(self.result.metrics)
        caption = "How often the model is right, by how sure it is"
        shown = [self.exhibits.figure("reliability", reliability, caption)]
        try:
            rewards, expected = RunFolder(self.run_dir).pair_rewards(), self.result.metrics.num_pairs
        except DataError:
            self.missing.append(f"histogram of margins: {PAIR_REWARDS_FILE} is missing or torn")
            return figures(*shown)
        if len(rewards) == expected:
            margins = plot_margins(margins_of(rewards))
            shown.append(
                self.exhibits.figure("margins", margins, "Reward of the better response less that of the other")
            )
        else:
            held = f"{PAIR_REWARDS_FILE} holds {len(rewards):,} of {expected:,} pairs"
            self.missing.append(f"histogram of margins: {held}")
        return figures(*shown)

    def readiness(self) -> str:
        try:
            report = RLReadinessReport.from_json((self.run_dir / _READINESS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.missing.append(f"readiness: rm-opt readiness {shell_word(str(self.run_dir))} measures it")
            return ""
        except (ValueError, TypeError):
            self.missing.append(f"readiness: {_READINESS} is torn")
            return ""
        rows = ((row.title, str(row.value), row.meaning) for row in readiness_rows(report))
        return f"{paragraph(f'Verdict: {report.verdict}. {report.basis}')}\n" + self.exhibits.table(
            "readiness", "Measured on the policy's responses", ("", "value", "scale"), rows
        )

    def doctor(self) -> str:
        try:
            diagnosis = Diagnosis.from_json((self.run_dir / DOCTOR_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.missing.append(f"checks: rm-opt doctor {shell_word(str(self.run_dir))} --data PAIRS makes them")
            return ""
        except (ValueError, TypeError):
            self.missing.append(f"checks: {DOCTOR_FILE} is torn")
            return ""
        found = [check for check in diagnosis.checks if check.status in (Status.fail, Status.warn)]
        ok = f"{len(diagnosis.names(Status.ok))} checks are ok."
        return paragraph(ok) + bullets(f"{check.status.value}, {check.name}: {check.explanation}" for check in found)


def _headline(metrics: PairwiseMetrics) -> str:
    if metrics.collapse.collapsed:
        return answer("bad", "The rewards do not tell responses apart", metrics.collapse.reason)
    accuracy = f"Accuracy {metrics.accuracy}"
    beside = metrics.over_length
    sample = (
        f"On {metrics.num_pairs:,} validation pairs of {metrics.num_prompts:,} prompts; 95 % interval over prompts."
    )
    if math.isnan(beside.value) or beside.low is None or beside.high is None:
        return answer("fair", accuracy, sample, "Lengths of the responses are unknown, so there is no length baseline.")
    above = f"Length baseline (“the longer response wins”) {metrics.longer_wins}; accuracy − length baseline {beside}."
    if beside.low > 0:
        return answer("good", accuracy, sample, above)
    worse = beside.high < 0
    verdict = "It is below counting characters." if worse else "It is not shown to be above counting characters."
    return answer("bad" if worse else "fair", accuracy, sample, above, verdict)


def _results(result: RunResult, exhibits: Exhibits) -> str:
    rows = [(name, cell_text(value).plain) for name, value in metrics_rows(result.metrics).items()]
    if result.data.ceiling is not None:
        rows.append(("ceiling (gold reward)", cell_text(result.data.ceiling).plain))
    caption = f"Validation: {result.data.val_origin}; weights of step {result.best_step:,}, best {result.monitor}"
    return section(
        "Result", exhibits.table("result", caption, ("", "value [95 % interval]"), rows), bullets(result.data.notes)
    )


def _groups(metrics: PairwiseMetrics, column: str, exhibits: Exhibits) -> str:
    members = sorted(metrics.groups[column].items(), key=lambda item: (-item[1].num_pairs, item[0]))
    rows = [
        (
            name,
            f"{group.num_pairs:,}",
            "collapsed" if group.collapse.collapsed else str(group.accuracy),
            *(cell_text(value).plain for value in (group.longer_wins.value, group.nll.value, group.ece.value)),
        )
        for name, group in members
    ]
    head = (column, "pairs", "accuracy [95 %]", "longer wins", "NLL", "ECE")
    return section(
        f"By {column}", exhibits.table(f"by_{column}", f"Each {column}, the largest first", head, rows, first=20)
    )


def _settings(result: RunResult) -> str:
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
    return section(
        "Settings",
        paragraph("This command trains it again:"),
        code(run_command(result.config)),
        table("Run and machine", ("", ""), facts.items()),
        details("All options of the run", code(options)),
    )

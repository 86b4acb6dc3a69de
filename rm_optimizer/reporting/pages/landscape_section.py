"""Section of a run's page on its loss landscape, drawn from stored results, or their pictures if they are damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rm_optimizer.landscape.layers import LayerCurvature
from rm_optimizer.landscape.series import BetweenModels, Evolution
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.surface.results import Slice, Surface, Trajectory
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.quoting import shell_word
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.document import Block, Drawing, Fold, Listing, Picture
from rm_optimizer.reporting.landscape.results import drawings, summary_rows
from rm_optimizer.reporting.landscape.spectrum import has_training_curvature, plot_training_curvature
from rm_optimizer.reporting.tables import TextTable
from rm_optimizer.schema.landscape import AnalysisType
from rm_optimizer.training.folder.record import RunResult

_RESULTS: dict[AnalysisType, type[LandscapeRecord]] = {
    **dict.fromkeys(
        (AnalysisType.hessian, AnalysisType.gauss_newton, AnalysisType.fisher, AnalysisType.density), HessianSpectrum
    ),
    AnalysisType.slices: Slice,
    AnalysisType.surface: Surface,
    AnalysisType.layers: LayerCurvature,
    AnalysisType.trajectory: Trajectory,
    AnalysisType.evolution: Evolution,
    AnalysisType.between: BetweenModels,
}
RecordT = TypeVar("RecordT", bound=JsonRecord)
_PNG_END = b"IEND\xaeB`\x82"


def stored(
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


def landscape_section(run_dir: Path, result: RunResult, missing: list[str]) -> tuple[Block, ...]:
    """Figures and numbers of every analysis of a run; empty without one.

    Args:
        run_dir: the run folder.
        result: the run's result.
        missing: gains a sentence on each piece that is missing or damaged.
    """
    folders = sorted({file.parent for kind in ("json", "png") for file in (run_dir / "landscape").glob(f"*/*.{kind}")})
    if not folders:
        missing.append(f"loss landscape: rm-opt analyze {shell_word(str(run_dir))} --type hessian measures it")
    during = _during_training(run_dir, result)
    shown: list[Drawing | Picture] = []
    tables: list[Fold] = []
    for folder in folders:
        num_missing, drawn = len(missing), dict[str, Drawing]()
        for file in sorted(folder.glob("*.json")):
            kind = file.stem.removesuffix("_partial")
            if kind not in AnalysisType.__members__:
                continue
            of_run = file.relative_to(run_dir).as_posix()
            if (found := stored(_RESULTS[AnalysisType(kind)], file, "loss landscape", missing, name=of_run)) is None:
                continue
            label, name = f"{folder.name}{', partial' if kind != file.stem else ''}", f"landscape_{folder.name}"
            for each in drawings(found):
                if each.figure is not None:
                    drawn[each.name] = replace(each, name=f"{name}_{each.name}", caption=f"{each.caption} ({label})")
            rows = tuple(summary_rows(found).items())
            table = TextTable(f"Measured by rm-opt analyze --type {kind}", ("", "value"), rows)
            tables.append(Fold(f"Numbers of {label}", (Listing(name, table),)))
        pictures = []
        for png in sorted(folder.glob("*.png")):  # those without a stored result
            if png.stem in drawn or png.stem in (each.name for each in during):
                continue
            if png.read_bytes().endswith(_PNG_END):
                pictures.append(Picture(png, f"{folder.name}: {png.stem.replace('_', ' ')}"))
            else:
                damaged = png.relative_to(run_dir).as_posix()
                missing.append(f"picture of the loss landscape: {damaged} is damaged")
        if not drawn and not pictures and len(missing) == num_missing:
            missing.append(f"loss landscape: {folder.name} has no result yet; the same rm-opt analyze goes on")
        shown += [*drawn.values(), *pictures]
    return (*shown, *during, *tables)


def _during_training(run_dir: Path, result: RunResult) -> list[Drawing]:
    """Curvature that training logged; empty if there is none or the metrics are damaged."""
    try:
        history = RunFolder(run_dir).metrics()
        num_pairs = min(result.config["training"]["hessian"]["num_pairs"], result.data.train_pairs)
        said = f"n = {num_pairs:,} pairs; seed {result.seed} of the run"
        if not has_training_curvature(history):
            return []
        figure = plot_training_curvature(history, caption=said)
    except (KeyError, TypeError, ValueError):
        return []
    return [Drawing("during_training", figure, "Curvature during training")]

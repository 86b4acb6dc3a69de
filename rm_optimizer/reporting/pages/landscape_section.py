"""Section of a run's page on its loss landscape, drawn from stored results, or their pictures if they are damaged."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rm_optimizer.landscape.between import BetweenModels
from rm_optimizer.landscape.evolution import Evolution
from rm_optimizer.landscape.layers import LayerCurvature
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.surface.results import Slice, Surface, Trajectory
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.quoting import shell_word
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.curvature_plots import has_training_curvature, plot_training_curvature
from rm_optimizer.reporting.landscape_pictures import LandscapeResult, drawings, summary_rows
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.html import details, figures, picture
from rm_optimizer.reporting.tables import cell_text
from rm_optimizer.schema.landscape import AnalysisType
from rm_optimizer.training.folder.result import RunResult

_RESULTS: dict[AnalysisType, type[JsonRecord]] = {
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
_DURING_TRAINING = "during_training"
_PNG_END = b"IEND\xaeB`\x82"


def landscape_section(run_dir: Path, result: RunResult, exhibits: Exhibits, missing: list[str]) -> str:
    """Figures and numbers of every analysis of a run; empty without one.

    Args:
        run_dir: the run folder.
        result: the run's result.
        exhibits: gains figures and tables.
        missing: gains a sentence on each piece that is missing or torn.
    """
    folders = sorted({file.parent for kind in ("json", "png") for file in (run_dir / "landscape").glob(f"*/*.{kind}")})
    if not folders:
        missing.append(f"loss landscape: rm-opt analyze {shell_word(str(run_dir))} --type hessian measures it")
    during = _during_training(run_dir, result, exhibits)
    drawn: list[str] = []
    tables = ""
    for folder in folders:
        known = len(missing)
        own, numbers = _analysis(run_dir, folder, exhibits, missing)
        if not own and len(missing) == known:
            missing.append(f"loss landscape: {folder.name} has no result yet; the same rm-opt analyze goes on")
        drawn, tables = [*drawn, *own], tables + numbers
    return figures(*drawn, during) + tables


def _during_training(run_dir: Path, result: RunResult, exhibits: Exhibits) -> str:
    """Curvature that training logged; empty if there is none or the metrics are damaged."""
    try:
        history = RunFolder(run_dir).metrics()
        num_pairs = min(result.config["training"]["hessian"]["num_pairs"], result.data.train_pairs)
        said = f"n = {num_pairs:,} pairs; seed {result.seed} of the run"
        figure = plot_training_curvature(history, caption=said) if has_training_curvature(history) else None
    except (KeyError, TypeError, ValueError):
        return ""
    return "" if figure is None else exhibits.figure(_DURING_TRAINING, figure, "Curvature during training")


def _analysis(run_dir: Path, folder: Path, exhibits: Exhibits, missing: list[str]) -> tuple[list[str], str]:
    """Figures of an analysis, and its tables."""
    drawn: dict[str, str] = {}
    tables: list[str] = []
    for file in sorted(folder.glob("*.json")):
        kind = file.stem.removesuffix("_partial")
        if kind not in AnalysisType.__members__:
            continue
        result = _read(file, AnalysisType(kind))
        if result is None:
            missing.append(f"loss landscape: {file.relative_to(run_dir).as_posix()} is torn")
            continue
        label = f"{folder.name}{', partial' if kind != file.stem else ''}"
        name = f"landscape_{folder.name}"
        for each in drawings(result):
            if each.figure is not None:
                caption = f"{each.caption} ({label})"
                drawn[each.name] = exhibits.figure(f"{name}_{each.name}", each.figure, caption, each.rows)
        rows = [(key, cell_text(value).plain) for key, value in summary_rows(result).items()]
        numbers = exhibits.table(name, f"Measured by rm-opt analyze --type {kind}", ("", "value"), rows)
        tables.append(details(f"Numbers of {label}", numbers))
    known = drawn.keys() | {_DURING_TRAINING} & exhibits.figures.keys()
    return [*drawn.values(), *_pictures(run_dir, folder, known, missing)], "".join(tables)


def _pictures(run_dir: Path, folder: Path, known: Collection[str], missing: list[str]) -> Iterator[str]:
    """Pictures of an analysis without a stored result to draw them from."""
    for png in sorted(folder.glob("*.png")):
        if png.stem in known:
            continue
        if png.read_bytes().endswith(_PNG_END):
            yield picture(png, f"{folder.name}: {png.stem.replace('_', ' ')}")
        else:
            missing.append(f"picture of the loss landscape: {png.relative_to(run_dir).as_posix()} is torn")


def _read(file: Path, kind: AnalysisType) -> LandscapeResult | None:
    """The stored result; None if the file is damaged or has another form."""
    try:
        result = _RESULTS[kind].from_json(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    assert isinstance(result, LandscapeResult)
    return result

"""`rm-opt analyze` without its terminal: spectra, grids of losses and layer-wise curvature, kept as they grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rm_optimizer.core.base import digest
from rm_optimizer.core.checkpoint import read_checkpoint
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.directions import (
    Directions,
    along_eigenvectors,
    displacements_of,
    filter_normalised,
    trajectory_plane,
)
from rm_optimizer.landscape.grid import GridLedger, Points, grid_identity, measure_grid
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.lanczos import Progress, lanczos
from rm_optimizer.landscape.layers import BlockCurvature, LayerCurvature, block_names, curvature_of_blocks
from rm_optimizer.landscape.loss_at import MISSING, PointLoss
from rm_optimizer.landscape.operators import HessianOperator
from rm_optimizer.landscape.parameters import select_parameters
from rm_optimizer.landscape.sample import Subject
from rm_optimizer.landscape.solve import Matrix, SpectrumOptions
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.surface import (
    Measured,
    Slice,
    Surface,
    Trajectory,
    describe,
    in_rows,
    plane_grid,
    plane_ranges,
    slice_grid,
    symmetric_steps,
    trajectory_grid,
)
from rm_optimizer.schema.landscape import AnalysisType, DirectionKind, LandscapeConfig

POINTS_FILE, DIRECTIONS_FILE, STATE_FILE = "points.jsonl", "directions.pt", "lanczos.pt"
"""In the folder of results: each measured point as soon as it is, the directions that they lie along, and where an
iteration stands."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Finding(Generic[ResultT]):
    """A result, and whether an interruption cut it short.

    Args:
        result: what was measured.
        is_partial: whether the user stopped it before it was whole.
    """

    result: ResultT
    is_partial: bool


@dataclass(frozen=True)
class Study:
    """What is measured and how.

    Args:
        subject: model, pairs and loss.
        config: the options.
        folder: where points are kept while they are measured, so that the same study goes on after a kill.
        on_progress: told what is being done, how much of it is, of how much (None where nobody knows), and a remark.
    """

    subject: Subject
    config: LandscapeConfig
    folder: Path
    on_progress: Callable[[str, int, int | None, str], None] = lambda what, done, total, remark: None

    def on_iteration(self, progress: Progress) -> None:
        """A product of a Lanczos iteration."""
        remark = f"{progress.num_products} products, largest error {progress.worst_error:.1e}"
        self.on_progress("eigenvalues", progress.num_converged, progress.num_wanted, remark)

    def on_product(self, num_products: int) -> None:
        """Products beside a Lanczos iteration's."""
        self.on_progress("products", num_products, None, "")

    def on_point(self, done: int, total: int) -> None:
        """A point of a grid."""
        self.on_progress("points", done, total, "")

    def measured(self, directions: Directions) -> Measured:
        """What captions say."""
        sample = self.subject.sample
        params = self.subject.params
        return describe(
            directions,
            params=params if isinstance(params, str) else ", ".join(params),
            num_parameters=directions.vectors.shape[1],
            num_pairs=sample.num_pairs,
            num_prompts=sample.num_prompts,
            seed=sample.seed,
        )


def require_finite_loss(subject: Subject) -> float:
    """The loss where the landscape is looked at.

    Raises:
        TrainingDiverged: if it is NaN or infinite; names the pairs.
    """
    with subject.measuring() as objective:
        value = objective.value()
        objective.checked(torch.tensor(value))
        return value


def measure_slices(study: Study) -> Finding[Slice]:
    """The loss along lines through the weights."""
    config = study.config
    directions, identity = study_directions(study, config.num_directions)
    steps = symmetric_steps(_span(config, directions), config.num_points)
    points, is_partial = _measure(study, directions, slice_grid(len(directions.names), steps), identity)
    rows = in_rows(points, len(steps), len(directions.names))
    return Finding(Slice(study.measured(directions), steps, rows), is_partial)


def measure_surface(study: Study) -> Finding[Surface]:
    """The loss over a plane through the weights."""
    directions, identity = study_directions(study, 2)
    steps = symmetric_steps(_span(study.config, directions), study.config.num_points)
    points, is_partial = _measure(study, directions, plane_grid(steps, steps), identity)
    rows = in_rows(points, len(steps), len(steps))
    return Finding(Surface(study.measured(directions), steps, steps, rows), is_partial)


def measure_trajectory(study: Study, checkpoints: Mapping[int, Path]) -> Finding[Trajectory]:
    """The checkpoints of a run in the plane they stay closest to, and the loss over it.

    Args:
        study: its model is the last checkpoint's.
        checkpoints: files by optimizer step, ascending.

    Raises:
        ConfigError: if there are fewer than three, or all lie on one line.
    """
    if len(checkpoints) < 3:
        raise ConfigError(
            f"a trajectory needs at least 3 checkpoints, and the run has {len(checkpoints)}; train with "
            "training.checkpoint_every=STEPS and training.keep_checkpoints=NUMBER"
        )
    subset = select_parameters(study.subject.model, study.subject.params)
    displacements = displacements_of([_weights(path) for path in checkpoints.values()], subset)
    plane = trajectory_plane(displacements)
    size = study.config.num_points
    x, y = plane_ranges(plane, size)
    moves = Directions(
        plane.directions.names, torch.cat([plane.directions.vectors, displacements]), plane.directions.method
    )
    identity = digest([study.subject.fingerprint(), list(checkpoints)])
    points, is_partial = _measure(study, moves, trajectory_grid(x, y, len(checkpoints)), identity)
    surface = Surface(study.measured(plane.directions), x, y, in_rows(points, size, size))
    result = Trajectory(
        surface,
        tuple(checkpoints),
        tuple((a, b) for a, b in plane.coordinates.tolist()),
        tuple(plane.off_plane.tolist()),
        tuple(points.get(size * size + i, MISSING) for i in range(len(checkpoints))),
    )
    return Finding(result, is_partial)


def measure_layers(study: Study) -> Finding[LayerCurvature]:
    """Top eigenvalue and trace of each layer's block of the Hessian."""
    subject, config = study.subject, study.config
    names = list(block_names(subject))
    blocks: list[BlockCurvature] = []

    def report(block: str, progress: Progress) -> None:
        study.on_progress(block, len(blocks), len(names), f"relative error {progress.worst_error:.1e}")

    is_partial = False
    try:
        for block in curvature_of_blocks(
            subject,
            tolerance=config.tolerance,
            num_probes=config.num_probes,
            max_products=config.max_products,
            on_iteration=report,
        ):
            blocks.append(block)
    except KeyboardInterrupt:
        is_partial = True
    sample = subject.sample
    missing = tuple(names[len(blocks) :])
    return Finding(
        LayerCurvature(tuple(blocks), missing, sample.num_pairs, sample.num_prompts, sample.seed), is_partial
    )


def measure_spectrum(study: Study) -> Finding[HessianSpectrum]:
    """Eigenvalues with error bounds and sampling error, the trace, and for a density analysis all of the spectrum."""
    subject, config = study.subject, study.config
    is_density = config.type == AnalysisType.density
    matrix: Matrix = "gauss_newton" if config.type == AnalysisType.gauss_newton else "hessian"
    analyzer = HessianAnalyzer(
        subject.model, loss=subject.loss, params=subject.params, dtype=subject.dtype, seed=subject.sample.seed
    )
    options = SpectrumOptions(
        tolerance=config.tolerance,
        max_products=config.max_products,
        trace_products=0 if is_density else config.num_probes,
        density_probes=config.num_probes if is_density else 0,
        density_steps=config.probe_steps,
        num_sampled=min(config.num_sampled, config.top_k),
        state_file=study.folder / STATE_FILE,
    )
    spectrum = analyzer.compute_spectrum(
        subject.sample.batches,
        config.method.value,
        top_k=config.top_k,
        matrix=matrix,
        options=options,
        on_iteration=study.on_iteration,
        on_product=study.on_product,
    )
    return Finding(spectrum, spectrum.status == SpectrumStatus.interrupted)


def study_directions(study: Study, count: int) -> tuple[Directions, str]:
    """The directions of a study and what they belong to; an interrupted study goes on along the same ones."""
    config = study.config
    kind = config.directions.value
    identity = digest([study.subject.fingerprint(), kind, count, study.subject.sample.seed, config.tolerance])
    path = study.folder / DIRECTIONS_FILE
    found = Directions.load(path, identity)
    if found is None:
        found = _new_directions(study, count)
        found.save(path, identity)
    return found, identity


def _new_directions(study: Study, count: int) -> Directions:
    seed = study.subject.sample.seed
    with study.subject.measuring() as objective:
        if study.config.directions == DirectionKind.random:
            return filter_normalised(objective.model, objective.subset, count, seed=seed)
        found = lanczos(
            HessianOperator(objective),
            count,
            which="magnitude",
            tolerance=study.config.tolerance,
            max_products=study.config.max_products,
            seed=seed,
            on_iteration=study.on_iteration,
        )
        return along_eigenvectors(found, count)


def _span(config: LandscapeConfig, directions: Directions) -> float:
    """As far as asked; else 1, or where the parabola of the eigenvalue largest in magnitude has risen by 1 nat."""
    if config.span is not None:
        return config.span
    largest = max((abs(value) for value in directions.values or ()), default=0.0)
    return (2 / largest) ** 0.5 if largest > 0 else 1.0


def _measure(study: Study, directions: Directions, points: Points, identity: str) -> tuple[dict[int, PointLoss], bool]:
    """The measured points, and whether an interruption left some out."""
    ledger = GridLedger(study.folder / POINTS_FILE, grid_identity(identity, points))
    try:
        measure_grid(
            study.subject, directions, points, ledger, processes=study.config.processes, on_point=study.on_point
        )
    except KeyboardInterrupt:
        return ledger.points, True
    return ledger.points, False


def _weights(path: Path) -> dict[str, Tensor]:
    """A checkpoint's weights by the names that the reward model gives them."""
    return {f"model.{name}": tensor for name, tensor in read_checkpoint(path)[1].items()}


MEASURES: Mapping[AnalysisType, Callable[[Study], Finding[Any]]] = {
    AnalysisType.hessian: measure_spectrum,
    AnalysisType.gauss_newton: measure_spectrum,
    AnalysisType.density: measure_spectrum,
    AnalysisType.slices: measure_slices,
    AnalysisType.surface: measure_surface,
    AnalysisType.layers: measure_layers,
}
"""What each type of analysis that needs no more than the study does."""

"""Measurements of `rm-opt analyze`: spectra, grids of losses and layer-wise curvature, saved as they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.storage.loading import read_checkpoint
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.analysis_context import AnalysisContext, AnalysisResult
from rm_optimizer.landscape.estimates.by_pair import curvature_by_pair
from rm_optimizer.landscape.layers import (
    BlockCurvature,
    LayerCurvature,
    block_names,
    curvature_of_blocks,
    top_eigenvalues,
)
from rm_optimizer.landscape.operators.parameters import select_parameters
from rm_optimizer.landscape.solvers.krylov import remove_states
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.surface import grid as grids
from rm_optimizer.landscape.surface.directions import (
    Directions,
    along_eigenvectors,
    displacements_of,
    filter_normalized,
    trajectory_plane,
)
from rm_optimizer.landscape.surface.grid import GridLedger, Points, Slice, Surface, Trajectory
from rm_optimizer.records.codec import from_values
from rm_optimizer.schema.landscape import AnalysisType, DirectionKind, SpectrumMethod, SpectrumOptions

POINTS_FILE, DIRECTIONS_FILE, LAYERS_FILE, STATE_FILE = "points.jsonl", "directions.pt", "layers.jsonl", "lanczos.json"
"""Files in the folder of results: measured points, their directions, measured layers, and the state of an iteration."""


def measure_trajectory(context: AnalysisContext, checkpoints: Mapping[int, Path]) -> AnalysisResult[Trajectory]:
    """Measure the loss over the plane closest to the checkpoints of a run.

    Args:
        context: context with the model of the last checkpoint.
        checkpoints: checkpoint files by optimizer step, ascending.

    Raises:
        ConfigError: if there are fewer than three, or all lie on one line.
    """
    if len(checkpoints) < 3:
        raise ConfigError(
            f"a trajectory needs at least 3 checkpoints, and the run has {len(checkpoints)}; train with "
            "training.checkpoint_every=STEPS and training.keep_checkpoints=NUMBER"
        )
    size = context.config.num_points
    identity = digest([context.measured_loss.fingerprint(), list(checkpoints)])
    with _points(context, identity, size * size + len(checkpoints)) as ledger:
        subset = select_parameters(context.measured_loss.model, context.measured_loss.params)
        weights = (read_checkpoint(path)[1].items() for path in checkpoints.values())
        rest = dict(context.measured_loss.model.named_parameters())  # the base that checkpoints of an adapter leave out
        named = (rest | {f"model.{name}": tensor for name, tensor in own} for own in weights)
        displacements = displacements_of(named, subset)
        plane = trajectory_plane(displacements)
        x, y = grids.plane_ranges(plane, size)
        moves = replace(plane.directions, vectors=torch.cat([plane.directions.vectors, displacements]))
        is_partial = _measure(context, moves, grids.trajectory_grid(x, y, len(checkpoints)), ledger)
    points = ledger.points
    surface = Surface(context.measured(plane.directions), x, y, grids.in_rows(points, size, size))
    result = Trajectory(
        surface,
        tuple(checkpoints),
        tuple((a, b) for a, b in plane.coordinates.tolist()),
        tuple(plane.off_plane.tolist()),
        tuple(points.get(size * size + i, grids.MISSING) for i in range(len(checkpoints))),
    )
    return AnalysisResult(result, is_partial)


def measure_layers(context: AnalysisContext) -> AnalysisResult[LayerCurvature]:
    """Measure each layer's Gauss-Newton spectrum and traces, and with `lanczos` the Hessian's largest eigenvalue.

    Spectra and traces of all layers are measured together. After a kill, a search continues with its next product.
    """
    measured_loss, sample, config = context.measured_loss, context.measured_loss.sample, context.config
    searches = config.method == SpectrumMethod.lanczos
    num_blocks = len(block_names(measured_loss))
    identity = [measured_loss.fingerprint(), config.tolerance, config.num_probes, config.max_products, sample.seed]
    is_cross_fitted, state_file = searches and config.num_sampled != 0, context.folder / STATE_FILE
    given = {each.name: getattr(config, each.name) for each in fields(SpectrumOptions)}
    options = SpectrumOptions(**given | {"num_sampled": int(is_cross_fitted)})

    def report(block: str, progress: Progress) -> None:
        context.on_progress(block, len(done), num_blocks, progress.remark)

    is_partial = False
    with context.ledger(LAYERS_FILE, [*identity, config.method, is_cross_fitted], 1 + num_blocks * searches) as ledger:
        pieces = list(ledger.values())
        if not pieces:
            common = curvature_of_blocks(measured_loss, options, context.on_product)
            ledger.append(common)
        else:
            common = from_values(tuple[BlockCurvature, ...], pieces[0])
        done = {block.block: block for block in (from_values(BlockCurvature, piece) for piece in pieces[1:])}
        left = [block for block in common if block.block not in done] if searches else []
        try:
            for block in top_eigenvalues(measured_loss, left, options, state_file=state_file, on_iteration=report):
                ledger.append(block)
                done[block.block] = block
            remove_states(state_file)
        except KeyboardInterrupt:
            is_partial = True
    missing = tuple(block.block for block in left if block.block not in done)
    blocks = tuple(done.get(block.block, block) for block in common)
    return AnalysisResult(
        LayerCurvature(blocks, missing, sample.num_pairs, sample.num_prompts, sample.seed, str(context.subject)),
        is_partial,
    )


def measure_spectrum(context: AnalysisContext) -> AnalysisResult[HessianSpectrum]:
    """Measure eigenvalues with error bounds and sampling error, the trace, and for a density analysis the density."""
    spectrum = context.spectrum(
        matrix="hessian" if context.config.type == AnalysisType.density else context.config.type.value,
        with_density=context.config.type == AnalysisType.density,
        state_file=context.folder / STATE_FILE,
    )
    described, curvatures, by_pair = context.measured_loss.described, spectrum.pair_curvatures, None
    if described and curvatures is not None:
        by_pair = curvature_by_pair(curvatures, described)
    spectrum = replace(spectrum, source=str(context.subject), by_pair=by_pair)
    is_partial = spectrum.status == SpectrumStatus.interrupted
    if is_partial and not spectrum.eigenvalues:
        raise KeyboardInterrupt
    return AnalysisResult(spectrum, is_partial, is_kept=(context.folder / STATE_FILE).exists())


def measure_around(context: AnalysisContext) -> AnalysisResult[Slice | Surface]:
    """Measure the loss along lines through the weights (`slices`), or over a plane through them (`surface`).

    The directions of an earlier call of the same analysis are used again.
    """
    measured_loss, config = context.measured_loss, context.config
    is_plane = config.type == AnalysisType.surface
    count = 2 if is_plane else config.num_directions
    how = [config.directions.value, count, measured_loss.sample.seed, config.tolerance, config.max_products]
    identity, path = digest([measured_loss.fingerprint(), *how]), context.folder / DIRECTIONS_FILE
    with _points(context, identity, (config.num_points if is_plane else count) * config.num_points) as ledger:
        directions = Directions.load(path, identity)
        if directions is None:
            directions = _new_directions(context, count)
            directions.save(path, identity)
        span = config.span
        if span is None:  # 1, or where a parabola with the largest eigenvalue's curvature rises by 1 nat
            largest = max((abs(value) for value in directions.values or ()), default=0.0)
            span = (2 / largest) ** 0.5 if largest > 0 else 1.0
        steps = grids.symmetric_steps(span, config.num_points)
        grid = grids.plane_grid(steps, steps) if is_plane else grids.slice_grid(len(directions.names), steps)
        is_partial = _measure(context, directions, grid, ledger)
    rows = grids.in_rows(ledger.points, len(steps), len(grid) // len(steps))
    measured = context.measured(directions)
    result = Surface(measured, steps, steps, rows) if is_plane else Slice(measured, steps, rows)
    return AnalysisResult(result, is_partial)


def _new_directions(context: AnalysisContext, count: int) -> Directions:
    measured_loss, config = context.measured_loss, context.config
    if config.directions == DirectionKind.random:
        with measured_loss.measuring() as objective:  # in the type of the measurement
            return filter_normalized(objective.model, objective.subset, count, seed=measured_loss.sample.seed)
    found = measured_loss.analyzer.compute_spectrum(
        measured_loss.sample,
        top_k=count,
        options=SpectrumOptions(which="magnitude", tolerance=config.tolerance, max_products=config.max_products),
        on_iteration=context.on_iteration,
    )
    if found.eigenvectors is None or found.status == SpectrumStatus.interrupted:
        raise KeyboardInterrupt
    return along_eigenvectors(found.eigenvalues, found.eigenvectors, found.converged, count)


@contextmanager
def _points(context: AnalysisContext, identity: str, num_points: int) -> Iterator[GridLedger]:
    """Open the ledger of measured points before anything is computed, so that a refusal costs no time."""
    config = context.config
    kind = [identity, config.type.value, config.num_points, config.span]
    with context.ledger(POINTS_FILE, kind, num_points) as ledger:
        yield GridLedger(ledger)


def _measure(context: AnalysisContext, directions: Directions, points: Points, ledger: GridLedger) -> bool:
    """Measure the points; True if an interruption left some out.

    Raises:
        KeyboardInterrupt: if it left all of them out.
    """
    try:
        grids.measure_grid(
            context.measured_loss,
            directions,
            points,
            ledger,
            processes=context.config.processes,
            on_point=context.on_point,
        )
    except KeyboardInterrupt:
        if not ledger.points:
            raise
        return True
    return False


MEASURES: Mapping[AnalysisType, Callable[[AnalysisContext], AnalysisResult[Any]]] = {
    AnalysisType.slices: measure_around,
    AnalysisType.surface: measure_around,
    AnalysisType.layers: measure_layers,
}
"""Measurement of each type of analysis that needs nothing but its context and gives no spectrum."""

"""The options of `rm-opt analyze`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rm_optimizer.schema.checks import Options, needing, require, within
from rm_optimizer.schema.config import LoggerConfig, LossConfig
from rm_optimizer.schema.data import DataConfig


class AnalysisType(StrEnum):
    """Measurements of the loss's landscape."""

    hessian = "hessian"
    gauss_newton = "gauss_newton"
    fisher = "fisher"
    density = "density"
    slices = "slices"
    surface = "surface"
    layers = "layers"
    trajectory = "trajectory"
    evolution = "evolution"
    between = "between"


class SpectrumMethod(StrEnum):
    """Methods of computing eigenvalues."""

    lanczos = "lanczos"
    power_iteration = "power_iteration"
    full = "full"
    gauss_newton_exact = "gauss_newton_exact"
    pyhessian = "pyhessian"


class SpectrumEnd(StrEnum):
    """End of the spectrum that Lanczos searches."""

    both = "both"
    largest = "largest"
    smallest = "smallest"
    magnitude = "magnitude"


class HessianProduct(StrEnum):
    """Hessian-vector product methods, all exact."""

    auto = "auto"
    kept_graph = "kept_graph"
    reverse = "reverse"
    forward = "forward"


class TraceMethod(StrEnum):
    """Estimators of the trace: deflated removes the eigenvalues found, the others do not use them."""

    deflated = "deflated"
    hutchinson = "hutchinson"
    hutchpp = "hutchpp"
    xtrace = "xtrace"


class DirectionKind(StrEnum):
    """Directions of slices and surfaces: filter-normalized random ones, or the Hessian's eigenvectors."""

    random = "random"
    eigenvectors = "eigenvectors"


class Split(StrEnum):
    """Pairs to draw from: those of training, its validation pairs, or all of `data.train`."""

    train = "train"
    val = "val"
    all = "all"


class Precision(StrEnum):
    """Type that derivatives are computed in."""

    float32 = "float32"
    float64 = "float64"


def _types(*names: AnalysisType) -> str:
    """Condition of a field that these types read."""
    return "|".join(f"type={name}" for name in names)


def _methods(*names: SpectrumMethod) -> str:
    """Condition of a field that these methods read."""
    return "|".join(f"method={name}" for name in names)


_ALONG = (AnalysisType.evolution, AnalysisType.between)
_SPECTRA = (AnalysisType.hessian, AnalysisType.gauss_newton, AnalysisType.fisher, AnalysisType.density, *_ALONG)
_WITH_LAYERS = _types(*_SPECTRA, AnalysisType.layers)
_PLANES = (AnalysisType.slices, AnalysisType.surface)
_EIGENVECTORS = f"directions={DirectionKind.eigenvectors}"
_LANCZOS = SpectrumMethod.lanczos
_SEARCHES = (_LANCZOS, SpectrumMethod.power_iteration)
_SAMPLES = _methods(*_SEARCHES, SpectrumMethod.pyhessian)
_COUNTED_METHODS = (_LANCZOS, SpectrumMethod.full, SpectrumMethod.gauss_newton_exact)
_METHODS_OF_LAYERS = (SpectrumMethod.gauss_newton_exact, _LANCZOS)


@dataclass(kw_only=True)
class LandscapeConfig(Options, group="landscape"):
    """Measurement, parameters and number of pairs; `landscape=TYPE` sets the defaults of the type.

    An option that the type, its method or its directions do not read is refused where it is typed.
    """

    type: AnalysisType = AnalysisType.hessian
    """hessian, gauss_newton, fisher, density, slices, surface, layers, trajectory, evolution or between."""
    params: Any = "trainable"
    """The parameters: trainable, head, lora, a pattern of names (`*.layers.0.*`), or a list of these."""
    num_pairs: int = within("[2, inf)", 64)
    """Pairs that the loss is averaged over, drawn by the seed; all of them if there are fewer."""
    token_budget: int = within("[1, inf)", 4096)
    """Tokens, padding included, of one pass; limits memory and does not change results."""
    dtype: Precision = Precision.float32
    """float32, or float64 for four times the time."""
    method: SpectrumMethod = needing(_WITH_LAYERS, _LANCZOS)
    """lanczos, power_iteration, full (few parameters), gauss_newton_exact (that matrix), or pyhessian (an extra). For
    evolution and between: lanczos, full or gauss_newton_exact. For layers: gauss_newton_exact, or lanczos, which also
    finds the largest eigenvalue of each Hessian block."""
    top_k: int = within(
        "[1, inf)",
        20,
        needs=f"{_types(*_SPECTRA)},{_SAMPLES}|{_methods(SpectrumMethod.gauss_newton_exact)}",
    )
    """Number of eigenvalues, at each end if `which` is both."""
    which: SpectrumEnd = needing(f"{_types(*_SPECTRA)},{_methods(_LANCZOS)}", SpectrumEnd.both)
    """End that lanczos searches: both (for Gauss-Newton and Fisher the largest only), largest, smallest, magnitude;
    for evolution and between: both or largest."""
    product: HessianProduct = needing(
        _types(AnalysisType.hessian, AnalysisType.density, AnalysisType.layers, *_ALONG), HessianProduct.auto
    )
    """Exact Hessian-vector products: kept_graph (fast), reverse (little memory), forward, or auto, which tries them."""
    memory_gib: float | None = within("(0, inf)", None, needs=_WITH_LAYERS)
    """Most GiB for each of lanczos's vectors, rows of pairs, and kept graphs; null takes half of the free memory, 3.7,
    and half of the free memory."""
    num_sampled: int | None = within("[0, inf)", None, needs=f"{_WITH_LAYERS},{_methods(_LANCZOS)}|{_types(*_SPECTRA)}")
    """Number of largest eigenvalues to cross-fit; null takes `top_k`, and one for a Hessian's block in `layers`. The
    Hessian needs a model with forward derivatives for this."""
    tolerance: float = within("(0, 1)", 1e-3, needs=f"{_WITH_LAYERS}|{_EIGENVECTORS},{_SAMPLES}|{_EIGENVECTORS}")
    """Residual, relative to the eigenvalue, at which its iteration ends."""
    max_products: int | None = within(
        "[1, inf)", None, needs=f"{_WITH_LAYERS}|{_EIGENVECTORS},{_methods(*_SEARCHES)}|{_EIGENVECTORS}"
    )
    """Most Hessian-vector products; null is enough for most spectra."""
    num_probes: int = within("[2, inf)", 20, needs=f"{_WITH_LAYERS},{_SAMPLES}|{_types(AnalysisType.layers)}")
    """Random probes for the trace and the density."""
    trace_method: TraceMethod = needing(
        f"{_types(AnalysisType.hessian, AnalysisType.gauss_newton, AnalysisType.fisher, *_ALONG)},{_SAMPLES}",
        TraceMethod.deflated,
    )
    """deflated, hutchinson, hutchpp or xtrace, with `num_probes` products; a density gives its own trace."""
    sam_rho: float = within("[0, inf)", 0.0, needs=_types(AnalysisType.hessian, AnalysisType.density))
    """Radius of SAM's ascent step for sharpness, with the gradient's norm and alignment; 0 does not measure them."""
    probe_steps: int = within(
        "[2, inf)",
        25,
        needs=f"{_types(AnalysisType.density)},{_SAMPLES}|{_methods(SpectrumMethod.gauss_newton_exact)}",
    )
    """Lanczos steps of each probe of the density."""
    directions: DirectionKind = needing(_types(*_PLANES), DirectionKind.random)
    """Slices and surfaces run along filter-normalized random directions, or along the top eigenvectors."""
    num_directions: int = within("[1, inf)", 3, needs=_types(AnalysisType.slices))
    """Lines of `slices`."""
    num_points: int = needing(_types(*_PLANES, AnalysisType.trajectory, AnalysisType.between), 21)
    """Points along each direction; odd, so that the weights themselves are among them."""
    span: float | None = within("(0, inf)", None, needs=_types(*_PLANES))
    """Distance to either side; null takes 1 for random directions, a rise of the parabola by 1 nat for eigenvectors."""
    processes: int = within("[1, inf)", 1, needs=_types(*_PLANES, AnalysisType.trajectory))
    """Processes that share the points of slices, surfaces and trajectories; CPU only."""
    others: list[str] = needing(_types(AnalysisType.between), list)
    """Run folders or models that `between` compares with the checkpoint, on the checkpoint's pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.params, str) or (isinstance(self.params, list) and len(self.params) > 0)
        require(named, "landscape.params", "be a name, a pattern or a list of patterns", self.params)
        is_odd = self.num_points >= 3 and self.num_points % 2 == 1
        require(is_odd, "landscape.num_points", "be odd and at least 3", self.num_points)
        fits = self.type != AnalysisType.layers or self.method in _METHODS_OF_LAYERS
        require(fits, "landscape.method", "be gauss_newton_exact or lanczos for layers", self.method.value)
        if self.type in _ALONG:
            self._require_largest()

    def _require_largest(self) -> None:
        """Require values that are counted from the largest, as figures and overlaps of several models take them."""
        names = ", ".join(_COUNTED_METHODS[:-1]) + f" or {_COUNTED_METHODS[-1]}"
        require(
            self.method in _COUNTED_METHODS, "landscape.method", f"be {names} for {self.type.value}", self.method.value
        )
        is_counted = self.method != SpectrumMethod.lanczos or self.which in (SpectrumEnd.both, SpectrumEnd.largest)
        require(is_counted, "landscape.which", f"be both or largest for {self.type.value}", self.which.value)


@dataclass(kw_only=True)
class AnalyzeConfig(Options):
    """All options of `rm-opt analyze`; for a run folder, data, loss and seed are the run's unless given."""

    checkpoint: str = MISSING
    """Run folder, exported folder, Lightning .ckpt or hub id."""
    output_dir: str = MISSING
    """Folder of the results: `landscape/TYPE` in the run folder, below `outputs/analyze` for other models."""
    seed: int = within("[0, 2**32)", 0)
    """Seed of pairs, random directions, starting vectors and probes."""
    max_length: int | None = within("[8, inf)", None)
    """Tokens kept of a sequence; null takes the number stored with the model."""
    progress: bool = True
    """Show progress bars."""
    split: Split = Split.all
    """Pairs to draw from: all of `data.train`, or its train or val part as in training; for a run folder: train."""
    data: DataConfig = MISSING
    loss: LossConfig = MISSING
    logger: LoggerConfig = MISSING
    landscape: LandscapeConfig = MISSING

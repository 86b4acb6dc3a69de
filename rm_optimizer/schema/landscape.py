"""The options of `rm-opt analyze`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
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
    """Pairs to draw from: training pairs, validation pairs, or all of `data.train`."""

    train = "train"
    val = "val"
    all = "all"


class Precision(StrEnum):
    """Type that derivatives are computed in."""

    float32 = "float32"
    float64 = "float64"


def _when(option: str, *values: StrEnum) -> str:
    """Condition of a field that is read with any of these values of an option."""
    return "|".join(f"{option}={value}" for value in values)


_ALONG = (AnalysisType.evolution, AnalysisType.between)
_SPECTRA = (AnalysisType.hessian, AnalysisType.gauss_newton, AnalysisType.fisher, AnalysisType.density, *_ALONG)
_HESSIANS = (AnalysisType.hessian, AnalysisType.density, *_ALONG)
_WITH_LAYERS = _when("type", *_SPECTRA, AnalysisType.layers)
_PLANES = (AnalysisType.slices, AnalysisType.surface)
_EIGENVECTORS = f"directions={DirectionKind.eigenvectors}"
_LANCZOS = SpectrumMethod.lanczos
_SEARCHES = (_LANCZOS, SpectrumMethod.power_iteration)
_SEARCHED = f"{_when('method', *_SEARCHES)}|{_EIGENVECTORS}"
_TRACES = _when("type", AnalysisType.hessian, AnalysisType.gauss_newton, AnalysisType.fisher, *_ALONG)
_SAMPLES = _when("method", *_SEARCHES, SpectrumMethod.pyhessian)
_OF_SPECTRA, _BY_LANCZOS = _when("type", *_SPECTRA), _when("method", _LANCZOS)
_BY_ROWS = _when("method", SpectrumMethod.gauss_newton_exact)
_METHODS_OF = {
    AnalysisType.layers: (SpectrumMethod.gauss_newton_exact, _LANCZOS),
    **dict.fromkeys(_ALONG, (_LANCZOS, SpectrumMethod.full, SpectrumMethod.gauss_newton_exact)),
}


@dataclass(kw_only=True)
class SpectrumOptions(Options):
    """Quantities of a spectrum to compute, and their accuracy."""

    which: str = needing(f"{_OF_SPECTRA},{_BY_LANCZOS}", SpectrumEnd.both.value)
    """End that lanczos searches: both (for Gauss-Newton and Fisher the largest only), largest, smallest, magnitude;
    for evolution and between: both or largest."""
    product: str = needing(_when("type", *_HESSIANS, AnalysisType.layers), HessianProduct.auto.value)
    """Exact Hessian-vector products: kept_graph (fast), reverse (little memory), forward, or auto, which tries them."""
    memory_gib: float | None = within("(0, inf)", None, needs=_WITH_LAYERS)
    """Most GiB for each of lanczos's vectors, rows of pairs, and kept graphs; null takes half of the free memory, 3.7,
    and half of the free memory."""
    max_basis: int | None = within("[1, inf)", None, needs=f"{_WITH_LAYERS},{_BY_LANCZOS}")
    """Most vectors that lanczos holds, at least the number of eigenvalues plus four; null sets no limit."""
    keep_vectors: bool = needing(f"{_OF_SPECTRA},{_BY_LANCZOS}", True)
    """False keeps no eigenvectors of lanczos beyond `num_sampled`: trace and density are not deflated, and overlooked
    eigenvalues are not searched for."""
    num_sampled: int | None = within("[0, inf)", 0, needs=f"{_WITH_LAYERS},{_BY_LANCZOS}|{_OF_SPECTRA}")
    """Number of largest eigenvalues to cross-fit, with their error over pairs; null takes `top_k`, and one for a
    Hessian's block in `layers`. The Hessian needs a model with forward derivatives for this."""
    tolerance: float = within("(0, 1)", 1e-3, needs=f"{_WITH_LAYERS}|{_EIGENVECTORS},{_SAMPLES}|{_EIGENVECTORS}")
    """Residual, relative to the eigenvalue, at which its iteration ends."""
    max_products: int | None = within("[1, inf)", None, needs=f"{_WITH_LAYERS}|{_EIGENVECTORS},{_SEARCHED}")
    """Most Hessian-vector products; null is enough for most spectra."""
    num_probes: int = within("[0, inf)", 0, needs=f"{_WITH_LAYERS},{_SAMPLES}|{_when('type', AnalysisType.layers)}")
    """Random probes for the trace, or for the density, which gives its own trace; 0 estimates none."""
    trace_method: str = needing(f"{_TRACES},{_SAMPLES}", TraceMethod.deflated.value)
    """deflated, hutchinson, hutchpp or xtrace, with `num_probes` products; a density gives its own trace."""
    probe_steps: int = within("[2, inf)", 25, needs=f"{_when('type', AnalysisType.density)},{_SAMPLES}|{_BY_ROWS}")
    """Lanczos steps of each probe of the density."""
    sam_rho: float = within("[0, inf)", 0.0, needs=_when("type", AnalysisType.hessian, AnalysisType.density))
    """Radius of SAM's ascent step for sharpness, with the gradient's norm and alignment; 0 does not measure them."""

    effective_rank: bool = needing(_OF_SPECTRA, False)
    """True computes the effective rank of the Gauss-Newton matrix, for the gradient of each pair."""

    @property
    def memory_bytes(self) -> int | None:
        """`memory_gib` in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


def _again(name: str, default: Any, **changed: str) -> Any:
    """Field of `SpectrumOptions` with another default or interval, or with its choices as an enumeration."""
    [inherited] = (item for item in fields(SpectrumOptions) if item.name == name)
    return field(default=default, metadata={**inherited.metadata, **changed})


@dataclass(kw_only=True)
class LandscapeConfig(SpectrumOptions, group="landscape"):
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
    top_k: int = within("[1, inf)", 20, needs=f"{_OF_SPECTRA},{_SAMPLES}|{_BY_ROWS}|{_when('type', *_ALONG)}")
    """Number of eigenvalues, at each end if `which` is both, and of the vectors whose overlap is measured."""
    which: SpectrumEnd = _again("which", SpectrumEnd.both)
    product: HessianProduct = _again("product", HessianProduct.auto)
    trace_method: TraceMethod = _again("trace_method", TraceMethod.deflated)
    num_sampled: int | None = _again("num_sampled", None)
    num_probes: int = _again("num_probes", 20, interval="[2, inf)")
    directions: DirectionKind = needing(_when("type", *_PLANES), DirectionKind.random)
    """Slices and surfaces run along filter-normalized random directions, or along the top eigenvectors."""
    num_directions: int = within("[1, inf)", 3, needs=_when("type", AnalysisType.slices))
    """Lines of `slices`."""
    num_points: int = needing(_when("type", *_PLANES, AnalysisType.trajectory, AnalysisType.between), 21)
    """Points along each direction; odd, so that the weights themselves are among them."""
    span: float | None = within("(0, inf)", None, needs=_when("type", *_PLANES))
    """Distance to either side; null takes 1 for random directions, a rise of the parabola by 1 nat for eigenvectors."""
    processes: int = within("[1, inf)", 1, needs=_when("type", *_PLANES, AnalysisType.trajectory))
    """Processes that share the points of slices, surfaces and trajectories; CPU only."""
    others: list[str] = needing(_when("type", AnalysisType.between), list)
    """Run folders or models that `between` compares with the checkpoint, on the checkpoint's pairs."""

    def _check(self) -> None:
        named = isinstance(self.params, str) or (isinstance(self.params, list) and len(self.params) > 0)
        require(named, "landscape.params", "be a name, a pattern or a list of patterns", self.params)
        is_odd = self.num_points >= 3 and self.num_points % 2 == 1
        require(is_odd, "landscape.num_points", "be odd and at least 3", self.num_points)
        allowed = _METHODS_OF.get(self.type, tuple(SpectrumMethod))
        expected = f"be {', '.join(allowed[:-1])} or {allowed[-1]} for {self.type.value}"
        require(self.method in allowed, "landscape.method", expected, self.method.value)
        # figures and overlaps of several models take values that are counted from the largest
        is_counted = self.method != SpectrumMethod.lanczos or self.which in (SpectrumEnd.both, SpectrumEnd.largest)
        expected = f"be both or largest for {self.type.value}"
        require(is_counted or self.type not in _ALONG, "landscape.which", expected, self.which.value)


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

"""The options of `rm-opt analyze`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rm_optimizer.schema.checks import Options, require, within
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


@dataclass(kw_only=True)
class LandscapeConfig(Options, group="landscape"):
    """Measurement, parameters and number of pairs; `landscape=TYPE` sets the defaults of the type."""

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
    method: SpectrumMethod = SpectrumMethod.lanczos
    """lanczos, power_iteration, full (few parameters), gauss_newton_exact (that matrix), or pyhessian (an extra). For
    evolution and between: lanczos, full or gauss_newton_exact. For layers: gauss_newton_exact, or lanczos, which also
    finds the largest eigenvalue of each Hessian block."""
    top_k: int = within("[1, inf)", 20)
    """Number of eigenvalues, at each end if `which` is both."""
    which: SpectrumEnd = SpectrumEnd.both
    """End that lanczos searches: both (for Gauss-Newton and Fisher the largest only), largest, smallest, magnitude;
    for evolution and between: both or largest."""
    product: HessianProduct = HessianProduct.auto
    """Exact Hessian-vector products: kept_graph (fast), reverse (little memory), forward, or auto, which tries them."""
    memory_gib: float | None = within("(0, inf)", None)
    """Most GiB for each of lanczos's vectors, rows of pairs, and kept graphs; null takes half of the free memory, 3.7,
    and half of the free memory."""
    num_sampled: int | None = within("[0, inf)", None)
    """Number of largest eigenvalues to cross-fit; null takes `top_k`, and one for a Hessian's block in `layers`. The
    Hessian needs a model with forward derivatives for this."""
    tolerance: float = within("(0, 1)", 1e-3)
    """Residual, relative to the eigenvalue, at which its iteration ends."""
    max_products: int | None = within("[1, inf)", None)
    """Most Hessian-vector products; null is enough for most spectra."""
    num_probes: int = within("[2, inf)", 20)
    """Random probes for the trace and the density."""
    trace_method: TraceMethod = TraceMethod.deflated
    """deflated, hutchinson, hutchpp or xtrace, with `num_probes` products; a density gives its own trace."""
    sam_rho: float = within("[0, inf)", 0.0)
    """Radius of SAM's ascent step for sharpness, with the gradient's norm and alignment; 0 does not measure them."""
    probe_steps: int = within("[2, inf)", 25)
    """Lanczos steps of each probe of the density."""
    directions: DirectionKind = DirectionKind.random
    """Slices and surfaces run along filter-normalized random directions, or along the top eigenvectors."""
    num_directions: int = within("[1, inf)", 3)
    """Lines of `slices`."""
    num_points: int = 21
    """Points along each direction; odd, so that the weights themselves are among them."""
    span: float | None = within("(0, inf)", None)
    """Distance to either side; null takes 1 for random directions, a rise of the parabola by 1 nat for eigenvectors."""
    processes: int = within("[1, inf)", 1)
    """Processes that share the points of slices, surfaces and trajectories; CPU only."""
    others: list[str] = field(default_factory=list)
    """Run folders or models that `between` compares with the checkpoint, on the checkpoint's pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.params, str) or (isinstance(self.params, list) and len(self.params) > 0)
        require(named, "landscape.params", "be a name, a pattern or a list of patterns", self.params)
        is_odd = self.num_points >= 3 and self.num_points % 2 == 1
        require(is_odd, "landscape.num_points", "be odd and at least 3", self.num_points)
        fits = self.type != AnalysisType.layers or self.method in _METHODS_OF_LAYERS
        require(fits, "landscape.method", "be gauss_newton_exact or lanczos for layers", self.method.value)
        if self.type in (AnalysisType.evolution, AnalysisType.between):
            self._require_largest()

    def _require_largest(self) -> None:
        """Require values that are counted from the largest, as figures and overlaps of several models take them."""
        names = ", ".join(_COUNTED_METHODS[:-1]) + f" or {_COUNTED_METHODS[-1]}"
        require(
            self.method in _COUNTED_METHODS, "landscape.method", f"be {names} for {self.type.value}", self.method.value
        )
        is_counted = self.method != SpectrumMethod.lanczos or self.which in (SpectrumEnd.both, SpectrumEnd.largest)
        require(is_counted, "landscape.which", f"be both or largest for {self.type.value}", self.which.value)


def ignored_options(config: LandscapeConfig, preset: Mapping[str, Any]) -> list[str]:
    """Options that the user set and that are not used by the type, its method or its directions.

    Args:
        config: the options.
        preset: values of the type's preset by option. An unused value that the preset gave is not named.

    Example:
        >>> ignored_options(LandscapeConfig(type=AnalysisType.layers, top_k=7, num_points=5), {"num_points": 5})
        ['landscape.top_k=7']
    """
    unread = {name: getattr(config, name) for name in _unread_defaults(config)}
    return [f"landscape.{name}={value}" for name, value in unread.items() if preset.get(name) != value]


def without_ignored(config: LandscapeConfig) -> LandscapeConfig:
    """The same options with those that are not used at their defaults."""
    return replace(config, **_unread_defaults(config))


def _unread_defaults(config: LandscapeConfig) -> dict[str, Any]:
    """Defaults of what is not read and differs from them."""
    read = _ALWAYS_READ | _READ_BY_TYPE[config.type]
    if config.type in _SPECTRA:
        read -= _UNREAD_BY_METHOD.get(config.method, frozenset())
    if config.type == AnalysisType.layers and config.method == SpectrumMethod.gauss_newton_exact:
        read -= _SOLVER | {"num_sampled"}
    if config.type in _SPECTRA and config.method != SpectrumMethod.lanczos:
        read -= {"which"}
    if config.type in _OF_OUTPUTS:
        read -= {"product"}
    if "directions" in read and config.directions == DirectionKind.eigenvectors:
        read |= _SOLVER
    defaults = {
        item.name: item.default if item.default_factory is MISSING_DEFAULT else item.default_factory()
        for item in fields(config)
        if item.name not in read
    }
    return {name: default for name, default in defaults.items() if getattr(config, name) != default}


_SPECTRA = (
    AnalysisType.hessian,
    AnalysisType.gauss_newton,
    AnalysisType.fisher,
    AnalysisType.density,
    AnalysisType.evolution,
    AnalysisType.between,
)
_OF_OUTPUTS = (AnalysisType.gauss_newton, AnalysisType.fisher)
_COUNTED_METHODS = (SpectrumMethod.lanczos, SpectrumMethod.full, SpectrumMethod.gauss_newton_exact)
_METHODS_OF_LAYERS = (SpectrumMethod.gauss_newton_exact, SpectrumMethod.lanczos)
_ALWAYS_READ = frozenset({"type", "params", "num_pairs", "token_budget", "dtype"})
_SOLVER = frozenset({"tolerance", "max_products"})
_COSTS = frozenset({"product", "memory_gib"})
_SPECTRUM = _SOLVER | _COSTS | {"which", "method", "top_k", "num_sampled", "num_probes"}
_READ_BY_TYPE: Mapping[AnalysisType, frozenset[str]] = {
    AnalysisType.hessian: _SPECTRUM | {"trace_method", "sam_rho"},
    AnalysisType.gauss_newton: _SPECTRUM | {"trace_method"},
    AnalysisType.fisher: _SPECTRUM | {"trace_method"},
    AnalysisType.density: _SPECTRUM | {"probe_steps", "sam_rho"},
    AnalysisType.layers: _SOLVER | _COSTS | {"method", "num_probes", "num_sampled"},
    AnalysisType.slices: frozenset({"directions", "num_directions", "num_points", "span", "processes"}),
    AnalysisType.surface: frozenset({"directions", "num_points", "span", "processes"}),
    AnalysisType.trajectory: frozenset({"num_points", "processes"}),
    AnalysisType.evolution: _SPECTRUM | {"trace_method"},
    AnalysisType.between: _SPECTRUM | {"trace_method", "num_points", "others"},
}
_UNREAD_BY_METHOD: Mapping[SpectrumMethod, frozenset[str]] = {
    SpectrumMethod.full: _SOLVER | {"top_k", "num_probes", "probe_steps", "trace_method"},
    SpectrumMethod.gauss_newton_exact: _SOLVER | {"num_probes", "trace_method"},
    SpectrumMethod.pyhessian: frozenset({"max_products"}),
}


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

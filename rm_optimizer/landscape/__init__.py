"""Curvature of a reward model's loss: operators, solvers, estimators. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "HessianAnalyzer": "rm_optimizer.landscape.hessian",
    "HessianSpectrum": "rm_optimizer.landscape.spectrum",
    "LayerCurvature": "rm_optimizer.landscape.layers",
    "Slice": "rm_optimizer.landscape.surface.results",
    "SpectrumComparison": "rm_optimizer.landscape.comparison",
    "SpectrumOptions": "rm_optimizer.landscape.solve",
    "Surface": "rm_optimizer.landscape.surface.results",
    "Trajectory": "rm_optimizer.landscape.surface.results",
    "compare_spectra": "rm_optimizer.landscape.comparison",
    "measure_curvature": "rm_optimizer.landscape.training_curvature",
    "summarize": "rm_optimizer.landscape.quantities",
}
__all__ = [
    "HessianAnalyzer",
    "HessianSpectrum",
    "LayerCurvature",
    "Slice",
    "SpectrumComparison",
    "SpectrumOptions",
    "Surface",
    "Trajectory",
    "compare_spectra",
    "measure_curvature",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)

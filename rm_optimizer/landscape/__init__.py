"""Curvature of a reward model's loss: operators, solvers, estimators. Public names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.compare import OptimizerComparison as OptimizerComparison
    from rm_optimizer.landscape.hessian import HessianAnalyzer as HessianAnalyzer
    from rm_optimizer.landscape.layers import LayerCurvature as LayerCurvature
    from rm_optimizer.landscape.series import SpectrumComparison as SpectrumComparison
    from rm_optimizer.landscape.series import compare_spectra as compare_spectra
    from rm_optimizer.landscape.spectrum import HessianSpectrum as HessianSpectrum
    from rm_optimizer.landscape.spectrum import summarize as summarize
    from rm_optimizer.landscape.surface.grid import Slice as Slice
    from rm_optimizer.landscape.surface.grid import Surface as Surface
    from rm_optimizer.landscape.surface.grid import Trajectory as Trajectory
    from rm_optimizer.landscape.training_curvature import measure_curvature as measure_curvature
    from rm_optimizer.schema.landscape import SpectrumOptions as SpectrumOptions

export_lazily(globals())

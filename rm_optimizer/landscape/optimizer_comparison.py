"""Address of the comparison of optimizers. Its name loads on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.compare import OptimizerComparison as OptimizerComparison

export_lazily(globals())

"""Public address of the curriculum, training dynamics and wrong labels. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.orders import CurriculumSampler as CurriculumSampler
    from rm_optimizer.data_efficiency.wrong_labels import Cartography as Cartography
    from rm_optimizer.data_efficiency.wrong_labels import suspected_labels as suspected_labels

export_lazily(globals())

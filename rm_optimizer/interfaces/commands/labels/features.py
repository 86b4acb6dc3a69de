"""Fixed features of pairs for commands that fit a linear reward: a model's last layer, or words and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.dataset import PreferenceDataset


def fixed_differences(
    pairs: PreferenceDataset, model: BradleyTerryRM | None, folder: Path | None = None
) -> Float[np.ndarray, "pairs features"]:
    """Features of the chosen responses less those of the rejected ones.

    Args:
        pairs: the pairs.
        model: model whose last layer is the features; None takes words, length and question marks.
        folder: folder for a model's features while they are computed.
    """
    from rm_optimizer.data_efficiency.acquisition.pool import read_pool
    from rm_optimizer.data_efficiency.text_features import text_differences
    from rm_optimizer.records.progress import progress

    if model is None:
        return text_differences(pairs)
    with progress("features", "pairs") as show:
        found = read_pool(pairs, model, folder=folder, on_progress=lambda done: show(done, len(pairs)))
    differences = found.require_differences("v_optimal").astype(float)
    return differences / max(float(differences.std()), 1e-12)

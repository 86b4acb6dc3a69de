"""Public address of data sets and loaders of preference pairs. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rm_optimizer.lazy import export_lazily

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.synthetic import PreferenceWorld as PreferenceWorld
    from rm_optimizer.core.rows.bad_rows import SkippedRow as SkippedRow
    from rm_optimizer.core.streaming.dataset import RayPreferenceDataset as RayPreferenceDataset
    from rm_optimizer.core.tokens.dataset import PreferenceDataset as PreferenceDataset
    from rm_optimizer.core.tokens.dataset import load_pairs as load_pairs
    from rm_optimizer.core.tokens.dataset import prompt_ids as prompt_ids
    from rm_optimizer.core.tokens.loader import create_dataloader as create_dataloader
    from rm_optimizer.core.tokens.splits import TrainVal as TrainVal
    from rm_optimizer.core.tokens.splits import load_training_data as load_training_data
    from rm_optimizer.core.tokens.splits import require_disjoint_prompts as require_disjoint_prompts
    from rm_optimizer.records.orders import PairOrder as PairOrder

export_lazily(globals())

"""Folder of an ensemble: `ensemble.json` with the members' paths and their scales on reference responses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rm_optimizer.core.pairs.pair import PreferencePair, Prompt
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import ENSEMBLE_FILE as ENSEMBLE_FILE
from rm_optimizer.rl_coupling.ensemble import EnsembleReference, RewardModelEnsemble

MOST_REFERENCES = 1000
"""Largest number of reference responses; more change the scales by less than 3 %."""


@dataclass(frozen=True)
class EnsembleRecord(JsonRecord, indent=2):
    """Contents of `ensemble.json`.

    Args:
        members: paths of the members relative to the folder, or hub ids.
        reference: scales of the members and the threshold of uncertainty.
    """

    members: tuple[str, ...]
    reference: EnsembleReference


def save_ensemble(folder: Path, members: Sequence[str], reference: EnsembleReference) -> Path:
    """Write `ensemble.json` and return its path.

    Args:
        folder: folder of the ensemble, made if it is missing.
        members: paths of the members from the current folder, or hub ids.
        reference: scales of the members.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(os.path.relpath(name, folder) if Path(name).exists() else name for name in members)
    return write_text(folder / ENSEMBLE_FILE, EnsembleRecord(paths, reference).to_json() + "\n")


def load_ensemble(folder: Path, **options: Any) -> RewardModelEnsemble:
    """Load the ensemble of a folder; its members are loaded when they first score.

    Args:
        folder: folder with an `ensemble.json`.
        options: keywords of `RewardModelEnsemble`, such as `aggregation`; the reference comes from the folder.

    Raises:
        CheckpointError: if there is no ensemble in the folder, or its file is damaged.
        ConfigError: if an option is out of its range.
    """
    try:
        record = EnsembleRecord.from_json((folder / ENSEMBLE_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} holds no {ENSEMBLE_FILE}; make an ensemble with rm-opt ensemble join MODEL MODEL … --output DIR"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / ENSEMBLE_FILE} is damaged; make the ensemble again") from error
    paths = [str(folder / name) if (folder / name).exists() else name for name in record.members]
    return RewardModelEnsemble(paths, reference=record.reference, **options)


def reference_responses(pairs: Sequence[PreferencePair], seed: int) -> tuple[list[Prompt], list[str]]:
    """Prompts and responses for `fit_reference`: for each different prompt, the response of a random side.

    Args:
        pairs: pairs, preferably ones that no member was trained on.
        seed: seed of the draw, not negative.
    """
    of_prompt: dict[str, PreferencePair] = {}
    for pair in pairs:
        of_prompt.setdefault(pair.prompt_id, pair)
    drawn = np.random.default_rng([seed, 11])
    kept = list(of_prompt.values())
    kept = [kept[index] for index in np.sort(drawn.permutation(len(kept))[:MOST_REFERENCES])]
    sides = drawn.random(len(kept)) < 0.5
    texts = [pair.chosen if first else pair.rejected for pair, first in zip(kept, sides, strict=True)]
    return [pair.prompt for pair in kept], texts

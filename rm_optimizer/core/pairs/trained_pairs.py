"""Fingerprints of the pairs that a model was trained on, kept with it, so that an evaluation can say which it has seen.

Texts are compared without regard to case and blanks, and a pair without regard to its order.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.conversations import folded_prompt_id, folded_words
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.files import replacing
from rm_optimizer.records.locations import BEST_FOLDER

TRAINED_PAIRS_FILE = "trained_pairs.npz"
"""In a run folder and in its exported model: the fingerprints of the training pairs."""


def pair_fingerprints(pairs: Iterable[PreferencePair]) -> NDArray[np.uint64]:
    """Fingerprint of each pair and of its prompt, shape (pairs, 2)."""
    rows = []
    for pair in pairs:
        prompt = folded_prompt_id(pair.prompt)
        responses = sorted([folded_words(pair.chosen), folded_words(pair.rejected)])
        rows.append((int(digest([prompt, responses]), 16), int(prompt, 16)))
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


@dataclass(frozen=True)
class TrainedOn:
    """Overlap of an evaluation's data with a model's training data.

    Args:
        num_pairs: pairs evaluated that training read, in either order.
        num_pairs_of_prompts: pairs evaluated whose prompt training read; those of `num_pairs` are among them.
        num_prompts: different prompts of these.
    """

    num_pairs: int
    num_pairs_of_prompts: int
    num_prompts: int


@dataclass(frozen=True, eq=False)
class TrainedPairs:
    """Fingerprints of a model's training pairs.

    Args:
        pairs: fingerprints of the pairs, sorted, each once.
        prompts: fingerprints of their prompts, likewise.
    """

    pairs: NDArray[np.uint64]
    prompts: NDArray[np.uint64]

    @classmethod
    def of(cls, *parts: NDArray[np.uint64]) -> TrainedPairs:
        """Fingerprints from the arrays of `pair_fingerprints`."""
        both = np.concatenate([np.zeros((0, 2), dtype=np.uint64), *parts])
        return cls(np.unique(both[:, 0]), np.unique(both[:, 1]))

    def merged(self, other: TrainedPairs) -> TrainedPairs:
        """Union of both."""
        return TrainedPairs(np.union1d(self.pairs, other.pairs), np.union1d(self.prompts, other.prompts))

    def count(self, pairs: Sequence[PreferencePair]) -> TrainedOn:
        """Numbers of these pairs and of their prompts among the training data."""
        marks = pair_fingerprints(pairs)
        seen_prompt = np.isin(marks[:, 1], self.prompts)
        return TrainedOn(
            num_pairs=int(np.isin(marks[:, 0], self.pairs).sum()),
            num_pairs_of_prompts=int(seen_prompt.sum()),
            num_prompts=len(np.unique(marks[seen_prompt, 1])),
        )

    def write(self, path: Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, pairs=self.pairs, prompts=self.prompts)
        return path

    @classmethod
    def read(cls, path: Path) -> TrainedPairs:
        """Read the file of `write`.

        Raises:
            CheckpointError: if the file is torn.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(arrays["pairs"], arrays["prompts"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is torn, so it is unknown what the model was trained on; remove it to evaluate without"
            ) from error

    @classmethod
    def recorded(cls, source: str | Path) -> TrainedPairs | None:
        """Recorded training pairs of a model, beside it or in its run folder; None without a record.

        Args:
            source: anything `BradleyTerryRM.from_pretrained` loads.

        Raises:
            CheckpointError: if the record is torn.
        """
        given = Path(source).expanduser()
        if not given.exists():
            return None  # a hub id
        starts = (given.absolute(), given.resolve())
        places = [folder for path in starts for folder in (path, path / BEST_FOLDER, *path.parents[:2])]
        files = (folder / TRAINED_PAIRS_FILE for folder in places)
        return next((cls.read(file) for file in files if file.is_file()), None)

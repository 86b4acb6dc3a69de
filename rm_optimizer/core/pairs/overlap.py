"""Overlap of data: prompts of one conversation, and pairs that a model was trained on."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.rows.messages import Prompt
from rm_optimizer.core.rows.prompts import as_messages
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.files import replacing
from rm_optimizer.records.locations import BEST_FOLDER


def _line_keys(prompt: Prompt) -> list[int]:
    """A key for the prompt up to and with each of its lines that has words; the last stands for the whole prompt."""
    key, keys = b"", list[int]()
    for message in as_messages(prompt):
        words_so_far = blake2b(key + f"{message.role}\n".encode("utf-8", "surrogatepass"), digest_size=8)
        for line in message.content.splitlines():
            if words := folded_words(line):
                words_so_far.update("".join(f"{word} " for word in words).encode("utf-8", "surrogatepass"))
                key = words_so_far.digest()
                keys.append(int.from_bytes(key))
    return keys


def prompt_keys(prompts: Iterable[Prompt]) -> list[int]:
    """A key of each prompt, equal where its `folded_prompt_id` is."""
    return [(_line_keys(prompt) or [0])[-1] for prompt in prompts]


def folded_prompt_id(prompt: Prompt) -> str:
    r"""Identity of a prompt that ignores case, blanks, line breaks and messages without words; 16 hexadecimal digits.

    Example:
        >>> folded_prompt_id("Why\n so?\n") == folded_prompt_id("why so?")
        True
    """
    folded = [(message.role, folded_words(message.content)) for message in as_messages(prompt)]
    return digest([message for message in folded if message[1]])


def folded_words(text: str) -> list[str]:
    """Words of a text without regard to case."""
    return text.casefold().split()


def conversation_groups(prompts: Sequence[Prompt]) -> list[int]:
    r"""Number of the conversation that each prompt belongs to: the index of the first prompt of it.

    Example:
        >>> conversation_groups(["Hi", "Bye", "hi ", "Hi\nHow are you?"])
        [0, 1, 0, 0]
    """
    parent: dict[int, int] = {}
    first: dict[int, int] = {}

    def root(key: int) -> int:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    keys = prompt_keys(prompts)
    for index, key in enumerate(keys):
        parent.setdefault(key, key)
        first.setdefault(key, index)
    for prompt, key in zip(prompts, keys, strict=True):
        for prefix in _line_keys(prompt):
            if prefix in parent:
                earlier, later = sorted((root(prefix), root(key)), key=lambda found: first[found])
                parent[later] = earlier
    return [first[root(key)] for key in keys]


def continued(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[bool]:
    r"""Flags of `second`, True if a prompt continues or is continued by one of `first`; equal ones do not count.

    Example:
        >>> continued(["Hi\nHow are you?", "Bye"], ["Hi", "Bye", "bye\nnow"])
        [True, False, True]
    """
    keys, others = prompt_keys(second), frozenset(prompt_keys(first))
    wanted = frozenset(keys)
    begun = {prefix for prompt in first for prefix in _line_keys(prompt)[:-1] if prefix in wanted}
    return [
        key in begun or any(prefix in others for prefix in _line_keys(prompt)[:-1])
        for key, prompt in zip(keys, second, strict=True)
    ]


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
            CheckpointError: if the file is damaged.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(arrays["pairs"], arrays["prompts"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            told = "so it is unknown what the model was trained on; remove it to evaluate without"
            raise CheckpointError(f"{path} is damaged, {told}") from error

    @classmethod
    def recorded(cls, source: str | Path) -> TrainedPairs | None:
        """Recorded training pairs of a model, beside it or in its run folder; None without a record.

        Args:
            source: anything `BradleyTerryRM.from_pretrained` loads.

        Raises:
            CheckpointError: if the record is damaged.
        """
        given = Path(source).expanduser()
        if not given.exists():
            return None  # a hub id
        starts = (given.absolute(), given.resolve())
        places = [folder for path in starts for folder in (path, path / BEST_FOLDER, *path.parents[:2])]
        files = (folder / TRAINED_PAIRS_FILE for folder in places)
        return next((cls.read(file) for file in files if file.is_file()), None)

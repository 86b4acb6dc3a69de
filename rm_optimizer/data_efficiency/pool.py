"""Pools of unlabeled pairs: margins and features by a model or an ensemble, computed once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.model.features import scored_features
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, digest
from rm_optimizer.core.rows.natural import table_rows
from rm_optimizer.core.streaming.workers import map_chunks
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.ledger import open_ledger
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble

BLOCK_PAIRS = 2048
"""Pairs computed between two saves, which is the most that a kill loses."""


@dataclass(frozen=True)
class Pool:
    """Pairs to choose from and labeled pairs, as input of acquisition functions.

    The order of a pair's responses has no meaning. Exchanging them changes the signs of margins and differences, but
    not the choice.

    Args:
        margins: reward of the first response less the reward of the second, by each member.
        lengths: length of the first response in characters less the second's.
        is_labeled: True for pairs whose label is known; they are not chosen, but count as information.
        differences: features (by `features`) of the first response less the second's; None without features.
        pairs: the pairs, for rules that read their texts.
        model: the model that scored them.

    Raises:
        ValueError: if the arrays have different numbers of pairs.
        DataError: if a margin or a feature is not finite.
    """

    margins: Float[np.ndarray, "members pairs"]
    lengths: Float[np.ndarray, " pairs"]
    is_labeled: Bool[np.ndarray, " pairs"]
    differences: Float[np.ndarray, "pairs hidden"] | None = None
    pairs: Sequence[PreferencePair] = ()
    model: BradleyTerryRM | RewardModelEnsemble | None = None

    def __post_init__(self) -> None:
        counts = {self.margins.shape[1], len(self.lengths), len(self.is_labeled)}
        counts |= set() if self.differences is None else {len(self.differences)}
        if len(counts) > 1:
            raise ValueError(f"expected arrays of one number of pairs, got {sorted(counts)}")
        for name, rows in (("margin", self.margins.T), ("feature", self.differences)):
            for start, block in blocks(rows if rows is not None else np.zeros((0, 0))):
                if len(broken := np.flatnonzero(~np.isfinite(block).all(axis=1))):
                    raise DataError(
                        f"pair {start + broken[0] + 1} of the pool has a {name} that is not finite: the model's "
                        "weights are broken, or overflow; give another model"
                    )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def unlabeled(self) -> NDArray[np.int64]:
        """Positions of the pairs that may be chosen, ascending."""
        return np.flatnonzero(~self.is_labeled)

    def require_differences(self, rule: str) -> Float[np.ndarray, "pairs hidden"]:
        """Differences of features.

        Raises:
            ConfigError: if the pool has none.
        """
        if self.differences is None:
            raise ConfigError(
                f"rule '{rule}' compares features of the last layer, which an ensemble or a server does not give; name "
                "one saved model, or a rule that reads margins: uncertainty, bald"
            )
        return self.differences

    def require_members(self, rule: str, reason: str) -> None:
        """Refuse the margins of one model for a rule that compares several.

        Raises:
            ConfigError: with the reason, such as "one model has no variance over members".
        """
        if len(self.margins) < 2:
            raise ConfigError(
                f"rule '{rule}' needs an ensemble, since {reason}; give several models, or take rule 'boundary_optimal'"
            )


def blocks(rows: np.ndarray, size: int = 16_384) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of rows with the position of the first row, so that a memory-mapped array is read in pieces."""
    for start in range(0, len(rows), size):
        yield start, rows[start : start + size]


def unlabeled_pairs(pool: object) -> PreferenceDataset:
    """Pairs of a pool: pairs, questions, or rows with `prompt`, `response_a` and `response_b`.

    Raises:
        TypeError: if it is not a collection of pairs or rows.
        DataError: if a row is not a pair.
    """
    if isinstance(pool, PreferenceDataset):
        return pool
    found: list[Any] = []
    for row in table_rows("pool", pool):
        if isinstance(row, Mapping) and {"response_a", "response_b"} <= row.keys():
            row = {"prompt": row.get("prompt"), "chosen": row["response_a"], "rejected": row["response_b"]}
        elif hasattr(row, "response_a"):
            row = PreferencePair(row.prompt, row.response_a, row.response_b, label=0.5)
        found.append(row)
    return PreferenceDataset(found)


def read_pool(
    pairs: Sequence[PreferencePair],
    model: BradleyTerryRM | RewardModelEnsemble | None,
    *,
    is_labeled: Bool[np.ndarray, " pairs"] | None = None,
    folder: Path | None = None,
    token_budget: int = 16384,
    on_progress: Callable[[int], None] = lambda pairs: None,
    ray_workers: int = 0,
) -> Pool:
    """Score the pairs, and compute their features if the scorer is a single model in this process.

    Args:
        pairs: the pairs; their labels are not read.
        model: a reward model, or an ensemble of them; None sets all margins to 0, for rules that read no model.
        is_labeled: True for pairs whose label is known; None for none.
        folder: folder for computed values, which are memory-mapped; repeating a stopped call continues from them. None
            keeps the values in memory.
        token_budget: most tokens in one forward pass, padding included.
        on_progress: called with the pairs done so far.
        ray_workers: workers of a Ray cluster that compute the features in blocks; 0 computes them in this process.

    Raises:
        MissingExtra: if there are Ray workers and Ray is not installed.
        DataError: if there are no pairs, or the folder holds another pool or a damaged file.
        CheckpointError: if a reward is not finite.
    """
    if not pairs:
        raise DataError("a pool needs at least one pair, got none")
    lengths = np.array([len(pair.chosen) - len(pair.rejected) for pair in pairs], dtype=float)
    known = np.zeros(len(pairs), dtype=bool) if is_labeled is None else is_labeled
    if model is None:
        return Pool(np.zeros((1, len(pairs))), lengths, known, pairs=pairs)
    if isinstance(model, RewardModelEnsemble):
        predictions = model.predict_margins(*_sides(pairs))
        margins = np.array([found.individual_margins for found in predictions]).T
        on_progress(len(pairs))
        return Pool(margins, lengths, known, None, pairs, model)
    require_bradley_terry(model)
    shape = (len(pairs), model.reward_head.in_features)

    def computed(kept: Float[np.ndarray, "pairs hidden"], start: int) -> Iterator[Float[np.ndarray, " block"]]:
        """Margins of the pairs from `start` on, block by block.

        Their differences are written into `kept`.
        """
        on_progress(start)
        firsts = range(start, len(pairs), BLOCK_PAIRS)
        tasks = [(pairs[first : first + BLOCK_PAIRS], first, token_budget) for first in firsts]
        blocks = map_chunks(_scored_block, model, tasks, ray_workers or None)
        for first, (block, margins) in zip(firsts, blocks, strict=True):
            kept[first : first + len(block)] = block
            yield margins
            on_progress(first + len(block))

    if folder is None:
        kept = np.zeros(shape, dtype=np.float32)
        return Pool(np.concatenate([*computed(kept, 0)])[None], lengths, known, kept, pairs, model)
    folder.mkdir(parents=True, exist_ok=True)
    identity = digest([scorer_digest(model), [pair.pair_id for pair in pairs]])
    other, remedy = "features of other pairs or another model", f"name another folder, or remove {folder}"
    with open_ledger(folder / "margins.jsonl", identity, other=other, remedy=remedy) as ledger:
        done = [margin for block in ledger.values() for margin in block]
        path = folder / "differences.npy"
        mapped = _mapped(path, shape, is_new=not done)
        for block in computed(mapped, len(done)):
            mapped.flush()
            ledger.append(block.tolist())
            done.extend(block.tolist())
    return Pool(np.array(done)[None], lengths, known, np.load(path, mmap_mode="r"), pairs, model)


def _sides(pairs: Sequence[PreferencePair]) -> tuple[list[Prompt], list[str], list[str]]:
    return [pair.prompt for pair in pairs], [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]


def _mapped(path: Path, shape: tuple[int, int], *, is_new: bool) -> np.memmap[Any, Any]:
    """Differences of features in a file, to be read and written.

    Raises:
        DataError: if an earlier file is missing, truncated or damaged.
    """
    if is_new:
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    try:
        kept = np.load(path, mmap_mode="r")  # unlike "r+", does not lengthen a truncated file
        if kept.shape == shape and kept.dtype == np.dtype(np.float32):
            return np.lib.format.open_memmap(path, mode="r+")
        reason = f"has shape {kept.shape} and kind {kept.dtype}"
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
    raise DataError(f"{path}: is gone or damaged ({reason}); remove {path.parent}, and its features are computed again")


def _scored_block(
    model: BradleyTerryRM, task: tuple[Sequence[PreferencePair], int, int]
) -> tuple[Float[np.ndarray, "block hidden"], Float[np.ndarray, " block"]]:
    """Feature differences and margins of pairs that begin at some position of a pool, within a token budget."""
    pairs, first, token_budget = task
    prompts, ones, others = _sides(pairs)
    encodings = model.encode([*prompts, *prompts], [*ones, *others])
    vectors = np.zeros((len(encodings), model.reward_head.in_features))
    rewards = scored_features(model, [one.ids for one in encodings], vectors, token_budget=token_budget)
    require_finite(rewards.tolist(), lambda index: f"pair {first + index % len(pairs) + 1} of the pool")
    num = len(pairs)
    return vectors[:num] - vectors[num:], rewards[:num] - rewards[num:]

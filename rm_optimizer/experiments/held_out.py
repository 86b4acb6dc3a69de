"""Random subsets of the pairs of a study: training pairs, pairs that runs may watch, and pairs that judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Int

from rm_optimizer.records.files import replacing


@dataclass(frozen=True)
class Splits:
    """Files of the drawn pairs.

    Args:
        train: pairs that every arm trains on.
        select: pairs that early stopping watches.
        test: pairs that every figure is computed on; none has a prompt of `select`.
    """

    train: Path
    select: Path
    test: Path


def draw_splits(
    folder: Path,
    train: str,
    val: str,
    *,
    num_train: int,
    num_select: int,
    num_test: int,
    pairs_per_prompt: int,
    seed: int,
) -> Splits:
    """Write random subsets of two Parquet files with a prompt column, unless they are there already.

    Args:
        folder: folder of the subsets.
        train: training pairs.
        val: validation pairs.
        num_train: most training pairs.
        num_select: most validation pairs that early stopping watches.
        num_test: most validation pairs that figures are computed on.
        pairs_per_prompt: most validation pairs of one prompt.
        seed: seed of the draw.
    """
    splits = Splits(*(folder / f"{name}.parquet" for name in ("train", "select", "test")))
    if splits.test.is_file():  # written last
        return splits
    rng = np.random.default_rng(seed)
    tables = pq.read_table(train), pq.read_table(val)
    chosen = np.sort(rng.permutation(len(tables[0]))[:num_train])
    select, test = divided(tables[1]["prompt"].to_pylist(), pairs_per_prompt, (num_select, num_test), rng)
    for path, table, rows in (
        (splits.train, tables[0], chosen),
        (splits.select, tables[1], select),
        (splits.test, tables[1], test),
    ):
        with replacing(path) as temporary:
            pq.write_table(table.take(rows), temporary)
    return splits


def divided(
    prompts: Sequence[str], pairs_per_prompt: int, sizes: tuple[int, int], rng: np.random.Generator
) -> tuple[Int[np.ndarray, " first"], Int[np.ndarray, " second"]]:
    """Rows of two random parts without a common prompt, with at most `pairs_per_prompt` rows of each prompt.

    Rows are taken in one random order until a part is full, so a prompt of very many rows usually gets all it may.

    Args:
        prompts: prompt of each row.
        pairs_per_prompt: most rows of one prompt.
        sizes: most rows of the two parts; prompts are shared out in that proportion.
        rng: source of randomness.
    """
    seen: dict[str, int] = {}
    rows: list[int] = []
    for row in rng.permutation(len(prompts)).tolist():
        seen[prompts[row]] = seen.get(prompts[row], 0) + 1
        if seen[prompts[row]] <= pairs_per_prompt:
            rows.append(row)
    names = [str(name) for name in rng.permutation(sorted(seen))]
    first = set(names[: round(len(names) * sizes[0] / sum(sizes))])
    parts = [row for row in rows if prompts[row] in first], [row for row in rows if prompts[row] not in first]
    return np.sort(parts[0][: sizes[0]]), np.sort(parts[1][: sizes[1]])

"""Study of training without suspected labels: `python studies/cleaning.py FOLDER [--data PAIRS …]`.

Training labels are flipped on purpose, searched for as `rm-opt data clean` does, and left out of training. Test labels
are not flipped. A split with a result is only read, so a stopped command can be repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from labels import PairPool, SyntheticPool, add_pool_arguments, chosen_pools, points, stored, synthetic_split, tested
from scipy.stats import mannwhitneyu

from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.data_efficiency.margin_analysis import (
    fit_linear_reward,
    held_out_chances,
    held_out_margins,
    suspected_labels,
)
from rm_optimizer.errors import ConfigError, DataError, RMOptimizerError
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.orders import random_positions
from rm_optimizer.reporting.tables import cell_text, new_table, output_console

POOLS = tuple(
    PairPool(name, {"pool": name, "margin_std": std}, partial(synthetic_split, SyntheticPool.iid, margin_std=std))
    for name, std in (("decided", 40.0), ("noisy", 2.0))
)
"""Pools of Gaussian features with a linear oracle. In `decided` labels have no noise; in `noisy` a fifth is wrong."""
LEGEND = (
    "AUROC: flipped labels told from others by held-out probability; estimate: estimated share of flipped labels; "
    "out: share of the pairs taken out; wrong: share of these that were flipped; gain: points of test accuracy "
    "without them; at random: the same without as many random pairs; exact: the same without the flipped labels and no "
    "others, which is the most that finding them could gain"
)


def with_flips(
    label: Float[np.ndarray, " pairs"], share: float, seed: int
) -> tuple[Float[np.ndarray, " pairs"], Bool[np.ndarray, " pairs"]]:
    """Labels with an exact random share flipped, and a mask of the flipped ones."""
    is_wrong = np.zeros(len(label), dtype=bool)
    is_wrong[random_positions(len(label), round(share * len(label)), [seed, 4])] = True
    return np.where(is_wrong, 1 - label, label), is_wrong


def measure_split(pool: PairPool, num: int, flips: float, rate: float, seed: int) -> dict[str, float | None]:
    """Suspected labels of one split, and the test accuracy with and without them.

    Each model has the penalty with its lowest held-out NLL.

    Args:
        pool: the pool.
        num: number of training pairs.
        flips: share of their labels to flip.
        rate: largest share of right labels to remove.
        seed: seed of the split.

    Returns:
        `auroc` of the held-out probability as a detector of flipped labels, the `estimated` share of them, the share of
        pairs `suspected` and removed, the share of flipped ones among these (`precision`), test `accuracy` after
        training on all pairs, and what is gained without the suspects, without as many random pairs (`fewer_gain`), and
        without exactly the flipped labels (`exact_gain`). None where it is not defined.
    """
    split = pool.split(seed)
    drawn = random_positions(len(split.labels), num, [seed, 6])
    differences, groups = split.differences[drawn], split.groups[drawn]
    label, is_wrong = with_flips(split.labels[drawn], flips, seed)
    chances = held_out_chances(differences, label, groups, seed=seed).confidence
    found = suspected_labels(chances, false_positive_rate=rate)
    suspects = np.isin(np.arange(num), found.positions)
    fewer = np.isin(np.arange(num), random_positions(num, int(suspects.sum()), [seed, 7]))

    def accuracy(kept: np.ndarray) -> float:
        parts = differences[kept], label[kept], groups[kept]
        _, ridge = held_out_margins(*parts, num_folds=5, seed=[seed, 8])
        scale = np.maximum(np.sqrt((parts[0] ** 2).mean(axis=0)), 1e-12)
        weights = fit_linear_reward(parts[0] / scale, parts[1], ridge=ridge)
        return tested(weights, split.test_differences / scale, split.test_chances)[0]

    whole = accuracy(np.ones(num, dtype=bool))
    taken_out = {"gain": suspects, "fewer_gain": fewer, "exact_gain": is_wrong}
    auroc = None
    if 0 < is_wrong.sum() < num:
        larger = mannwhitneyu(-chances[is_wrong], -chances[~is_wrong]).statistic
        auroc = float(larger / (is_wrong.sum() * (~is_wrong).sum()))
    return {
        "auroc": auroc,
        "estimated": found.flipped_share,
        "suspected": float(suspects.mean()),
        "precision": float(is_wrong[suspects].mean()) if is_wrong.any() and suspects.any() else None,
        "accuracy": whole,
        **{name: accuracy(~out) - whole if out.any() else 0.0 for name, out in taken_out.items()},
    }


def cleaning_rows(
    folder: Path, pool: PairPool, shares: Sequence[float], *, splits: int, pairs: int, rate: float
) -> Iterator[dict[str, Any]]:
    """Means over the splits of a pool, which are read from the folder or measured, for each share of flips.

    Raises:
        ConfigError: if a share or the rate is out of its range.
        DataError: if the pool is too small.
    """
    if bad := [share for share in shares if not 0 <= share < 0.5]:
        raise ConfigError(f"--flips must lie in [0, 0.5), got {bad[0]:g}")
    if not 0 < rate < 1:
        raise ConfigError(f"--false-positive-rate must lie in (0, 1), got {rate:g}")
    if splits < 2:
        raise ConfigError(f"--splits must be at least 2, got {splits}")
    if (most := len(pool.split(0).labels)) < pairs:
        raise DataError(f"a split of '{pool.name}' has {most:,} training pairs, fewer than --pairs {pairs}; lower it")
    for share in dict.fromkeys(shares):
        trials: list[dict[str, Any]] = []
        for seed in range(splits):
            identity = {**pool.identity, "pairs": pairs, "flips": share, "false_positive_rate": rate, "split": seed}
            trials.append(stored(folder, identity, partial(measure_split, pool, pairs, share, rate, seed)))
        columns = {name: np.array([one[name] for one in trials if one[name] is not None]) for name in trials[0]}
        means = {name: student_mean(column) if len(column) > 1 else None for name, column in columns.items()}
        yield {"pool": pool.name, "flips": share, "num_pairs": pairs, "num_splits": splits, **means}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each pool and share of flips. Gains are in points of accuracy."""
    table = new_table(
        "Training without suspected labels, by splits",
        *("pool", "splits x pairs", "flips", "AUROC", "estimate", "out", "wrong", "gain", "at random", "exact"),
    )
    for row in rows:
        auroc, precision = row["auroc"], row["precision"]
        table.add_row(
            row["pool"],
            f"{row['num_splits']} x {row['num_pairs']:,}",
            f"{row['flips']:.0%}",
            "" if auroc is None else cell_text(auroc),
            *(f"{row[name].value:.1%}" for name in ("estimated", "suspected")),
            "" if precision is None else f"{precision.value:.0%}",
            *(points(row[name]) for name in ("gain", "fewer_gain", "exact_gain")),
        )
    console = output_console()
    console.print(table)
    console.print(LEGEND, soft_wrap=True)


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pool_arguments(parser)
    parser.add_argument("--splits", type=int, default=40, help="random splits into training and test pairs")
    parser.add_argument("--pairs", type=int, default=1000, help="training pairs in each split")
    parser.add_argument("--flips", type=float, action="append", help="share of labels to flip; default: 0 and 0.2")
    parser.add_argument("--false-positive-rate", type=float, default=0.05, help="share of right labels to remove")
    given = parser.parse_args()
    sizes = {"splits": given.splits, "pairs": given.pairs, "rate": given.false_positive_rate}
    try:
        pools = chosen_pools(given, POOLS)
        rows = [row for pool in pools for row in cleaning_rows(given.folder, pool, given.flips or [0.0, 0.2], **sizes)]
    except RMOptimizerError as error:
        parser.error(str(error))
    write_text(given.folder / "cleaning.json", json.dumps(json_values(rows), indent=1) + "\n")
    show(rows)
    print(f"numbers: {given.folder / 'cleaning.json'}")


if __name__ == "__main__":
    main()

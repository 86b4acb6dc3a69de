"""Section of a run's page on the ensemble that the run is a member of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from rm_optimizer.errors import DataError
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.document import Block, Listing
from rm_optimizer.reporting.tables import TextTable
from rm_optimizer.rl_coupling.ensemble_folder import ENSEMBLE_FILE, EnsembleRecord
from rm_optimizer.training.folder.record import RunResult


def ensemble_section(run_dir: Path, missing: list[str]) -> tuple[Block, ...]:
    """Members, scales and agreement of the run's ensemble; empty if the run belongs to none.

    An ensemble is searched for in the run folder, its `ensemble/` and its parent folder.

    Args:
        run_dir: the run folder.
        missing: gains a sentence if the ensemble's file is damaged.
    """
    for folder in (run_dir, run_dir / "ensemble", run_dir.parent):
        try:
            record = EnsembleRecord.from_json((folder / ENSEMBLE_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError, AttributeError):
            missing.append(f"ensemble: {ENSEMBLE_FILE} is damaged")
            continue
        runs = [RunFolder.of(str(folder / member)) for member in record.members]
        if any(run is not None and run.path.resolve() == run_dir.resolve() for run in runs):
            return _section(run_dir, record, runs)
    return ()


def _section(run_dir: Path, record: EnsembleRecord, runs: Sequence[RunFolder | None]) -> tuple[Block, ...]:
    reference = record.reference
    rows = []
    for member, run, mean, std in zip(record.members, runs, reference.means, reference.stds, strict=True):
        is_own = run is not None and run.path.resolve() == run_dir.resolve()
        result = None if run is None else RunResult.read(run.path)
        accuracy = "n/a" if result is None else str(result.metrics.accuracy)
        rows.append(("this run" if is_own else member, accuracy, f"{mean:.3f}", f"{std:.3f}"))
    caption = (
        f"Members; mean and standard deviation of their rewards on {reference.num_responses:,} reference responses"
    )
    head = ("member", "accuracy [95 %]", "mean reward", "standard deviation")
    threshold = (
        f"A response is uncertain where its standardized rewards spread by more than {reference.threshold:.3f}: at "
        f"most {reference.false_positive_rate:.0%} of responses like the reference ones."
    )
    return Listing("ensemble", TextTable(caption, head, tuple(rows))), threshold, tuple(_agreement(runs))


def _agreement(runs: Sequence[RunFolder | None]) -> Iterator[str]:
    """Sentences on validation pairs that all members order alike and on the others; none if members' pairs differ."""
    margins = _margins(runs)
    if margins is None:
        return
    agreed = np.abs(np.sign(margins).sum(0)) == len(margins)
    num_agreed, num_pairs = int(agreed.sum()), agreed.size
    yield f"All {len(margins)} members order {num_agreed:,} of the {num_pairs:,} validation pairs alike."
    if num_agreed:
        yield f"They are right on {int((margins[0, agreed] > 0).sum()):,} of these."
    if num_agreed < num_pairs:
        right = (margins[:, ~agreed] > 0).sum(1).mean()
        yield f"On the other {num_pairs - num_agreed:,} pairs a member is right on {right:,.1f}, averaged over members."


def _margins(runs: Sequence[RunFolder | None]) -> Float[np.ndarray, "members pairs"] | None:
    """Reward of the better response less the other's; None unless all members have the same pairs."""
    try:
        rewards = [[] if run is None else run.pair_rewards() for run in runs]
    except DataError:
        return None
    same = {tuple((row.pair_id, row.label) for row in rows) for rows in rewards}
    if len(same) != 1 or not rewards[0]:
        return None
    sides = np.sign(np.array([row.label for row in rewards[0]]) - 0.5)
    margins = np.array([[row.chosen - row.rejected for row in rows] for rows in rewards]) * sides
    return margins[:, sides != 0] if (sides != 0).any() else None

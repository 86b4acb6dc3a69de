"""Pages of studies about labels: labels that rules save, and training without suspected labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rm_optimizer.data_efficiency.cleaning.cleaning_study import CleaningRow
from rm_optimizer.data_efficiency.savings.label_savings import LabelSavings
from rm_optimizer.data_efficiency.savings.label_study import PLACEBO, curves
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.reporting.label_studies.cleaning import CLEANING_FILE, CLEANING_LEGEND, cleaning_table, gain_text
from rm_optimizer.reporting.label_studies.label_savings import (
    SAVINGS_FILE,
    placebo_warning,
    plot_learning_curves,
    plot_savings,
    rows_of_pool,
    savings_table,
)
from rm_optimizer.reporting.pages.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.pages.study_trials import TrialRows, stored_records, trials_part

ENOUGH_SPLITS = 100
"""Number of splits from which the placebo's saving is near 0 in most pools."""


def savings_document(folder: Path) -> Document:
    """The page of a study of saved labels.

    Args:
        folder: folder of the study.

    Raises:
        ConfigError: if the study has no result yet, or it is damaged.
    """
    found = stored_records(folder / SAVINGS_FILE, LabelSavings, f"rm-opt study labels {folder}")
    study = Study(folder)
    rows = list(study.rows())
    parts = [_pool(number, pool, rows) for number, pool in enumerate(found)]
    return Document("Labels saved by choosing pairs", saved_answer(found), [*parts, trials_part(study.plan, rows)])


def _pool(number: int, pool: LabelSavings, rows: TrialRows) -> Part:
    own = rows_of_pool(rows, pool)
    drawings = [Drawing(f"savings_{number}", plot_savings(pool), f"Labels saved by each rule: {pool.pool}")]
    if own:
        learning = plot_learning_curves(pool, *curves(own, "accuracy"))
        drawings.append(Drawing(f"curves_{number}", learning, f"Test accuracy by labels: {pool.pool}"))
    warning = "" if pool.is_accepted else f"Not accepted: {placebo_warning(pool)}."
    return Part(f"Pool {pool.pool}", (warning, *drawings, Listing(f"rules_{number}", savings_table(pool))))


def saved_answer(found: Sequence[LabelSavings]) -> Answer:
    """The best rule of each pool; it saves labels if its interval lies above 0 and the placebo's contains 0."""
    said, num_saving = [], 0
    for pool in (pool for pool in found if pool.is_accepted):
        best = next(rule for rule in pool.rules if rule.rule != PLACEBO)
        saves = best.saving.low is not None and best.saving.low > 0
        num_saving += saves
        verdict = "saves labels" if saves else "is not shown to save labels"
        said.append(f"in '{pool.pool}' {best.rule} {verdict}: {best.saving:.0%} of {pool.budget:,}")
    refuted = [f"'{pool.pool}'" for pool in found if not pool.is_accepted]
    if refuted:
        said.append(f"the placebo refutes what is measured in {', '.join(refuted)}")
    said.append("the interval of the best of several rules is somewhat too narrow, since it was picked")
    fewest = min(pool.num_splits for pool in found)
    if fewest < ENOUGH_SPLITS:
        said.append(f"{fewest} splits are few: below {ENOUGH_SPLITS}, other splits may turn the order around")
    if not num_saving:
        return Answer("bad", "No saving is shown", tuple(said))
    where = "" if num_saving == len(found) else f" in {num_saving} of {len(found)} pools"
    return Answer(
        "fair" if where or fewest < ENOUGH_SPLITS else "good", f"Choosing pairs saves labels{where}", tuple(said)
    )


def cleaning_document(folder: Path) -> Document:
    """The page of a study of training without suspected labels.

    Args:
        folder: folder of the study.

    Raises:
        ConfigError: if the study has no result yet, or it is damaged.
    """
    found = stored_records(folder / CLEANING_FILE, CleaningRow, f"rm-opt study cleaning {folder}")
    study = Study(folder)
    result = Part("Result", (Listing("cleaning", cleaning_table(found)), f"{CLEANING_LEGEND}."))
    trials = trials_part(study.plan, list(study.rows()))
    return Document("Training without suspected labels", _cleaned(found), [result, trials])


def _cleaned(found: Sequence[CleaningRow]) -> Answer:
    """Verdict by the interval of each pool's gain; a pool without flipped labels cannot gain and must not lose."""
    words = {1: "gains", 0: "is not shown to gain or lose", -1: "loses"}
    signs = [_sign(row) for row in found]
    said = [
        f"with {row.flips:.0%} of the labels turned, '{row.pool}' {words[sign]}: {gain_text(row.gain)} points of test "
        "accuracy"
        for row, sign in zip(found, signs, strict=True)
    ]
    turned = [sign for row, sign in zip(found, signs, strict=True) if row.flips > 0]
    if -1 in signs:
        return Answer("bad", "Training without suspects costs accuracy", tuple(said))
    if 1 not in signs:
        return Answer("open", "No gain is shown", tuple(said))
    if min(turned, default=0) < 1:
        return Answer("fair", f"Training without suspects helps in {signs.count(1)} of {len(found)} rows", tuple(said))
    return Answer("good", "Training without suspects helps", tuple(said))


def _sign(row: CleaningRow) -> int:
    """1 or -1 for a gain whose interval lies above or below 0, else 0."""
    low, high = row.gain.low, row.gain.high
    return 0 if low is None or high is None else int(low > 0) - int(high < 0)

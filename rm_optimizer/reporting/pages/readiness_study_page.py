"""The page of a validation of the readiness score, with the test's result first, or a note that there was no test."""

from __future__ import annotations

from pathlib import Path

from rm_optimizer.experiments.readiness.predictors import FrozenChoice
from rm_optimizer.experiments.readiness.study import FROZEN_FILE, VALIDATION_FILE, WORDING
from rm_optimizer.experiments.readiness.validation import EIGHTFOLD, MATCHED, SCORE, Validation
from rm_optimizer.experiments.study.driver import Study
from rm_optimizer.reporting.pages.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.pages.study_trials import stored_record, trials_part
from rm_optimizer.reporting.readiness.study import (
    choice_lines,
    choice_table,
    plot_study,
    validation_lines,
    validation_tables,
)


def readiness_study_document(folder: Path) -> Document:
    """The page of a readiness study.

    Args:
        folder: folder of the study.

    Raises:
        ConfigError: if a result is damaged.
    """
    command, study = f"rm-opt study readiness {folder}", Study(folder)
    choice = stored_record(folder / FROZEN_FILE, FrozenChoice, command)
    found = stored_record(folder / VALIDATION_FILE, Validation, command)
    parts = [
        *([] if found is None else [_test(found)]),
        *([] if choice is None else [_choice(choice)]),
        trials_part(study.plan, list(study.rows())),
    ]
    return Document("Validation of the readiness score", _answer(found), parts)


def _answer(found: Validation | None) -> Answer:
    if found is None:
        said = "the test worlds have no result yet; rm-opt study readiness FOLDER --worlds test makes the test"
        return Answer("open", "Not tested", (said, f"whatever is below is {WORDING}"))
    gains = {each.baseline: each for each in found.differences if each.outcome == "rloo_kl_6"}
    lines = (
        f"with gold after RLOO to 6 nats, the score has Kendall's tau {found.of(SCORE, 'rloo_kl_6').tau:.2f}",
        *(
            f"that is {gains[name].over_models.value:+.2f} [{gains[name].over_models.low:.2f}, "
            f"{gains[name].over_models.high:.2f}] above {name}"
            for name in (MATCHED, EIGHTFOLD)
        ),
        f"all of this is {WORDING}",
    )
    low = gains[MATCHED].over_models.low
    if low is not None and low > 0:
        return Answer("good", "The score ranks reward models better than accuracy", lines)
    return Answer("bad", "The score is not shown to rank better than accuracy", lines)


def _test(found: Validation) -> Part:
    caption = "Tau of the score and of accuracy for every outcome, and tau by labels"
    tables = (
        Listing(name, table) for name, table in zip(("taus", "differences"), validation_tables(found), strict=True)
    )
    drawing = Drawing("validation", plot_study(found), caption)
    return Part("Test", (drawing, *tables, tuple(validation_lines(found))))


def _choice(choice: FrozenChoice) -> Part:
    worlds = ", ".join(map(str, choice.development))
    about = f"Chosen on the worlds {worlds} of {choice.models} reward models each, before a test world was measured."
    return Part("Choice", (about, tuple(choice_lines(choice)), Listing("choice", choice_table(choice))))

"""The readiness study in its folder: development worlds, the frozen choice, and one test on other worlds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.readiness.measurement import MeasuredWorld, WorldSize
from rm_optimizer.experiments.readiness.predictors import FrozenChoice
from rm_optimizer.experiments.readiness.trials import TASK, code_digest, measured_worlds, planned_worlds
from rm_optimizer.experiments.readiness.validation import (
    DEVELOPMENT,
    TEST,
    Validation,
    choose,
    fitted_outcomes,
    tested_outcomes,
    validate,
)
from rm_optimizer.experiments.study.driver import OnTrial, Study
from rm_optimizer.experiments.study.executors import Executor
from rm_optimizer.experiments.study.plan import publish
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.provenance import commit, versions
from rm_optimizer.rl_coupling.readiness.fitted import FitProvenance, FittedReadiness

FROZEN_FILE, TOUCHED_FILE = "frozen.json", "touched.json"
VALIDATION_FILE, FITTED_FILE = "validation.json", "fitted.json"
"""In the study's folder; the first and the third also stand in the package, as the study left them."""
RecordT = TypeVar("RecordT", bound=JsonRecord)
WORDING = "on synthetic gold-reward worlds with tiny policies"


@dataclass(frozen=True)
class Touch(JsonRecord, indent=1):
    """The start of the test, written before a test world is measured.

    Args:
        time: ISO 8601.
        commit: commit of the checkout, which holds the frozen choice; None outside of one.
        choice: the frozen choice.
    """

    time: str
    commit: str | None
    choice: FrozenChoice


@dataclass(frozen=True)
class ReadinessStudy:
    """A validation of the readiness score.

    Args:
        folder: folder of the study; a stopped study goes on in it.
        size: size of each world's measurement.
        development: seeds of the worlds that features are chosen on.
        test: seeds of the worlds that the choice is tested on.
    """

    folder: Path
    size: WorldSize = field(default_factory=WorldSize)
    development: tuple[int, ...] = DEVELOPMENT
    test: tuple[int, ...] = TEST

    def develop(self, executor: Executor, on_trial: OnTrial | None = None) -> FrozenChoice:
        """Measure the development worlds, choose features and penalty, and write `frozen.json`.

        Raises:
            ConfigError: if a world failed, or the test has begun already.
        """
        worlds = self._measured(self.development, executor, on_trial)
        choice = choose(worlds, code=code_digest(), steps=self.size.steps)
        touched = self._touched()
        if touched is not None and touched.choice != choice:
            raise ConfigError(
                f"the test worlds of {self.folder} were measured under another choice ({TOUCHED_FILE}), which may not "
                "change any more; choose another folder"
            )
        write_text(self.folder / FROZEN_FILE, choice.to_json() + "\n")
        return choice

    def _touch(self, choice: FrozenChoice) -> Touch:
        """The record that the test worlds are measured under a choice, written before the first of them is."""
        touch = self._touched() or Touch(datetime.now(UTC).isoformat(timespec="seconds"), commit(), choice)
        if touch.choice != choice:
            raise ConfigError(
                f"the test worlds of {self.folder} were measured under another choice ({TOUCHED_FILE}); choose another "
                "folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / TOUCHED_FILE, touch.to_json() + "\n")
        return touch

    def tested(self, executor: Executor, on_trial: OnTrial | None = None) -> Validation:
        """Measure the test worlds under the frozen choice, and write `validation.json` and `fitted.json`.

        Raises:
            ConfigError: if there is no choice, it was made with other code or of another size, or a world failed.
        """
        choice = self._choice()
        touch = self._touch(choice)
        worlds = self._measured(self.test, executor, on_trial)
        developed = self._measured(self.development, executor, on_trial)
        fits = fitted_outcomes(developed, choice)
        validation = validate(fits, choice, worlds)
        fitted = FittedReadiness(
            version=f"readiness-{choice.code[:8]}",
            outcomes=tested_outcomes(fits, choice, worlds, validation),
            provenance=self._provenance(touch, developed, worlds),
        )
        write_text(self.folder / VALIDATION_FILE, validation.to_json() + "\n")
        write_text(self.folder / FITTED_FILE, fitted.to_json() + "\n")
        return validation

    def _choice(self) -> FrozenChoice:
        path = self.folder / FROZEN_FILE
        choice = FrozenChoice.from_json(path.read_text(encoding="utf-8")) if path.is_file() else frozen_choice()
        mine = {"code": code_digest(), "models": self.size.models, "steps": self.size.steps}
        theirs: Mapping[str, str | int | None] = {name: getattr(choice, name, None) for name in mine}
        if mine != theirs or (choice is not None and choice.development != self.development):
            raise ConfigError(
                "no choice was frozen for worlds of this size with this code, and a test without one would be no test; "
                "run the development worlds first (--worlds development)"
            )
        assert choice is not None
        return choice

    def _touched(self) -> Touch | None:
        path = self.folder / TOUCHED_FILE
        return Touch.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _measured(self, seeds: tuple[int, ...], executor: Executor, on_trial: OnTrial | None) -> list[MeasuredWorld]:
        publish(self.folder, TASK, planned_worlds(seeds, self.size), extends=True)
        study = Study(self.folder)
        state = study.run(executor, on_trial=on_trial)
        worlds = measured_worlds(study, seeds)
        if len(worlds) < len(seeds):
            error = next(iter(state.errors.values()), "no error is recorded")
            raise ConfigError(f"{len(seeds) - len(worlds)} worlds have no result, the first with: {error}")
        return worlds

    def _provenance(self, touch: Touch, developed: list[MeasuredWorld], worlds: list[MeasuredWorld]) -> FitProvenance:
        return FitProvenance(
            wording=WORDING,
            fitted_worlds=self.development,
            tested_worlds=self.test,
            num_fitted=sum(len(world.models) for world in developed),
            num_tested=sum(len(world.models) for world in worlds),
            frozen_commit=touch.commit or "unknown",
            created=touch.time,
            versions=versions(),
        )


def frozen_choice() -> FrozenChoice | None:
    """The choice that ships with the package; None where this version has none."""
    return _packaged(FrozenChoice, FROZEN_FILE)


def shipped_validation() -> Validation | None:
    """The result that ships with the package; None where this version has none."""
    return _packaged(Validation, VALIDATION_FILE)


def _packaged(kind: type[RecordT], name: str) -> RecordT | None:
    file = files("rm_optimizer.experiments.readiness") / name
    return kind.from_json(file.read_text(encoding="utf-8")) if file.is_file() else None

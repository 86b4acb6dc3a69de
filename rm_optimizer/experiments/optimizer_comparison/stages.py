"""Stages of a comparison. Each is a list of trials that depends on the results of the stages before.

Freezing writes the setting that is equal for all arms. Tuning tries the same number of learning rates for every
optimizer, on seeds that are used only for tuning. The final stage runs new seeds, the same for every arm, at the chosen
rates. All trials are in one study, so a comparison that was killed continues with the trials that have no result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.tokens.dataset import PreferenceDataset, load_pairs
from rm_optimizer.core.tokens.splits import require_disjoint_prompts
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments import study
from rm_optimizer.experiments.cost import steps_of
from rm_optimizer.experiments.optimizer_comparison import setting
from rm_optimizer.experiments.optimizer_comparison.arm_trial import TASK, arm_trial
from rm_optimizer.experiments.trial import Executor, Trial, TrialResult
from rm_optimizer.optim.registry import OPTIMIZERS
from rm_optimizer.records.files import write_json_lines, write_text
from rm_optimizer.records.run_options import flat, is_among, options_of
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.preparation import build_model

ADAMW = "adamw"
KEPT = ("id", "source", "subset")
"""Metadata that the written pairs keep."""
HELD_OUT = 0.2
"""Share of the prompts that is held out if no validation pairs are given; it is divided into validation and test."""
_OF_AN_ARM = ("optimizer", "schedule", "seed", "output_dir", "data", "model.adamw_lr", "model.lora_lr", "logger")


def freeze(options: setting.ComparisonOptions, folder: Path) -> setting.Frozen:
    """Write the pairs and the setting of a comparison, or read the setting if the folder holds the same comparison.

    Args:
        options: options of the comparison.
        folder: folder of the comparison.

    Raises:
        ConfigError: if options are refused, or the folder holds another comparison.
        DataError: if pairs cannot be read, or the splits share prompts.
    """
    options.require_fair()
    splits = _splits(options)
    known = setting.Frozen.read(folder)
    fingerprints = {part: data.fingerprint for part, data in splits.items()}
    if known is not None:
        before = replace(known.options, seeds=options.seeds)  # only the number of final seeds may change
        if before != options or known.fingerprints != fingerprints:
            names = [name for name in vars(options) if getattr(before, name) != getattr(options, name)]
            changed = ", ".join(names) or "pairs in the same files"
            raise ConfigError(f"{folder} holds a comparison with other {changed}; choose another --output")
        known = replace(known, options=options)
        write_text(folder / study.FROZEN_FILE, known.to_json() + "\n")
        return known
    for part, data in splits.items():
        rows = []
        for pair in data.pairs:
            row = pair.to_dict()
            metadata = row.pop("metadata")
            rows.append(row | {name: metadata[name] for name in KEPT if metadata.get(name) is not None})
        write_json_lines(setting.pairs_file(folder, part), rows)
    config = options.config(options.reference)
    contents = {
        "model": weights_digest(build_model(config.model, splits["train"], seed=0).model),
        "fingerprints": fingerprints,
        "shared": digest([[name, value] for name, value in flat(options_of(config)) if not is_among(name, _OF_AN_ARM)]),
        "steps": steps_of(config, len(splits["train"])),
    }
    frozen = setting.Frozen(
        digest=digest(contents),
        options=options,
        sizes={part: len(data) for part, data in splits.items()},
        prompts={part: len(set(data.prompt_ids)) for part, data in splits.items()},
        **contents,  # type: ignore[arg-type]
    )
    write_text(folder / study.FROZEN_FILE, frozen.to_json() + "\n")
    return frozen


def _splits(options: setting.ComparisonOptions) -> dict[str, PreferenceDataset]:
    named = [override for override in options.overrides if override.lstrip("+~").startswith("data.")]
    data = typed(compose([*named, "model=custom", "model.path=x", "output_dir=."]), TrainConfig).data
    train = load_pairs(options.train, data)
    if options.val is None:
        train, held_out = train.split_by_prompt(HELD_OUT, data.split_seed)
    else:
        held_out = load_pairs(options.val, data)
    if options.test is None:
        sizes = options.val_pairs, options.test_pairs
        share = 0.5 if sizes[0] is None or sizes[1] is None else sizes[1] / (sizes[0] + sizes[1])
        val, test = held_out.split_by_prompt(share, data.split_seed)
    else:
        val, test = held_out, load_pairs(options.test, data)
    # Tuning chooses by the validation pairs, so a shared prompt would make the test scores optimistic.
    require_disjoint_prompts(train, val)
    for name, other in (("training", train), ("validation", val)):
        if not set(other.prompt_ids).isdisjoint(test.prompt_ids):
            raise DataError(
                f"test prompts must be untouched, but some are in the {name} pairs; remove them from --test"
            )
    given = {"train": (train, options.pairs), "val": (val, options.val_pairs), "test": (test, options.test_pairs)}
    return {name: part if most is None else part.subset(most, data.split_seed) for name, (part, most) in given.items()}


@dataclass(frozen=True)
class TunedArm:
    """Tuning of an optimizer.

    Args:
        trials: tuning runs that are known so far.
        chosen: the learning rate that tuning chose; None until its runs are finished.
        adamw_lr: learning rate of its AdamW part; None if it has none, or the preset's is used.
    """

    trials: Sequence[study.PlannedTrial] = ()
    chosen: setting.ChosenRate | None = None
    adamw_lr: float | None = None


class Stages:
    """The trials of a comparison in its folder.

    Args:
        folder: the folder, which holds a frozen setting.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trials: dict[tuple[object, ...], study.PlannedTrial] = {}

    @cached_property
    def frozen(self) -> setting.Frozen:
        """The comparison's setting.

        Raises:
            ConfigError: if the folder holds no comparison.
        """
        return setting.Frozen.of(self.folder)

    @property
    def num_planned(self) -> int:
        """Number of trials of the whole comparison, without rates beyond the grids."""
        options = self.frozen.options
        return len(options.optimizers) * (options.rates * options.tuning_seeds + options.seeds)

    def tuned(self, arm: str) -> TunedArm:
        """Tuning of an optimizer; without runs if it uses the rate tuned for AdamW and that is not known yet."""
        options, adamw_lr = self.frozen.options, None
        if OPTIMIZERS[arm].name == "muon" and ADAMW in options.optimizers:
            if (adamw := self.tuned(ADAMW).chosen) is None:
                return TunedArm()
            adamw_lr = adamw.rate
        grid = setting.rate_grid(options.config(arm).optimizer.lr, options.rates)
        rates, trials, scores = list(grid), [], {}
        for rate in rates:  # which grows
            runs = [
                self._trial(setting.TUNE, arm, rate, setting.FIRST_TUNING_SEED + number, adamw_lr)
                for number in range(options.tuning_seeds)
            ]
            trials += runs
            results = [result for run in runs if (result := self.result(run)) is not None]
            if len(results) == len(runs):
                losses = [result.values.get("val_nll") for result in results]  # None for a diverged run
                scores[rate] = fmean(loss if isinstance(loss, int | float) else math.inf for loss in losses)
            if len(scores) == len(rates) and (extra := setting.next_rate(scores, len(grid))) is not None:
                rates.append(extra)
        chosen = setting.chosen_rate(scores, len(grid)) if len(scores) == len(rates) else None
        return TunedArm(trials, chosen, adamw_lr)

    def trials(self) -> list[study.PlannedTrial]:
        """All trials that are known so far: tuning runs, then final runs seed by seed once all are tuned.

        An optimizer whose rates all diverged has no final runs.
        """
        options = self.frozen.options
        tuned = {arm: self.tuned(arm) for arm in options.optimizers}
        trials = [trial for each in tuned.values() for trial in each.trials]
        if all(each.chosen is not None for each in tuned.values()):
            trials += [
                self._trial(setting.FINAL, arm, each.chosen.rate, seed, each.adamw_lr)
                for seed in range(options.seeds)
                for arm, each in tuned.items()
                if each.chosen is not None and each.chosen.rate is not None
            ]
        return trials

    def result(self, planned: study.PlannedTrial) -> TrialResult | None:
        """The result of a trial; None if it has none yet."""
        return Trial(self.folder / study.TRIALS / planned.name).result

    def run(
        self,
        executor: Executor,
        *,
        retries: int = 2,
        on_trial: study.OnTrial | None = None,
        on_stage: Callable[[int], None] = lambda num_trials: None,
    ) -> study.StudyStatus:
        """Run stage after stage until every trial has a result.

        Args:
            executor: executor of the trials.
            retries: number of further attempts at a trial that failed or whose process was killed.
            on_trial: function called with each trial that ended.
            on_stage: function called with the number of trials known so far, at the start of each stage.

        Raises:
            Interrupted: if the user stopped it; the same call continues.
        """
        while True:
            known = self.trials()
            study.publish(self.folder, TASK, known, extends=(self.folder / study.PLAN_FILE).exists())
            on_stage(len(known))
            status = study.Study(self.folder).run(executor, retries=retries, on_trial=on_trial)
            if not status.is_done or len(self.trials()) == len(known):
                return status

    def _trial(self, stage: str, arm: str, rate: float, seed: int, adamw_lr: float | None) -> study.PlannedTrial:
        key = (stage, arm, rate, seed, adamw_lr)
        if key not in self._trials:
            self._trials[key] = arm_trial(self.frozen, self.folder, stage, arm, rate, seed, adamw_lr=adamw_lr)
        return self._trials[key]

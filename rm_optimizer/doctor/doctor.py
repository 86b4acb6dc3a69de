"""Doctor: measurements of the known faults of reward models, on a model and its pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Literal, TypeVar, get_args

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.tokens.audit import DataAudit, audit_pairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor import data as doctor_data
from rm_optimizer.doctor import model as doctor_model
from rm_optimizer.doctor import rewards as doctor_rewards
from rm_optimizer.doctor import text as doctor_text
from rm_optimizer.doctor.diagnosis import Check, Diagnosis, Status, skipped
from rm_optimizer.doctor.label_signal import label_checks
from rm_optimizer.doctor.probe_conversations import padded_rewards, probe_ids, running
from rm_optimizer.errors import DataError, require_known
from rm_optimizer.schema.registry import Registry, load_entry_points

Needs = Literal["files", "model", "pairs", "rewards", "trained rewards"]
"""Needs of a check: the model's files, finite weights, pairs, finite rewards of pairs, or rewards of a trained head."""

_BUILT_IN: dict[Needs, tuple[Callable[..., Check], ...]] = {
    "files": (
        *(doctor_text.pad_token, doctor_text.tokenizer_file, doctor_text.special_tokens, doctor_text.template_date),
        *(doctor_text.plain_rendering, doctor_text.rendered_together, doctor_text.truncation),
        *(doctor_model.single_label, doctor_model.raw_reward),
    ),
    "model": (
        *(doctor_model.head_init, doctor_model.adapter_trained, doctor_model.head_dtype, doctor_model.head_trainable),
        *(doctor_model.padding, doctor_model.plain_forward, doctor_model.batch, doctor_model.prefix_sharing),
        *(doctor_model.dropout, doctor_model.attention_kernel, doctor_model.save_reload),
        doctor_rewards.reward_spread,
    ),
    "pairs": (doctor_data.split_leakage, doctor_data.unseen_pairs, doctor_data.labels, doctor_data.margins),
    "rewards": (doctor_rewards.prompt_only,),
    "trained rewards": (
        *(doctor_rewards.label_agreement, doctor_rewards.calibration, doctor_rewards.label_groups),
        *(doctor_rewards.beats_length, doctor_rewards.reward_length),
    ),
}
CheckT = TypeVar("CheckT", bound=Callable[..., Check])
_ENTRIES: dict[str, tuple[Needs, Callable[..., Check]]] = {
    "finite_weights": ("files", lambda finite: finite),
    **{check.__name__: (needs, check) for needs, checks in _BUILT_IN.items() for check in checks},
    **{name: ("pairs", check) for name, check in doctor_data.AUDITED.items()},
    "label_signal": ("rewards", lambda label_checks: label_checks[0]),
    "label_shuffle": ("rewards", lambda label_checks: label_checks[1]),
}
CHECKS = Registry("check", _ENTRIES)
"""Needs and function of each check. A function's parameters are named like the attributes of `Examination`."""


def register_check(name: str, needs: Needs = "model") -> Callable[[CheckT], CheckT]:
    """Decorator that adds a function to the checks of `diagnose` and `rm-opt doctor`.

    The function returns a `Check`. Its parameters are named like the attributes of `Examination` that it reads, such as
    `model`, `probe`, `data`, `audit`, `scored`, `rewards` and `seed`; `name` is the name of the check.

    Args:
        name: name of the check, as it is reported.
        needs: what it needs: `files`, `model`, `pairs`, `rewards` or `trained rewards`; without that it is skipped.

    Raises:
        ConfigError: if the name is taken, or if needs or a parameter are unknown.
    """
    require_known("needs", needs, get_args(Needs))

    def registered(check: CheckT) -> CheckT:
        known = ["name", *Examination.__dataclass_fields__, *(key for key in vars(Examination) if key[0] != "_")]
        for parameter in _wanted(check):
            require_known(f"parameter of the check '{name}'", parameter, known)
        CHECKS.add(name, (needs, check), made_by=check)
        return check

    return registered


def _wanted(check: Callable[..., Check]) -> list[str]:
    """Names of the parameters without a default."""
    return [item.name for item in signature(check).parameters.values() if item.default is item.empty]


def diagnose(
    model: BradleyTerryRM,
    data: Mapping[str, PreferenceDataset] | None = None,
    *,
    seed: int,
    trained: TrainedPairs | None = None,
    max_pairs: int = 256,
    max_audited_pairs: int = 4000,
    token_budget: int = 8192,
    on_stage: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Diagnosis:
    """Check a reward model, or a base model with a fresh head, and the pairs it is or will be trained on.

    A failed check does not end the diagnosis. The model's weights, its mode and the random state do not change. The
    cost is bounded by about ten passes over nine fixed conversations, one export to a temporary folder, one pass over
    `max_pairs` pairs, and the tokenization of `max_audited_pairs` pairs of each data set.

    Args:
        model: the model, on its device.
        data: data sets by name, of which two or more are compared for leaks; None checks only the model.
        seed: seed of samples, folds, random labels and bootstraps.
        trained: record of the pairs that the model was trained on; None without one.
        max_pairs: most pairs, over all data sets, whose rewards are computed.
        max_audited_pairs: approximate number of pairs of each data set whose tokens are counted.
        token_budget: most tokens of one pass over pairs, padding included.
        on_stage: function called with the name of the next check, the number of checks done and of all checks.

    Raises:
        TypeError: if the model is no `BradleyTerryRM`.
        DataError: if a data set is empty, or every pair is equal after truncation.
    """
    require_bradley_terry(model)
    started = time.perf_counter()
    data = dict(data or {})
    for name, dataset in data.items():
        if not len(dataset):
            raise DataError(f"{name}: has no pairs to check")
    load_entry_points(CHECKS.kind)
    examined = Examination(model, data, seed, trained, max_pairs, max_audited_pairs, token_budget)
    checks = []
    for done, name in enumerate(order := sorted(CHECKS, key=lambda name: get_args(Needs).index(CHECKS[name][0]))):
        on_stage(name.replace("_", " "), done, len(order))
        checks.append(examined.check(name))
    return Diagnosis(
        model=f"{type(model.model).__name__} {model.model.name_or_path}".strip(),
        seed=seed,
        num_pairs={name: len(dataset) for name, dataset in data.items()},
        num_pairs_scored=examined.scored.num_scored if data and examined.finite.status is Status.ok else {},
        num_pairs_audited={name: split.num_pairs for name, split in examined.audit.splits.items()} if data else {},
        wall_seconds=time.perf_counter() - started,
        checks=tuple(checks),
    )


@dataclass
class Examination:
    """A model and its pairs, and what checks compute from them once.

    Args:
        model: the model.
        data: data sets by name.
        seed: seed of every random choice.
        trained: record of the pairs that the model was trained on; None without one.
        max_pairs: most pairs, over all data sets, whose rewards are computed.
        max_audited_pairs: approximate number of pairs of each data set whose tokens are counted.
        token_budget: most tokens of one pass over pairs, padding included.
    """

    model: BradleyTerryRM
    data: Mapping[str, PreferenceDataset]
    seed: int
    trained: TrainedPairs | None
    max_pairs: int
    max_audited_pairs: int
    token_budget: int

    @cached_property
    def finite(self) -> Check:
        """The check that all weights are finite, which others wait for."""
        return doctor_model.finite_weights(self.model)

    @cached_property
    def is_fresh(self) -> bool:
        """True if the head has its initial weights."""
        return doctor_model.is_head_fresh(self.model)

    @cached_property
    def probe(self) -> list[tuple[int, ...]]:
        """Token ids of the probe conversations."""
        return probe_ids(self.model)

    @cached_property
    def audit(self) -> DataAudit:
        """Audit of a sample of each data set, of random prompts with all of their pairs.

        Repeats and contradictions are within a prompt, so the estimates of their shares are unbiased.
        """
        samples, most, renderer = dict(self.data), self.max_audited_pairs, self.model.renderer
        for name, dataset in self.data.items():
            if len(dataset) > most and len(set(dataset.prompt_ids)) > 1:
                samples[name] = dataset.split_by_prompt(most / len(dataset), self.seed)[1]
        return audit_pairs(samples, renderer, renderer.tokenizer.all_special_tokens)

    @cached_property
    def scored(self) -> doctor_rewards.ScoredPairs:
        """Rewards and hidden states of a sample of the pairs.

        Raises:
            DataError: if every pair is equal after truncation.
        """
        found = doctor_rewards.score_sample(
            self.model, self.data, max_pairs=self.max_pairs, token_budget=self.token_budget, seed=self.seed
        )
        if not found.pairs:
            raise DataError("no pair is left to score: the two responses of each are equal after truncation")
        return found

    @cached_property
    def rewards(self) -> np.ndarray:
        """Rewards of both sides of the pairs, or of the probe conversations without pairs."""
        if self.data:
            return self.scored.rewards
        with running(self.model, training=False):
            rewards = padded_rewards(self.model, self.probe).numpy()
        return rewards[: len(rewards) // 2 * 2].reshape(-1, 2)

    @cached_property
    def label_checks(self) -> list[Check]:
        """The checks of labels by a probe of the frozen model."""
        return label_checks(self.scored, is_fresh=self.is_fresh, seed=self.seed)

    def check(self, name: str) -> Check:
        """The check of that name, skipped with the reason if the model or the pairs lack what it needs."""
        needs, function = CHECKS[name]
        if (obstacle := self._obstacle(needs)) is not None:
            return replace(skipped("", obstacle), name=name)
        found = function(**{each: name if each == "name" else getattr(self, each) for each in _wanted(function)})
        if not isinstance(found, Check):
            raise TypeError(f"the check '{name}' must return a Check, got {type(found).__name__}")
        return replace(found, name=name)

    def _obstacle(self, needs: Needs) -> str | None:
        """Sentence about what is missing of the needs."""
        if needs not in ("files", "model") and not self.data:
            return "there are no pairs; name some with --data"
        if needs not in ("files", "pairs") and self.finite.status is Status.fail:
            return "the weights are not finite, see finite_weights"
        if needs in ("rewards", "trained rewards") and not np.isfinite(self.rewards).all():
            return "rewards are not finite"
        if needs == "trained rewards" and self.is_fresh:
            return "the head is at its random start, so its rewards mean nothing yet"
        return None

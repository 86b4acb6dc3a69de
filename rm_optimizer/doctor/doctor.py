"""Doctor: measurements of the known faults of reward models, on a model and its pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.overlap import TrainedPairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor import data as doctor_data
from rm_optimizer.doctor import head as doctor_head
from rm_optimizer.doctor import label_signal
from rm_optimizer.doctor import model as doctor_model
from rm_optimizer.doctor import rewards as doctor_rewards
from rm_optimizer.doctor import text as doctor_text
from rm_optimizer.doctor.diagnosis import Check, Diagnosis, Status, skipped
from rm_optimizer.doctor.probe_conversations import padded_rewards, probe_ids, running
from rm_optimizer.errors import DataError

Stage = tuple[str, Callable[[], Iterable[Check]]]
"""Description of a stage, and the function that returns its checks."""

_LEARNED = ("label_agreement", "calibration", "label_groups", "beats_length", "reward_length")
_NEEDS_REWARDS = (*_LEARNED, "prompt_only", "label_signal", "label_shuffle")
_NEEDS_WEIGHTS = (
    *("head_init", "adapter_trained", "head_dtype", "head_trainable", "padding", "plain_forward", "batch"),
    *("prefix_sharing", "dropout", "attention_kernel", "save_reload", "reward_spread", *_NEEDS_REWARDS),
)
_NEEDS_DATA = (
    *("split_leakage", "unseen_pairs", "labels", "margins", "repeated_pairs", "contradictions", "truncation_rate"),
    *("response_truncation", "blank_differences", "control_tokens", "identical_pairs", "longer_wins", "marker_wins"),
    *_NEEDS_REWARDS,
)


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
        trained: record of the pairs that the model was trained on; None if there is none.
        max_pairs: most pairs, over all data sets, whose rewards are computed.
        max_audited_pairs: approximate number of pairs of each data set whose tokens are counted.
        token_budget: most tokens of one pass over pairs, padding included.
        on_stage: function called with the description of the next stage, the number of stages done and of all stages.

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
    examined = _Examination(model, data, seed, trained, max_pairs, max_audited_pairs, token_budget)
    stages = [*examined.model_stages(), *(examined.data_stages() if data else examined.stages_without_data())]
    checks: list[Check] = []
    for done, (what, checks_of) in enumerate(stages):
        on_stage(what, done, len(stages))
        checks.extend(checks_of())
    if checks[0].status is Status.fail:
        checks = _skipping(checks, _NEEDS_WEIGHTS, "the weights are not finite, see finite_weights")
    return Diagnosis(
        model=f"{type(model.model).__name__} {model.model.name_or_path}".strip(),
        seed=seed,
        num_pairs={name: len(dataset) for name, dataset in data.items()},
        num_pairs_scored=examined.num_scored,
        num_pairs_audited=examined.num_audited,
        wall_seconds=time.perf_counter() - started,
        checks=tuple(checks),
    )


@dataclass
class _Examination:
    """The stages of one diagnosis, and the values that later stages need from earlier ones."""

    model: BradleyTerryRM
    data: Mapping[str, PreferenceDataset]
    seed: int
    trained: TrainedPairs | None
    max_pairs: int
    max_audited_pairs: int
    token_budget: int
    num_scored: Mapping[str, int] = field(default_factory=dict)
    num_audited: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def probe(self) -> list[tuple[int, ...]]:
        """Token ids of the probe conversations."""
        return probe_ids(self.model)

    def model_stages(self) -> list[Stage]:
        """The checks that need no pairs."""
        model, probe = self.model, self.probe
        return [
            ("weights", lambda: [doctor_head.finite_weights(model)]),
            (
                "tokens and template",
                lambda: [
                    doctor_text.pad_token(model, probe),
                    doctor_text.tokenizer_file(model),
                    doctor_text.special_tokens(model, probe),
                    doctor_text.template_date(model),
                    doctor_text.rendered_together(model, probe),
                    doctor_text.truncation(model),
                ],
            ),
            (
                "head",
                lambda: [
                    doctor_head.single_label(model),
                    doctor_head.raw_reward(model),
                    doctor_head.head_init(model),
                    doctor_head.adapter_trained(model),
                    doctor_head.head_dtype(model, probe),
                    doctor_head.head_trainable(model, probe),
                ],
            ),
            ("padding", lambda: [doctor_model.padding(model, probe), doctor_model.plain_forward(model, probe)]),
            ("batches", lambda: [doctor_model.batch(model, probe), doctor_model.prefix_sharing(model, probe)]),
            ("dropout", lambda: [doctor_model.dropout(model, probe)]),
            ("attention kernel", lambda: [doctor_model.attention_kernel(model, probe)]),
            ("saving and loading", lambda: [doctor_model.save_reload(model)]),
        ]

    def data_stages(self) -> list[Stage]:
        """The checks of the pairs and of the model's rewards on them."""
        return [("leaks and labels", self._splits), ("repeats and lengths", self._audit), ("rewards", self._rewards)]

    def stages_without_data(self) -> list[Stage]:
        """The check of the probe's rewards, and the skipped checks of a diagnosis without pairs."""
        reason = "there are no pairs; name some with --data"
        return [
            ("rewards", self._probe_rewards),
            ("pairs", lambda: [skipped(name, "", reason) for name in _NEEDS_DATA]),
        ]

    def _splits(self) -> list[Check]:
        data = self.data
        seen = doctor_data.unseen_pairs(data, self.trained)
        return [doctor_data.split_leakage(data), seen, doctor_data.labels(data), doctor_data.margins(data)]

    def _audit(self) -> list[Check]:
        renderer, most = self.model.renderer, self.max_audited_pairs
        audit = doctor_data.audit_sample(self.data, renderer, max_pairs=most, seed=self.seed)
        self.num_audited = {name: split.num_pairs for name, split in audit.splits.items()}
        return doctor_data.audit_checks(audit)

    def _rewards(self) -> list[Check]:
        scored = doctor_rewards.score_sample(
            self.model, self.data, max_pairs=self.max_pairs, token_budget=self.token_budget, seed=self.seed
        )
        if not scored.pairs:
            raise DataError("no pair is left to score: the two responses of each are equal after truncation")
        self.num_scored = scored.num_scored
        spread = doctor_rewards.reward_spread(scored.rewards[:, 0], scored.rewards[:, 1])
        if not np.isfinite(scored.rewards).all():
            return [spread, *(skipped(name, "", "rewards are not finite") for name in _NEEDS_REWARDS)]
        is_fresh = doctor_head.is_head_fresh(self.model)
        found = [
            spread,
            doctor_rewards.label_agreement(scored, self.seed),
            doctor_rewards.calibration(scored, self.seed),
            doctor_rewards.label_groups(scored, self.seed),
            doctor_rewards.beats_length(scored, self.seed),
            doctor_rewards.reward_length(scored),
            doctor_rewards.prompt_only(self.model, scored),
            *label_signal.label_checks(scored, is_fresh=is_fresh, seed=self.seed),
        ]
        reason = "the head is at its random start, so its rewards mean nothing yet"
        return _skipping(found, _LEARNED, reason) if is_fresh else found

    def _probe_rewards(self) -> list[Check]:
        with running(self.model, training=False):
            rewards = padded_rewards(self.model, self.probe).numpy()
        even = len(rewards) // 2 * 2
        return [doctor_rewards.reward_spread(rewards[:even:2], rewards[1:even:2])]


def _skipping(checks: Iterable[Check], names: Collection[str], reason: str) -> list[Check]:
    return [skipped(each.name, each.expected, reason) if each.name in names else each for each in checks]

"""Ensembles of reward models: combined rewards, disagreement of the members, and out-of-distribution responses."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import overload

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.shared_backbone import SharedBackbone, adapter_key
from rm_optimizer.core.pairs.pair import Prompt, digest, prompt_id
from rm_optimizer.core.rows.natural import Prompts, Texts, listed, paired, texts
from rm_optimizer.errors import ConfigError, DataError, require_known
from rm_optimizer.evaluation.score_file import CountedRewards
from rm_optimizer.records.codec import JsonRecord, json_values
from rm_optimizer.records.locations import SourceKind, resolve_source
from rm_optimizer.rl_coupling.out_of_distribution import OODDetection, conformal_threshold, detection, halves
from rm_optimizer.schema.checks import require

_log = logging.getLogger("rm_optimizer")
MemberRewards = Float[np.ndarray, "members sequences"]
"""Rewards of responses by each member."""


class Aggregation(StrEnum):
    """Combination of the members' rewards of one response.

    `mean`, `min` (worst case) and `uwo` (uncertainty-weighted, `mean - penalty * std`) as in Coste et al. (2023,
    arXiv:2310.02743), who subtract the variance; the standard deviation has the unit of the reward.
    """

    mean = "mean"
    min = "min"
    uwo = "uwo"


@dataclass(frozen=True)
class EnsemblePrediction(JsonRecord):
    """Rewards of one response by the members of an ensemble, standardized if the ensemble has a reference.

    Args:
        mean_reward: mean over members.
        std_reward: sample standard deviation over members.
        individual_rewards: reward by each member, in their order.
        is_high_uncertainty: True if `std_reward` exceeds the threshold; None without a threshold.
    """

    mean_reward: float
    std_reward: float
    individual_rewards: tuple[float, ...]
    is_high_uncertainty: bool | None


@dataclass(frozen=True)
class EnsembleMargin(JsonRecord):
    """Margins of one pair by the members of an ensemble. A shift of a member's rewards does not change them.

    Args:
        mean_margin: mean over members.
        std_margin: sample standard deviation over members, the uncertainty of the pair.
        individual_margins: margin by each member, in their order.
    """

    mean_margin: float
    std_margin: float
    individual_margins: tuple[float, ...]


@dataclass(frozen=True)
class EnsembleReference(JsonRecord):
    """Scales and usual disagreement of an ensemble's members, measured on reference responses.

    Args:
        means: mean reward of each member.
        stds: standard deviation of each member's rewards.
        threshold: standard deviation over members above which a response is uncertain.
        false_positive_rate: largest probability that a response like the reference ones exceeds the threshold.
        num_responses: number of reference responses; one half set the scales, the other the threshold.
    """

    means: tuple[float, ...]
    stds: tuple[float, ...]
    threshold: float
    false_positive_rate: float
    num_responses: int


class SavedMembers:
    """Models by their paths. A returned model is valid until the next one is requested.

    Adapters on the same base load the base once. Other models are compared when they are loaded. If they differ in few
    tensors, such as their heads, only these tensors are kept for each.

    Args:
        load: loader of a saved model.
        memory_bytes: bytes of weights to keep in memory; None keeps all.
    """

    def __init__(self, load: Callable[[str], BradleyTerryRM], memory_bytes: int | None) -> None:
        self._load = load
        self._memory_bytes = memory_bytes
        self._kept: list[SharedBackbone] = []
        self._passing: SharedBackbone | None = None
        self._places: dict[str, tuple[SharedBackbone, int]] = {}
        self._of_key: dict[str, SharedBackbone] = {}

    def model(self, source: str) -> BradleyTerryRM:
        """The member with this path or hub id.

        Raises:
            CheckpointError: if it cannot be loaded.
        """
        if source not in self._places:
            backbone, number = self._places[source] = self._placed(source)
            # a backbone that is new or has grown is kept, if it fits the budget
            others = [other for other in self._kept if other is not backbone]
            total = sum(each.num_bytes for each in [*others, backbone])
            if self._memory_bytes is None or total <= self._memory_bytes:
                self._kept = [*others, backbone]
                self._passing = None if self._passing is backbone else self._passing
            else:
                self._kept, self._passing = others, backbone
        backbone, number = self._places[source]
        return backbone.use(number)

    def release(self) -> None:
        """Free the weights that exceed the memory budget."""
        passing, self._passing = self._passing, None
        self._places = {source: place for source, place in self._places.items() if place[0] is not passing}
        self._of_key = {key: backbone for key, backbone in self._of_key.items() if backbone is not passing}

    def _placed(self, source: str) -> tuple[SharedBackbone, int]:
        """The member's backbone, and the member's number on it."""
        found = resolve_source(source)
        folder = Path(found.location) if found.kind is SourceKind.ADAPTER else None
        key = None if folder is None else adapter_key(folder)
        if folder is not None and key in self._of_key:
            return self._of_key[key], self._of_key[key].add_adapter(folder)
        self.release()
        model = self._load(source)
        for backbone in self._kept:
            if (number := backbone.add(model)) is not None:
                return backbone, number
        backbone = SharedBackbone(model)
        if key is not None:
            self._of_key[key] = backbone
        return backbone, 0


class RewardModelEnsemble(Scorer):
    """Several reward models combined into one scorer that measures their disagreement.

    Rewards of Bradley-Terry models share neither zero nor scale. `fit_reference` standardizes each member on reference
    responses; `min` and `uwo` need it. Margins (`predict_margins`) are comparable up to scale without it.

    Args:
        models: scorers, or paths and hub ids of saved models, at least two; the attribute `models` holds them as given.
        uncertainty_threshold: standard deviation over members above which a response is uncertain, not negative; None
            takes the reference's.
        aggregation: combination that `score` returns: `mean`, `min` or `uwo`.
        penalty: factor of the standard deviation in `uwo`, not negative; 0 is the mean.
        reference: scales of the members from an earlier `fit_reference`.
        memory_bytes: bytes of weights of saved models to keep in memory; other models are loaded again for each call.
            Adapters on the same base count it once. None keeps all models.
        load: loader of a saved model.
        token_budget: most tokens in one forward pass of a model in this process, padding included.

    Raises:
        ConfigError: if there are fewer than two members, or an option is out of its range.
    """

    def __init__(
        self,
        models: Sequence[Scorer | str | PathLike[str]],
        uncertainty_threshold: float | None = None,
        *,
        aggregation: str = Aggregation.mean,
        penalty: float = 1.0,
        reference: EnsembleReference | None = None,
        memory_bytes: int | None = None,
        load: Callable[[str], BradleyTerryRM] = BradleyTerryRM.from_pretrained,
        token_budget: int = 16384,
    ) -> None:
        models = listed("models", models)
        if len(models) < 2:
            raise ConfigError(f"an ensemble needs at least 2 models, got {len(models)}")
        if uncertainty_threshold is not None:
            require(uncertainty_threshold >= 0, "uncertainty_threshold", "not be negative", uncertainty_threshold)
        require_known("aggregation", aggregation, Aggregation)
        require(0 <= penalty < float("inf"), "penalty", "be finite and not negative", penalty)
        if reference is not None and len(reference.means) != len(models):
            raise ConfigError(
                f"expected a reference of {len(models)} members, got one of {len(reference.means)}; call fit_reference"
            )
        self.uncertainty_threshold = uncertainty_threshold
        self.aggregation = Aggregation(aggregation)
        self.penalty = penalty
        self.reference = reference
        self.models = models
        self._saved = SavedMembers(load, memory_bytes)
        self._lock = threading.RLock()
        self._token_budget = token_budget
        self._has_warned = False

    def __len__(self) -> int:
        return len(self.models)

    @property
    def threshold(self) -> float | None:
        """Standard deviation over members above which a response is uncertain; None without a threshold."""
        if self.uncertainty_threshold is not None or self.reference is None:
            return self.uncertainty_threshold
        return self.reference.threshold

    def digest(self) -> str:
        """16 hexadecimal digits of everything that determines `score`.

        Raises:
            ConfigError: if a member is not a model in this process, so that its weights are not known.
        """
        digests = []
        with self._lock:
            for number in range(len(self)):
                member = self._member(number)
                if not isinstance(member, BradleyTerryRM):
                    kind = type(member).__name__
                    raise ConfigError(f"the weights of a {kind} are not known; give models or their paths")
                digests.append(scorer_digest(member))
            self._saved.release()
        return digest([digests, json_values(self.reference), self.aggregation.value, self.penalty])

    def member_rewards(self, prompts: Prompts, responses: Texts) -> MemberRewards:
        """Raw rewards of the responses by each member.

        Raises:
            ValueError: if there are not as many prompts as responses.
            CheckpointError: if a reward is not finite.
        """
        return self._scored(prompts, responses)[0]

    def _scored(self, prompts: Prompts, responses: Texts) -> tuple[MemberRewards, Bool[np.ndarray, "sides sequences"]]:
        """Raw rewards by each member, and a mask of prompts and responses that a member in this process has cut."""
        prompts, responses = paired(prompts, responses)
        rewards = np.zeros((len(self), len(responses)))
        is_cut = np.zeros((2, len(responses)), dtype=bool)
        for number, source in enumerate(self.models):
            if isinstance(source, str | PathLike | BradleyTerryRM):
                with self._lock:
                    member = self._member(number)
                    assert isinstance(member, BradleyTerryRM)
                    encodings = member.encode(prompts, responses)
                    is_cut |= [[one.prompt_cut > 0 for one in encodings], [one.response_cut > 0 for one in encodings]]
                    found = member.score_encoded(encodings, token_budget=self._token_budget)
            else:
                found = source.score(prompts, responses)
            rewards[number] = found.double().numpy()
            names = [f"response {index + 1} by {self._name(number)}" for index in range(len(responses))]
            require_finite(found.tolist(), names.__getitem__)
        with self._lock:
            self._saved.release()
        return rewards, is_cut

    def fit_reference(
        self, prompts: Prompts, responses: Texts, *, false_positive_rate: float = 0.05, seed: int = 0
    ) -> EnsembleReference:
        """Fit the members' scales and the threshold of uncertainty, and use them from now on.

        A random half of the responses sets each member's mean and standard deviation, the other half the threshold. A
        response that repeats another one of its prompt is left out. A member that ranks against the others is named.

        Args:
            prompts: prompts like the training data's, preferably each only once.
            responses: one response for each prompt.
            false_positive_rate: largest probability that a response like these exceeds the threshold, in (0, 1).
            seed: seed of the halves.

        Raises:
            DataError: if there are too few responses for the rate, or a member gives all of them the same reward.
        """
        pairs = zip(*paired(prompts, responses), strict=True)
        distinct = {(prompt_id(prompt), response): (prompt, response) for prompt, response in pairs}.values()
        rewards = self.member_rewards([prompt for prompt, _ in distinct], [response for _, response in distinct])
        scales, held_out = halves(rewards.shape[1], seed)
        if len(scales) < 2:
            raise DataError(f"expected at least 4 reference responses, got {len(distinct)}; give more")
        means, stds = rewards[:, scales].mean(axis=1), rewards[:, scales].std(axis=1, ddof=1)
        constant = np.flatnonzero(stds <= 1e-9 * np.abs(means))
        if len(constant):
            raise DataError(
                f"{self._name(int(constant[0]))} gives every reference response the same reward; leave it out"
            )
        standardized = (rewards[:, held_out] - means[:, None]) / stds[:, None]
        for number, own in enumerate(standardized):  # members whose rewards fall where the others' mean rises
            others = np.delete(standardized, number, axis=0).mean(axis=0)
            correlation = float(np.corrcoef(own, others)[0, 1]) if others.std() > 0 < own.std() else 0.0
            if correlation * math.sqrt(len(own)) < -3:
                _log.warning(
                    f"{self._name(number)} ranks the reference responses against the others (correlation "
                    f"{correlation:.2f}); leave it out if its labels were exchanged"
                )
        threshold = conformal_threshold(standardized.std(axis=0, ddof=1), false_positive_rate)
        self.reference = EnsembleReference(
            tuple(means.tolist()), tuple(stds.tolist()), threshold, false_positive_rate, len(distinct)
        )
        return self.reference

    def predict(self, prompt: Prompt, response: str) -> EnsemblePrediction:
        """Rewards of one response."""
        return self.predict_batch([prompt], [response])[0]

    def predict_batch(self, prompts: Prompts, responses: Texts) -> list[EnsemblePrediction]:
        """Rewards of the responses, in the order given.

        Raises:
            ValueError: if there are not as many prompts as responses.
            CheckpointError: if a reward is not finite.
        """
        return self._predicted(self._standardized(self.member_rewards(prompts, responses)))

    def predict_counted(self, prompts: Prompts, responses: Texts) -> tuple[list[EnsemblePrediction], CountedRewards]:
        """The results of `predict_batch` and of `score_counted`, with each member run only once.

        Raises:
            ConfigError: as for `score`.
        """
        if self.reference is None and self.aggregation != Aggregation.mean:
            raise ConfigError(
                f"aggregation={self.aggregation} compares members, whose rewards share neither zero nor scale; call "
                "fit_reference(prompts, responses) first"
            )
        raw, is_cut = self._scored(prompts, responses)
        rewards = self._standardized(raw)
        combined = aggregate(rewards, self.aggregation, self.penalty)
        return self._predicted(rewards), CountedRewards(combined.tolist(), *is_cut.sum(axis=1).tolist())

    def _predicted(self, rewards: MemberRewards) -> list[EnsemblePrediction]:
        limit = self.threshold
        return [
            EnsemblePrediction(mean, std, own, None if limit is None else std > limit)
            for mean, std, own in _over_members(rewards)
        ]

    def predict_margins(self, prompts: Prompts, responses_a: Texts, responses_b: Texts) -> list[EnsembleMargin]:
        """Margins of pairs: reward of `responses_a` less the reward of `responses_b`, by each member on its scale."""
        prompts, responses_a = paired(prompts, responses_a)
        _, responses_b = paired(prompts, texts("responses_b", responses_b))
        both = self.member_rewards([*prompts, *prompts], [*responses_a, *responses_b])
        margins = both[:, : len(prompts)] - both[:, len(prompts) :]
        if self.reference is not None:
            margins = margins / np.array(self.reference.stds)[:, None]
        return [EnsembleMargin(*each) for each in _over_members(margins)]

    @overload
    def detect_ood(self, prompts: Prompt, responses: str) -> bool: ...  # type: ignore[overload-overlap]

    @overload
    def detect_ood(self, prompts: Prompts, responses: Iterable[str]) -> OODDetection: ...

    def detect_ood(self, prompts: Prompts, responses: Texts) -> bool | OODDetection:
        """Responses on which the members disagree more than the threshold, as `predict` flags them.

        One text gives True or False. The rate of false positives is known for the threshold of `fit_reference` alone.

        Raises:
            ConfigError: if there is neither an `uncertainty_threshold` nor a reference.
        """
        if self.threshold is None:
            raise ConfigError(
                "detect_ood needs a threshold; call fit_reference(prompts, responses) first, or give the ensemble an "
                "uncertainty_threshold"
            )
        rewards = self._standardized(self.member_rewards(prompts, responses))
        fitted = self.reference if self.uncertainty_threshold is None else None
        rate = None if fitted is None else fitted.false_positive_rate
        found = detection(rewards.std(axis=0, ddof=1), self.threshold, rate)
        return found.is_ood[0] if isinstance(responses, str) else found

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Combined rewards of the responses, float32 on the CPU, in the order given; one number for a text.

        Raises:
            ConfigError: if the aggregation compares members and `fit_reference` was not called.
        """
        rewards = torch.tensor(self.score_counted(prompts, responses).rewards, dtype=torch.float32)
        return rewards[0] if isinstance(responses, str) else rewards

    def score_counted(self, prompts: Prompts, responses: Texts) -> CountedRewards:
        """The rewards of `score`, and counts of prompts and responses that a member in this process has cut.

        Raises:
            ConfigError: as for `score`.
        """
        return self.predict_counted(prompts, responses)[1]

    def _standardized(self, rewards: MemberRewards) -> MemberRewards:
        if self.reference is None:
            if not self._has_warned:
                _log.warning(
                    "the ensemble's members are not standardized, so mean and spread mix their scales; call "
                    "fit_reference(prompts, responses)"
                )
                self._has_warned = True
            return rewards
        means, stds = np.array(self.reference.means), np.array(self.reference.stds)
        return np.asarray((rewards - means[:, None]) / stds[:, None])

    def _member(self, number: int) -> Scorer:
        """A member, loaded if necessary; valid until the next call."""
        source = self.models[number]
        return self._saved.model(str(source)) if isinstance(source, str | PathLike) else source

    def _name(self, number: int) -> str:
        model = self.models[number]
        name = str(model) if isinstance(model, str | PathLike) else type(model).__name__
        return f"member {number + 1} of the ensemble ({name})"


def _over_members(values: MemberRewards) -> Iterator[tuple[float, float, tuple[float, ...]]]:
    """Mean, standard deviation and single values of each sequence over the members."""
    means, stds = values.mean(axis=0), values.std(axis=0, ddof=1)
    return zip(means.tolist(), stds.tolist(), map(tuple, values.T.tolist()), strict=True)


def aggregate(rewards: MemberRewards, aggregation: Aggregation, penalty: float) -> Float[np.ndarray, " sequences"]:
    """Combine the members' rewards of each response.

    Example:
        >>> rewards = np.array([[1.0, 0.0], [3.0, 0.0]])
        >>> [aggregate(rewards, kind, 1.0).round(3).tolist() for kind in Aggregation]
        [[2.0, 0.0], [1.0, 0.0], [0.586, 0.0]]
    """
    if aggregation == Aggregation.min:
        return np.asarray(rewards.min(axis=0))
    mean = rewards.mean(axis=0)
    return np.asarray(mean if aggregation == Aggregation.mean else mean - penalty * rewards.std(axis=0, ddof=1))

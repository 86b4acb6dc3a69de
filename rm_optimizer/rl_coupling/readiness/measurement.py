"""Measurement of a reward model's readiness on pairs, a policy's responses and an oracle."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import clustered_share
from rm_optimizer.core.model.features import features
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.pairs.pair import PreferencePair, Prompt, digest
from rm_optimizer.core.rows.natural import Prompts, flat_groups, prompts_of
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor.diagnosis import Check, Status
from rm_optimizer.doctor.doctor import diagnose
from rm_optimizer.errors import DataError, require_known
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector
from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler, Policy
from rm_optimizer.rl_coupling.readiness import features as measures
from rm_optimizer.rl_coupling.readiness.fitted import FittedReadiness, fitted_readiness
from rm_optimizer.rl_coupling.readiness.probe import (
    Oracle,
    ProbeQuestions,
    ResponsePool,
    ScorerOracle,
    StoppingRule,
    run_probe,
)
from rm_optimizer.rl_coupling.readiness.report import (
    Algorithm,
    Evidence,
    ProbeRecord,
    ReadinessSample,
    RLReadinessReport,
    conclude,
)

OnStage = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many stages are done."""
PROBE_SIZE = 64
"""Responses among which the model picks where the fitted score asks for no other number."""
_MOST_OOD = 512
_FEWEST_OF_SLICE = 20
_STYLED_PAIRS = 256
_SCALING_PROMPTS = 16


@dataclass(frozen=True, kw_only=True)
class ReadinessOptions:
    """Sizes of a measurement.

    Args:
        num_prompts: most prompts that the policy answers.
        num_samples: responses to each, at least 2; None takes 64, or what the fitted score's probes pick from if more.
        rule: rule by which the probe stops.
        max_pairs: most labeled pairs to score.
        on_policy_pairs: random pairs of the policy's responses that the oracle compares in addition to the probe.
        group_size: responses of a group in GRPO.
        ceiling: accuracy of the true preference on the labels, in (0.5, 1]; None where it is not known.
        num_bootstrap: resamples for intervals.
        seed: seed of every random choice.
    """

    num_prompts: int = 64
    num_samples: int | None = None
    rule: StoppingRule = field(default_factory=StoppingRule)
    max_pairs: int = 2000
    on_policy_pairs: int = 256
    group_size: int = 8
    ceiling: float | None = None
    num_bootstrap: int = 1000
    seed: int = 0


def measure_readiness(
    model: BradleyTerryRM,
    pairs: PreferenceDataset,
    policy: Policy | ResponsePool | None,
    oracle: Oracle | None,
    *,
    algorithm: Algorithm | str = Algorithm.rloo_kl,
    prompts: Prompts | None = None,
    options: ReadinessOptions = ReadinessOptions(),
    trained: TrainedPairs | None = None,
    ensemble: RewardModelEnsemble | None = None,
    top_eigenvalue: float | None = None,
    on_stage: OnStage = lambda what, done, total: None,
) -> RLReadinessReport:
    """Measure whether a reward model is good enough for an algorithm to optimize a policy by.

    Args:
        model: the reward model, on its device.
        pairs: labeled pairs that the model was not trained on.
        policy: the policy to optimize, or a pool of its responses; None leaves out all that needs one.
        oracle: judge of the policy's responses; None leaves out the probe, and so the score and the verdict.
        algorithm: algorithm that is to use the model.
        prompts: prompts that the policy answers; None takes the pairs' prompts.
        options: sizes of the measurement.
        trained: record of the pairs that the model was trained on; None without a record.
        ensemble: reward models whose disagreement on the policy's responses is reported.
        top_eigenvalue: largest eigenvalue of the loss's Hessian, where it was measured; reported.
        on_stage: called with what is being done and how many of how many stages are done.

    Raises:
        CheckpointError: if a reward is not finite.
        ConfigError: if an option is out of range, or the algorithm is unknown.
        DataError: if there are too few pairs, prompts or responses, or the oracle answers nothing.
    """
    require_bradley_terry(model)
    started = time.perf_counter()
    require_known("algorithm", str(algorithm), tuple(Algorithm))
    algorithm = Algorithm(algorithm)
    asked = None if prompts is None else prompts_of("prompts", prompts)
    measured = _Measurement(model, pairs, policy, oracle, algorithm, asked, options, fitted_readiness())
    stages: list[tuple[str, Callable[[], None]]] = [
        ("gates", lambda: measured.check(trained)),
        ("pairs", measured.measure_pairs),
        ("style", measured.measure_style),
        *([("responses of the policy", measured.measure_pool), ("probe", measured.ask)] if policy is not None else []),
        ("coverage", lambda: measured.measure_unscored(ensemble, top_eigenvalue)),
    ]
    for done, (what, run) in enumerate(stages):
        on_stage(what, done, len(stages))
        run()
        if not measured.can_go_on:
            break
    return measured.report(time.perf_counter() - started)


def probe_sizes(algorithm: Algorithm | str, most: int) -> list[int]:
    """Numbers of responses that probes pick from, at most `most`: the fitted score's, or the usual one."""
    outcome = fitted_readiness().outcomes.get(algorithm)
    terms = () if outcome is None else outcome.features
    sizes = [int(term.name.removeprefix("probe_")) for term in terms if term.name.startswith("probe_")]
    return list(dict.fromkeys(min(size, most) for size in sizes or [PROBE_SIZE]))


def usual_samples(algorithm: Algorithm | str) -> int:
    """Responses to each prompt that the fitted score's probes need, 64 at least."""
    return max(PROBE_SIZE, *probe_sizes(algorithm, sys.maxsize))


@dataclass
class _Measurement:
    """The stages of one measurement, and what they found."""

    model: BradleyTerryRM
    pairs: PreferenceDataset
    policy: Policy | ResponsePool | None
    oracle: Oracle | None
    algorithm: Algorithm
    prompts: Sequence[Prompt] | None
    options: ReadinessOptions
    fit: FittedReadiness
    found: dict[str, Estimate] = field(default_factory=dict)
    unscored: dict[str, Estimate] = field(default_factory=dict)
    gates: tuple[Check, ...] = ()
    probes: list[ProbeRecord] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    num_labels: int = 0

    @cached_property
    def sample(self) -> tuple[PreferencePair, ...]:
        """The pairs that are scored."""
        return tuple(self.pairs.subset(self.options.max_pairs, self.options.seed).pairs)

    @cached_property
    def pool(self) -> ResponsePool:
        """Responses of the policy."""
        if isinstance(self.policy, ResponsePool):
            return self.policy
        assert self.policy is not None, "stages that need a pool run only where there is a policy"
        options = self.options
        prompts = self.prompts or list({pair.prompt_id: pair.prompt for pair in self.sample}.values())
        num_samples = options.num_samples or usual_samples(self.algorithm)
        sampler = BestOfNSampler(self.policy, self.model, num_samples, seed=options.seed)
        return ResponsePool.of(sampler.sample(prompts[: options.num_prompts]))

    def check(self, trained: TrainedPairs | None) -> None:
        """The doctor's checks on the model and the pairs."""
        diagnosis = diagnose(self.model, {"pairs": self.pairs}, seed=self.options.seed, trained=trained)
        self.gates = tuple(check for check in diagnosis.checks if check.status is not Status.skipped)

    @property
    def can_go_on(self) -> bool:
        """True if rewards are finite and differ, also within prompts, without which nothing else can be measured."""
        tied = self.found.get("tied_groups")
        spread = all(check.status is not Status.fail for check in self.gates if check.name == "reward_spread")
        return spread and (tied is None or tied.value < 1)

    def measure_pairs(self) -> None:
        """Accuracy, worst slice and proper scores on labeled pairs."""
        options, pairs = self.options, self.sample
        groups = self.model.score_groups([pair.prompt for pair in pairs], [(p.chosen, p.rejected) for p in pairs])
        margin = np.array([float(rewards[0]) - float(rewards[1]) for rewards in groups])
        label, prompt = np.array([pair.label for pair in pairs]), [pair.prompt_id for pair in pairs]
        accuracy = measures.pair_accuracy(margin, prompt, label)
        self.found["accuracy"] = accuracy
        self.found["accuracy_relative"] = measures.relative_to_ceiling(accuracy, self._ceiling())
        resampling = {"num_bootstrap": options.num_bootstrap, "seed": options.seed}
        if (slices := _slices(pairs)) is not None:
            worst = measures.worst_slice_accuracy(margin, slices, prompt, label, **resampling)
            self.found["worst_slice_accuracy"] = worst
        scores = measures.tempered_scores(self.model.beta * margin, prompt, label, **resampling)
        self.found |= {"nll": scores.nll, "brier": scores.brier}
        if scores.temperature.temperature is not None:
            self.unscored["temperature"] = Estimate(scores.temperature.temperature, None, len(pairs))

    def measure_style(self) -> None:
        """Preferences that a change of style turns."""
        self.found |= measures.style_flips(self.model, self.sample[:_STYLED_PAIRS])

    def measure_pool(self) -> None:
        """Spread of the rewards on the policy's responses, and how they follow length."""
        pool, options = self.pool, self.options
        resampling = {"num_bootstrap": options.num_bootstrap, "seed": options.seed}
        self.found["reward_spread"] = measures.reward_spread(pool.rewards, **resampling)
        self.found["tied_groups"] = measures.tied_groups(pool.rewards, min(options.group_size, pool.rewards.shape[1]))
        self.found["length_correlation"] = measures.length_sensitivity(pool.rewards, pool.lengths, **resampling)

    def ask(self) -> None:
        """Probes, and the accuracy on random pairs of the policy's responses."""
        if self.oracle is None:
            return
        options, pool, oracle = self.options, self.pool, self.oracle
        if isinstance(oracle, ScorerOracle):
            oracle = oracle.as_rater(pool.prompts[:_SCALING_PROMPTS], pool.responses[:_SCALING_PROMPTS])
        for n in probe_sizes(self.algorithm, pool.rewards.shape[1]):
            record = run_probe(pool, oracle, n, options.rule, seed=options.seed)
            self.probes.append(record)
            self.num_labels += record.num_labels
            self.found[f"probe_{n}"] = record.win_rate
        if not options.on_policy_pairs:
            return
        num_prompts, num_samples = pool.rewards.shape
        rng = np.random.default_rng([options.seed, 5])
        prompt = np.resize(rng.permutation(num_prompts), options.on_policy_pairs)
        first = rng.integers(num_samples, size=len(prompt))
        second = (first + 1 + rng.integers(num_samples - 1, size=len(prompt))) % num_samples
        asked = ProbeQuestions(prompt, first, second)
        label = pool.compared(oracle, asked)
        known = np.isfinite(label) & (label != 0.5)
        self.num_labels += pool.num_labels(label, asked)
        if known.any():
            margin = pool.rewards[prompt, first] - pool.rewards[prompt, second]
            self.found["on_policy_accuracy"] = measures.pair_accuracy(margin[known], prompt[known], label[known])

    def measure_unscored(self, ensemble: RewardModelEnsemble | None, top_eigenvalue: float | None) -> None:
        """Disagreement, coverage of the policy's responses by the pairs, and curvature."""
        if top_eigenvalue is not None:
            self.unscored["top_eigenvalue"] = Estimate(top_eigenvalue, None, 0)
        if self.policy is None:
            return
        if ensemble is not None:
            members = ensemble.member_rewards(*flat_groups(self.pool.prompts, self.pool.responses)[:2])
            by_prompt = members.reshape(len(members), *self.pool.rewards.shape)
            self.unscored["epistemic_std"] = measures.epistemic_std(by_prompt)
        if (share := self._uncovered()) is not None:
            self.unscored["policy_out_of_distribution"] = share

    def report(self, wall_seconds: float) -> RLReadinessReport:
        """The verdict, with all that was measured."""
        found = conclude(Evidence(self.algorithm, self.found, self.gates, self.probes, self.unscored), self.fit)
        pool = None if self.policy is None or not self.found else self.pool
        return replace(
            found,
            cautions=(*found.cautions, *self.cautions),
            sample=ReadinessSample(
                num_pairs=len(self.sample),
                num_prompts=0 if pool is None else len(pool.prompts),
                num_responses=0 if pool is None else pool.rewards.shape[1],
                num_labels=self.num_labels,
                model=scorer_digest(self.model),
                responses="" if pool is None else digest([list(texts) for texts in pool.responses]),
                seed=self.options.seed,
                wall_seconds=wall_seconds,
            ),
        )

    def _ceiling(self) -> float:
        """Ceiling of the accuracy: as given, or an exact gold reward's own accuracy on the pairs, or 1."""
        if self.options.ceiling is not None:
            return self.options.ceiling
        if isinstance(self.oracle, ScorerOracle) and self.oracle.is_exact:
            first, second = [pair.chosen for pair in self.sample], [pair.rejected for pair in self.sample]
            label = np.array([pair.label for pair in self.sample])
            with suppress(DataError):  # the gold reward does not know the prompts
                wins = self.oracle.prefer([pair.prompt for pair in self.sample], first, second)
                accuracy = measures.pair_accuracy(wins - 0.5, np.arange(len(wins)), label).value
                if accuracy > 0.5:
                    return accuracy
        self.cautions.append(
            "the noise of the labels is not known, so accuracy_relative is relative to 1 and too low; give --ceiling, "
            "the accuracy of an expert on the same labels"
        )
        return 1.0

    def _uncovered(self) -> Estimate | None:
        """Share of the policy's responses that 95 % of the pairs' responses are nearer than; None for too few pairs."""
        rng = np.random.default_rng([self.options.seed, 7])
        pairs = self.sample[:_MOST_OOD]
        known = [(pair.prompt, pair.chosen if rng.random() < 0.5 else pair.rejected) for pair in pairs]
        rows, columns = (axis.ravel() for axis in np.indices(self.pool.rewards.shape))
        kept = rng.permutation(len(rows))[:_MOST_OOD]
        drawn = [(self.pool.prompts[rows[place]], self.pool.responses[rows[place]][columns[place]]) for place in kept]
        try:
            detector = MahalanobisDetector(self._features(known), seed=self.options.seed)
        except DataError:
            return None
        is_far = np.array(detector.detect(self._features(drawn)).is_ood, dtype=np.float64)
        return clustered_share(is_far, rows[kept])

    def _features(self, texts: Iterable[tuple[Prompt, str]]) -> np.ndarray:
        return features(self.model, self.model.renderer.ids_of(texts)).numpy()


def _slices(pairs: Sequence[PreferencePair]) -> list[str] | None:
    """Slice of each pair, its subset or else its source, small ones together; None where there is only one."""
    for column in ("subset", "source"):
        values = [str(pair.metadata.get(column, "")) for pair in pairs]
        counts = Counter(values)
        kept = [value if counts[value] >= _FEWEST_OF_SLICE else "(other)" for value in values]
        if len(set(kept)) > 1:
            return kept
    return None

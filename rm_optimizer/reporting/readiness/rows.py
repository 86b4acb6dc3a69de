"""Numbers of a readiness report with plain descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.rl_coupling.readiness.report import RLReadinessReport

_WORDS: Mapping[str, tuple[str, str]] = {
    "on_policy_accuracy": ("accuracy on the policy's responses", "random pairs of them, judged by the oracle"),
    "accuracy": ("accuracy on labeled pairs", "chance is 0.5"),
    "accuracy_relative": ("accuracy relative to the labels' noise", "0 is chance, 1 the best that labels allow"),
    "worst_slice_accuracy": ("accuracy on the worst slices", "20 % quantile over subsets or sources"),
    "nll": ("NLL after temperature", "chance is 0.693; lower is better"),
    "brier": ("Brier score after temperature", "chance is 0.25; lower is better"),
    "reward_spread": ("reward variance within prompts", "share of all variance; a low share slows PPO and RLOO"),
    "tied_groups": ("groups of equal rewards", "GRPO gets no gradient from them"),
    "length_correlation": ("correlation with length", "within prompts; 0 is indifferent to length"),
    "style_flips": ("preferences turned by style", "the loser is edited in style alone; 0 is best"),
    "epistemic_std": ("disagreement of the ensemble", "standard deviations of the reward within prompts"),
    "policy_out_of_distribution": ("policy's responses unlike the pairs", "0.05 if they are alike"),
    "top_eigenvalue": ("top eigenvalue of the Hessian", "sharpness; not known to predict anything here"),
    "temperature": ("temperature that calibrates", "above 1 the model is over-confident"),
}

_CHANCE = {"accuracy": 0.5, "worst_slice_accuracy": 0.5, "on_policy_accuracy": 0.5, "accuracy_relative": 0.0}
_SHARES = (*_CHANCE, "reward_spread", "tied_groups", "style_flips", "policy_out_of_distribution")


@dataclass(frozen=True)
class ReadinessRow:
    """One measured number.

    Args:
        name: its name in the report.
        title: its name in words.
        value: the number.
        meaning: scale, or what it is good for, in words.
        contribution: change of the score that it makes; None if it takes no part.
    """

    name: str
    title: str
    value: Estimate
    meaning: str
    contribution: float | None


def readiness_rows(report: RLReadinessReport) -> list[ReadinessRow]:
    """Rows of all measured numbers: the score's own, then the probe, then the others in their order."""
    found = {**report.features, **report.unscored}

    def place(name: str) -> tuple[bool, bool, int]:
        return (name not in report.components, not name.startswith("probe_"), order.index(name))

    order = [name for known in _WORDS for name in found if name == known or name.startswith(f"{known}_edit_")]
    order += [name for name in found if name not in order]
    words = {name: _words(name) for name in sorted(found, key=place)}
    return [
        ReadinessRow(name, title, found[name], meaning, report.components.get(name))
        for name, (title, meaning) in words.items()
    ]


def _words(name: str) -> tuple[str, str]:
    """Title and meaning of a number."""
    if name.startswith("probe_"):
        of = name.removeprefix("probe_")
        return f"model's pick of {of} preferred", "by the oracle, against another response; chance is 0.5"
    if name.startswith("style_flips_edit_"):
        return f"… by the edit {name.removeprefix('style_flips_edit_')}", ""
    return _WORDS.get(name, (name.replace("_", " "), ""))


def sample_line(report: RLReadinessReport) -> str:
    """Data behind a measurement in one line; empty for a score from given numbers."""
    sample = report.sample
    if sample is None:
        return ""
    parts = [f"{sample.num_pairs:,} labeled pairs"]
    if sample.num_prompts:
        parts.append(f"{sample.num_prompts:,} prompts with {sample.num_responses:,} responses each")
    parts += [f"{sample.num_labels:,} comparisons by the oracle", f"seed {sample.seed}", f"{sample.wall_seconds:.0f} s"]
    return ", ".join(parts)


def probe_lines(report: RLReadinessReport) -> list[str]:
    """One sentence for each probe: its question, and the reason why it stopped."""
    return [
        f"probe of {probe.n}: {probe.num_questions:,} of at most {probe.max_questions:,} questions, "
        f"{probe.num_labels:,} answers{f', {probe.num_open:,} left open' if probe.num_open else ''}; "
        f"stopped because {probe.stopped}"
        for probe in report.probes
    ]


def is_share(name: str) -> bool:
    """True for a number between 0 and 1 that is drawn; the numbers of single edits are not drawn."""
    return name in _SHARES or name.startswith("probe_")


def chance_of(name: str) -> float | None:
    """Value by chance; None without one."""
    return 0.5 if name.startswith("probe_") else _CHANCE.get(name)

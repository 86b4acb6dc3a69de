"""Checks of the pairs: leaks, repeats, contradictions, labels, lengths and truncation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

from rm_optimizer.core.metrics.intervals import wilson_interval
from rm_optimizer.core.pairs.pair import Prompt, as_messages, folded_words
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.tokens.audit import DataAudit
from rm_optimizer.core.tokens.content_rules import READINGS
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.doctor.diagnosis import Check, MeasuredValue, Status, judged, skipped
from rm_optimizer.schema.data import SpecialTokens

MOST_REPEATS, MOST_CONTRADICTIONS = 0.01, 0.01
"""Shares of repeated pairs and of contradictions above which a data set gets a warning."""
MOST_TRUNCATED, MOST_RESPONSES_CUT = 0.10, 0.01
"""Shares of pairs that lost tokens, and of pairs that lost tokens of a response, above which there is a warning."""
MOST_IDENTICAL = 0.05
"""Share of pairs equal after truncation above which the check fails."""
LENGTH_BIAS = 0.60
"""Accuracy of "the longer response wins" from which a data set gets a warning."""
MARKER_BIAS = 0.80
"""The same for "the response with a certain word wins"."""


def split_leakage(data: Mapping[str, PreferenceDataset]) -> Check:
    """No prompt is in two data sets, not even with other capital letters, spaces or one more word."""
    expected = "0 prompts in two data sets"
    if len(data) < 2:
        return skipped(expected, "there is one data set; give training and validation data to compare")
    exact = {name: set(dataset.prompt_ids) for name, dataset in data.items()}
    words = {name: {_words(pair.prompt) for pair in dataset.pairs} for name, dataset in data.items()}
    alike = {couple: _alike(words[couple[0]], words[couple[1]]) for couple in itertools.combinations(data, 2)}
    details: dict[str, MeasuredValue] = {f"{a} / {b}": len(found) for (a, b), found in alike.items()}
    num_exact = len(set().union(*(exact[a] & exact[b] for a, b in alike)))
    num_alike = len(set().union(*alike.values()))
    how = "" if num_exact else " but for case, spacing or a word at one end"
    bad = f"{num_alike} prompts are in two data sets{how}, so validation is too good; split by prompt"
    verdict = (not num_alike, num_alike, "prompts", expected, "no prompt is in two data sets", bad)
    otherwise = Status.fail if num_exact else Status.warn
    return judged(*verdict, otherwise=otherwise, details=details)


def _words(prompt: Prompt) -> tuple[str, ...]:
    return tuple(word for message in as_messages(prompt) for word in folded_words(message.content))


def _alike(first: set[tuple[str, ...]], second: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Prompts of `second` that are in `first`, or have one word more or less at one end, of at least four."""
    shorter = {part for words in first if len(words) > 3 for part in (words[1:], words[:-1])}
    longer = {words for words in second if len(words) > 3 and not first.isdisjoint((words[1:], words[:-1]))}
    return second & (first | shorter) | longer


def unseen_pairs(data: Mapping[str, PreferenceDataset], trained: TrainedPairs | None) -> Check:
    """Share of the pairs that the model was trained on, according to the record saved with the model."""
    expected = "0"
    if trained is None:
        return skipped(expected, "the model has no record of what it was trained on")
    seen = {name: trained.count(dataset.pairs).num_pairs for name, dataset in data.items()}
    num_pairs = sum(len(dataset) for dataset in data.values())
    share = sum(seen.values()) / num_pairs
    details: dict[str, MeasuredValue] = {name: count / len(data[name]) for name, count in seen.items()}
    bad = (
        f"{sum(seen.values()):,} of {num_pairs:,} pairs were trained on, so label_agreement, beats_length and the "
        "probes of hidden states are too good; give pairs that were held out"
    )
    verdict = (not share, share, "share of pairs", expected, "no pair was trained on", bad)
    return judged(*verdict, otherwise=Status.warn, details=details)


def _worst_share(
    count: str, most: float, remedy: str, name: str, audit: DataAudit, *, fails_above: float = 1.0
) -> Check:
    """Check that a count of `SplitAudit`, as a share of the pairs, is small in every data set."""
    shares = {where: float(getattr(split, count)) / max(1, split.num_pairs) for where, split in audit.splits.items()}
    where, share = max(shares.items(), key=lambda item: item[1])
    good = f"{name.replace('_', ' ')}: {share:.1%} of the pairs of {where}"
    verdict = (share <= most, share, "share of pairs", f"at most {most:g}", good, f"{good}; {remedy}")
    return judged(*verdict, otherwise=Status.fail if share > fails_above else Status.warn, details=shares)


def _control_tokens(name: str, audit: DataAudit) -> Check:
    tokens = dict.fromkeys(token for split in audit.splits.values() for token in split.control_tokens)
    remedy = f"{', '.join(list(tokens)[:5])} {READINGS[audit.special_tokens]}; give rendered prompts as messages"
    if audit.special_tokens == SpecialTokens.keep:
        remedy += ", and clean texts, or train with data.special_tokens=as_text"
    return _worst_share("num_control_tokens", 0.0, remedy, name, audit)


def _rule(name: str, audit: DataAudit, *, rule: str, limit: float, remedy: str) -> Check:
    """Check that a trivial rule, whose accuracy is the field `name` of an audit, does not predict the labels."""
    expected = f"below {limit:g}, or not above {limit - 0.1:g} beyond its interval"
    found = {where: getattr(split, name) for where, split in audit.splits.items() if getattr(split, name).num_samples}
    if not found:
        return skipped(expected, "no pair has a better response")
    where, worst = max(found.items(), key=lambda item: float(item[1].value))
    low, high = wilson_interval(worst.value, worst.num_samples)
    chosen = rule.format(split=audit.splits[where])
    good = f'"the {chosen} wins" is right on {worst.value:.1%} of the pairs of {where}'
    details = {"low": low, "high": high} | {where: estimate.value for where, estimate in found.items()}
    is_good = worst.value < limit or low <= limit - 0.1
    verdict = (is_good, worst.value, "accuracy", expected, good, f"{good}; {remedy}")
    return judged(*verdict, otherwise=Status.warn, details=details)


_ONE_ORDER = "keep one order, or give the pair a label between 0 and 1"
_UNREAD_END = "raise max_length, as the end of a response is not read"
_EQUAL = "they are equal after truncation, so training drops them: raise max_length"
AUDITED: dict[str, Callable[..., Check]] = {
    "repeated_pairs": partial(_worst_share, "num_duplicates", MOST_REPEATS, "remove the copies"),
    "contradictions": partial(_worst_share, "num_contradictions", MOST_CONTRADICTIONS, _ONE_ORDER),
    "truncation_rate": partial(_worst_share, "num_truncated", MOST_TRUNCATED, "raise max_length if it fits"),
    "response_truncation": partial(_worst_share, "num_response_cut", MOST_RESPONSES_CUT, _UNREAD_END),
    "blank_differences": partial(_worst_share, "num_blank_only", MOST_REPEATS, "remove these pairs"),
    "control_tokens": _control_tokens,
    "identical_pairs": partial(_worst_share, "num_identical", 0.0, _EQUAL, fails_above=MOST_IDENTICAL),
    "longer_wins": partial(
        _rule,
        rule="longer response",
        limit=LENGTH_BIAS,
        remedy="compare the model with this baseline, and balance lengths or add a length penalty",
    ),
    "marker_wins": partial(
        _rule,
        rule="response {split.marker}",
        limit=MARKER_BIAS,
        remedy="a model can learn this word in place of the preference, so remove it from the texts, or balance it",
    ),
}
"""Checks of the audited pairs; the worst data set decides, and the details contain all of them."""


def labels(data: Mapping[str, PreferenceDataset]) -> Check:
    """Labels decide which response is better."""
    pairs = [pair for dataset in data.values() for pair in dataset.pairs]
    undecided = sum(pair.label == 0.5 for pair in pairs) / max(1, len(pairs))
    details: dict[str, MeasuredValue] = {
        "rejected_preferred": sum(pair.label < 0.5 for pair in pairs),
        "soft_labels": sum(pair.label not in (0.0, 0.5, 1.0) for pair in pairs),
    }
    good = f"{1 - undecided:.1%} of the pairs have a better response"
    bad = f"{undecided:.1%} of the pairs have label 0.5 and teach no preference; check the label column"
    verdict = (undecided <= 0.5, undecided, "share of pairs without a better response", "at most 0.5", good, bad)
    return judged(*verdict, otherwise=Status.fail if undecided == 1 else Status.warn, details=details)


def margins(data: Mapping[str, PreferenceDataset]) -> Check:
    """Margins agree with the labels, and all pairs have one or none has."""
    pairs = [pair for dataset in data.values() for pair in dataset.pairs]
    with_margin = [pair for pair in pairs if pair.margin is not None]
    num_contrary = sum((pair.margin or 0.0) * (pair.label - 0.5) < 0 for pair in with_margin)
    details: dict[str, MeasuredValue] = {"with_margin": len(with_margin), "contrary_margins": num_contrary}
    good = f"{len(with_margin)} of {len(pairs)} pairs have a margin, none against its label"
    bad = f"{len(with_margin)} of {len(pairs)} pairs have a margin; give one to all pairs, or to none"
    if num_contrary:
        bad = f"{num_contrary} margins contradict their labels; check the margin's sign and column"
    is_good = not num_contrary and len(with_margin) in (0, len(pairs))
    expected, unit = "0, and a margin for all pairs or none", "margins against their label"
    return judged(is_good, num_contrary, unit, expected, good, bad, otherwise=Status.warn, details=details)

"""Audit of a data set before training: repeats, contradictions, lengths, leaks, trivial baseline."""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rm_optimizer.core.metrics.estimate import UNKNOWN, Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals, ratios, with_honest_width
from rm_optimizer.core.pairs.pair import PreferencePair, as_messages
from rm_optimizer.core.pairs.source_pairs import SourcePairs
from rm_optimizer.core.rows.messages import shown_response, turns_of
from rm_optimizer.core.tokens.cache import cut_counts, encoded_chunks
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.content_rules import READINGS, control_tokens
from rm_optimizer.core.tokens.dataset import PreferenceDataset, prompt_ids
from rm_optimizer.core.tokens.splits import num_leaked_pairs
from rm_optimizer.core.tokens.template_fields import split_thinking
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.schema.data import SpecialTokens

SHOWN_CHARACTERS = 160
"""Most characters of a text of an example."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""Quantiles of the token lengths; the last is the longest."""


_WORD = re.compile(r"\w+|[^\w\s]")


def example_lines(pair: PreferencePair, most: int = SHOWN_CHARACTERS) -> list[tuple[str, str]]:
    """A pair as it was understood: each message before the responses by its role, and both sides by their preference.

    Args:
        pair: the pair.
        most: characters after which a text is cut.
    """
    better = {1.0: "better", 0.0: "worse"}.get(pair.label, f"better with P={pair.label:g}")
    worse = {1.0: "worse", 0.0: "better"}.get(pair.label, "other")
    sides = {f"chosen ({better})": pair.chosen, f"rejected ({worse})": pair.rejected}
    texts = [(message.role, message.shown()) for message in as_messages(pair.prompt)]
    texts += [(title, shown_response(response)) for title, response in sides.items()]
    lines = [(title, " ".join(text.split())) for title, text in texts]
    return [(title, line if len(line) <= most else f"{line[:most]}…") for title, line in lines]


def layout_examples(data: SourcePairs) -> Iterator[str]:
    """The first pair of each layout that the rows have, a line for each text, cut to the width of the terminal."""
    first = {row.tally.layout: pair for row, pair in zip(reversed(data.rows), reversed(data.pairs), strict=False)}
    for name, pair in first.items():
        lines = example_lines(pair, max(40, shutil.get_terminal_size((SHOWN_CHARACTERS, 24)).columns - 30))
        told = "".join(f"\n  {title}: {text}" for title, text in lines)
        if name:
            yield f"layout {name}: the first pair as it was understood{told}"


@dataclass(frozen=True)
class SourceAudit:
    """One source's part of a split.

    Args:
        num_pairs: its pairs.
        num_prompts: different prompts.
        longer_wins: accuracy of calling the longer response better, ties one half.
    """

    num_pairs: int
    num_prompts: int
    longer_wins: Estimate


@dataclass(frozen=True)
class SplitAudit:
    """One data set.

    Args:
        num_pairs: pairs, repeats by mixing weight included.
        num_skipped: rows that gave no pair.
        num_prompts: different prompts.
        num_duplicates: pairs equal to an earlier one in prompt, chosen and rejected; not repeats by mixing weight.
        num_contradictions: comparisons that occur in both orders.
        num_identical: pairs whose two sides are the same tokens after truncation; training drops them.
        num_truncated: pairs of which a side lost tokens.
        num_uneven_cut: pairs whose two sides lost different parts of their common prompt.
        num_response_cut: pairs of which a response lost tokens.
        chosen_tokens: quantiles `QUANTILES` of the tokens of prompt and chosen together, before truncation.
        rejected_tokens: the same quantiles of prompt and rejected together.
        longer_wins: accuracy of calling the longer response better, ties one half.
        num_margins: pairs with a margin.
        num_zero_labels: pairs with label 0, of which the rejected response is the better one.
        num_soft_labels: pairs whose label is neither 0 nor 1.
        sources: the same numbers by source, largest first.
        num_control_tokens: pairs with a control token inside a message or response. A prompt that another template has
            rendered holds some.
        control_tokens: these tokens, most frequent first.
        num_blank_only: pairs whose two responses differ in blanks and line breaks alone.
        marker: the single word or sign that best tells the better response, as `with 'sure'` or `without 'sorry'`.
        marker_wins: accuracy of calling the response with it, or without it, better; pairs that have it in both
            responses or in none count one half.
    """

    num_pairs: int
    num_skipped: int
    num_prompts: int
    num_duplicates: int
    num_contradictions: int
    num_identical: int
    num_truncated: int
    num_uneven_cut: int
    num_response_cut: int
    chosen_tokens: tuple[float, ...]
    rejected_tokens: tuple[float, ...]
    longer_wins: Estimate
    num_margins: int
    num_zero_labels: int
    num_soft_labels: int
    sources: Mapping[str, SourceAudit]
    num_control_tokens: int = 0
    control_tokens: tuple[str, ...] = ()
    num_blank_only: int = 0
    marker: str = ""
    marker_wins: Estimate = UNKNOWN


@dataclass(frozen=True)
class PromptOverlap:
    """Prompts that are in two splits.

    Args:
        first: name of one split.
        second: name of the other.
        num_prompts: different prompts in both.
        num_pairs_first: pairs of the first on them.
        num_pairs_second: pairs of the second on them.
        num_continued_second: pairs of the second, on other prompts, of a conversation of which the first has an earlier
            or a later turn.
    """

    first: str
    second: str
    num_prompts: int
    num_pairs_first: int
    num_pairs_second: int
    num_continued_second: int = 0


@dataclass(frozen=True)
class DataAudit(JsonRecord):
    """The audit of one or more splits.

    Args:
        splits: audit of each split, by its name.
        overlaps: prompts that are in two splits.
        special_tokens: rule for control tokens inside texts that the renderer has.
    """

    splits: Mapping[str, SplitAudit]
    overlaps: tuple[PromptOverlap, ...]
    special_tokens: SpecialTokens = SpecialTokens.keep


def audit_pairs(
    datasets: Mapping[str, PreferenceDataset], renderer: ConversationRenderer, special_tokens: Sequence[str] = ()
) -> DataAudit:
    """Audit each data set and the overlap of prompts between each two.

    Args:
        datasets: data sets by the name of their split.
        renderer: renderer of the conversations; its length limit decides which are truncated.
        special_tokens: special tokens of its tokenizer, which are counted as well as the tokens of common families.
    """
    control = control_tokens(special_tokens)
    splits = {name: _audit_split(dataset, renderer, control) for name, dataset in datasets.items()}
    overlaps = []
    for (first, earlier), (second, later) in itertools.combinations(datasets.items(), 2):
        shared = set(earlier.prompt_ids) & set(later.prompt_ids)
        on_first, on_second = (sum(each in shared for each in data.prompt_ids) for data in (earlier, later))
        num_leaked = num_leaked_pairs(earlier, later)
        overlaps.append(PromptOverlap(first, second, len(shared), on_first, on_second, num_leaked))
    return DataAudit(splits, tuple(overlaps), renderer.rules.special_tokens)


def _audit_split(dataset: PreferenceDataset, renderer: ConversationRenderer, control: re.Pattern[str]) -> SplitAudit:
    # Without the ids, which would fill the memory for large data sets.
    parts = [(chunk.lengths, chunk.cuts, chunk.differ) for chunk in encoded_chunks(dataset.pairs, renderer)]
    kept, cuts, differ = map(np.concatenate, zip(*parts, strict=True))
    lengths, counts = kept + cuts.sum(axis=2), cut_counts(cuts)
    quantiles = np.quantile(lengths, QUANTILES, axis=0).T if len(lengths) else np.full((2, len(QUANTILES)), np.nan)
    members: dict[str, list[PreferencePair]] = {}
    for pair in dataset.pairs:
        members.setdefault(str(pair.metadata.get("source", "unnamed")), []).append(pair)
    num_duplicates, num_contradictions = _repeats(dataset)
    marker, marker_wins = _marker(dataset.pairs)
    found = _control_tokens(dataset.pairs, control)
    return SplitAudit(
        num_pairs=len(dataset),
        num_skipped=len(dataset.skipped),
        num_prompts=len(set(dataset.prompt_ids)),
        num_duplicates=num_duplicates,
        num_contradictions=num_contradictions,
        num_identical=int((~differ).sum()),
        num_truncated=int(cuts.any(axis=(1, 2)).sum()),
        num_uneven_cut=counts["num_uneven_prompt_cut"],
        num_response_cut=counts["num_response_cut"],
        chosen_tokens=tuple(quantiles[0].tolist()),
        rejected_tokens=tuple(quantiles[1].tolist()),
        longer_wins=length_baseline(dataset.pairs),
        num_margins=sum(pair.margin is not None for pair in dataset.pairs),
        num_zero_labels=sum(pair.label == 0.0 for pair in dataset.pairs),
        num_soft_labels=sum(0.0 < pair.label < 1.0 for pair in dataset.pairs),
        sources={
            name: SourceAudit(len(pairs), len(set(prompt_ids(pairs))), length_baseline(pairs))
            for name, pairs in sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
        },
        num_control_tokens=len(found),
        control_tokens=tuple(token for token, _ in Counter(sorted(itertools.chain(*found))).most_common()),
        num_blank_only=sum(pair.chosen.split() == pair.rejected.split() for pair in dataset.pairs),
        marker=marker,
        marker_wins=marker_wins,
    )


def _control_tokens(pairs: Sequence[PreferencePair], control: re.Pattern[str]) -> list[set[str]]:
    """Control tokens inside the texts of each pair that has some."""
    texts = (
        "\0".join([*(message.shown() for message in as_messages(pair.prompt)), pair.chosen, pair.rejected])
        for pair in pairs
    )
    return [tokens for text in texts if (tokens := set(control.findall(text)))]


def content_notes(pairs: Sequence[PreferencePair], renderer: ConversationRenderer) -> tuple[str, ...]:
    """Sentences on training pairs with control tokens, or with an empty thinking block in one response alone."""
    notes = []
    if found := _control_tokens(pairs, control_tokens(renderer.tokenizer.all_special_tokens)):
        named = ", ".join(sorted(set().union(*found))[:3])
        reading = READINGS[renderer.rules.special_tokens]
        notes.append(f"{len(found)} of {len(pairs)} training pairs hold control tokens ({named}), which {reading}")
    uneven = [pair for pair in pairs if _opens_empty(pair.chosen) != _opens_empty(pair.rejected)]
    if uneven and renderer.text("Hi", "<think>\n\n</think>\n\nSo.") != renderer.text("Hi", "So."):
        notes.append(
            f"{len(uneven)} of {len(pairs)} training pairs have an empty thinking block in one response alone, which "
            "changes its tokens; data.thinking=strip takes it out"
        )
    return tuple(notes)


def _opens_empty(response: str) -> bool:
    """True if the last turn of the response begins with a thinking block without thoughts."""
    content = turns_of(response)[-1].content
    thinking, answer = split_thinking(content)
    return not thinking and answer != content


def _repeats(dataset: PreferenceDataset) -> tuple[int, int]:
    """Surplus pairs, and unordered comparisons that were decided both ways; labels of 0.5 decide nothing."""
    originals = [
        (identity, pair.chosen, pair.rejected, pair.label)
        for identity, pair in zip(dataset.prompt_ids, dataset.pairs, strict=True)
        if "copy" not in pair.metadata
    ]
    distinct = {row[:3] for row in originals}
    wins = {(i, a, b) if label > 0.5 else (i, b, a) for i, a, b, label in originals if label != 0.5}
    num_contradictions = sum((identity, worse, better) in wins for identity, better, worse in wins) // 2
    return len(originals) - len(distinct), num_contradictions


def length_baseline(pairs: Sequence[PreferencePair]) -> Estimate:
    """Accuracy of calling the response with more characters the better one, equal lengths one half.

    Weighted and oriented by label like the accuracy of a model: below 0.5 `rejected` is the better one, and pairs
    labeled 0.5 do not count. The standard error is the jackknife's over prompts, as pairs of one prompt are not
    independent.

    Args:
        pairs: the pairs; the value is NaN if none of them has a better side.

    Example:
        >>> length_baseline([PreferencePair("a?", "long", "no"), PreferencePair("b?", "1", "22")]).value
        0.5
    """
    if not (decided := [pair for pair in pairs if pair.label != 0.5]):
        return UNKNOWN
    gap = np.sign([(len(pair.chosen) - len(pair.rejected)) * (pair.label - 0.5) for pair in decided])
    weight = np.array([pair.weight for pair in decided])
    sums = cluster_totals(np.stack([weight * (0.5 + 0.5 * gap), weight], axis=1), prompt_ids(decided))
    estimate = cluster_bootstrap(sums, ratios, num_bootstrap=0, seed=0)[0]
    return with_honest_width(estimate, sums[:, 1], bounds=(0.0, 1.0))


def _marker(pairs: Sequence[PreferencePair]) -> tuple[str, Estimate]:
    """The best marker and its accuracy, as in `SplitAudit`."""
    leads, decided = Counter[str](), [pair for pair in pairs if pair.label != 0.5]
    for pair in decided:
        chosen, rejected = (set(_WORD.findall(text.casefold())) for text in (pair.chosen, pair.rejected))
        (leads.update if pair.label > 0.5 else leads.subtract)(chosen - rejected)
        (leads.subtract if pair.label > 0.5 else leads.update)(rejected - chosen)
    if not leads:
        return "", UNKNOWN
    word, lead = max(leads.items(), key=lambda item: (abs(item[1]), item[0]))
    value = 0.5 + abs(lead) / (2 * len(decided))
    return f"{'with' if lead > 0 else 'without'} {word!r}", Estimate(value, None, len(set(prompt_ids(decided))))

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import Message, PreferencePair, Prompt, as_messages
from rm_optimizer.core.pairs.source_pairs import SourcePairs
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.core.tokens.audit import QUANTILES, DataAudit, PromptOverlap, audit_pairs, length_baseline
from rm_optimizer.core.tokens.content_rules import ContentRules


@dataclass(frozen=True)
class Encoded:
    ids: tuple[int, ...]
    prompt_cut: int
    response_cut: int


class CharacterRenderer:
    """One token a character; the prompt is cut from the left, then the response from the right."""

    rules = ContentRules()

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.num_calls = 0

    def encode_batch(self, prompts: list[Prompt], responses: list[str]) -> list[Encoded]:
        return [self.encode(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def encode(self, prompt: Prompt, response: str) -> Encoded:
        self.num_calls += 1
        text = "".join(message.content for message in as_messages(prompt))
        response_cut = max(0, len(response) - self.max_length)
        kept = response[: len(response) - response_cut]
        prompt_cut = max(0, len(text) + len(kept) - self.max_length)
        return Encoded(tuple(map(ord, text[prompt_cut:] + kept)), prompt_cut, response_cut)


def audit_of(*pairs: PreferencePair, max_length: int = 10) -> DataAudit:
    return audit_pairs({"train": PreferenceDataset(pairs)}, CharacterRenderer(max_length))


def test_repeats_and_contradictions_are_counted():
    pair, reverse = PreferencePair("p", "a", "b"), PreferencePair((Message("user", "p"),), "b", "a")
    copy = PreferencePair("p", "a", "b", metadata={"copy": 1})
    split = audit_of(pair, pair, reverse, copy, PreferencePair("q", "b", "a")).splits["train"]
    assert (split.num_pairs, split.num_prompts) == (5, 2)
    assert (split.num_duplicates, split.num_contradictions) == (1, 1)


def test_labels_decide_the_order_that_contradicts():
    pair = PreferencePair("p", "a", "b")
    assert audit_of(pair, PreferencePair("p", "a", "b", label=0.2)).splits["train"].num_contradictions == 1
    assert audit_of(pair, PreferencePair("p", "b", "a", label=0.2)).splits["train"].num_contradictions == 0
    assert audit_of(pair, PreferencePair("p", "b", "a", label=0.5)).splits["train"].num_contradictions == 0


def test_truncation_is_counted_by_pair():
    split = audit_of(
        PreferencePair("p", "short", "brief"),
        PreferencePair("a long prompt", "short", "brief"),
        PreferencePair("p", "0123456789", "0123456789, and more"),
        PreferencePair("p", "a longer one is this", "b"),
    ).splits["train"]
    assert (split.num_truncated, split.num_response_cut, split.num_identical) == (3, 2, 1)


def test_token_lengths_are_those_before_truncation():
    pairs = [PreferencePair("p", "x" * i, "y") for i in range(1, 101)]
    split = audit_of(*pairs).splits["train"]
    assert len(QUANTILES) == len(split.chosen_tokens)
    assert split.chosen_tokens == pytest.approx([1 + 1 + 99 * q for q in QUANTILES])
    assert split.rejected_tokens == (2.0,) * len(QUANTILES)


def test_prompt_overlap_is_counted_between_each_two_splits():
    def split(*prompts: str) -> PreferenceDataset:
        return PreferenceDataset(PreferencePair(prompt, "a", "b") for prompt in prompts)

    audit = audit_pairs({"x": split("p", "p", "q"), "y": split("p", "r"), "z": split("s")}, CharacterRenderer(9))
    assert audit.overlaps == (
        PromptOverlap("x", "y", 1, 2, 1),
        PromptOverlap("x", "z", 0, 0, 0),
        PromptOverlap("y", "z", 0, 0, 0),
    )


def test_a_response_in_many_pairs_is_encoded_once():
    renderer = CharacterRenderer(9)
    pairs = [PreferencePair("p", a, b) for a in "abcd" for b in "abcd" if a > b]
    audit_pairs({"train": PreferenceDataset(pairs)}, renderer)
    assert renderer.num_calls == 4


def test_sources_are_listed_largest_first():
    pairs = [PreferencePair(str(i), "aa", "b", metadata={"source": "xyy"[i]}) for i in range(3)]
    sources = audit_of(*pairs, PreferencePair("3", "aa", "b")).splits["train"].sources
    assert [(name, source.num_pairs) for name, source in sources.items()] == [("y", 2), ("unnamed", 1), ("x", 1)]


def test_the_length_baseline_counts_ties_half_and_follows_labels_and_weights():
    longer = PreferencePair("a", "long", "s")
    tie = PreferencePair("b", "x", "y")
    reversed_label = PreferencePair("c", "s", "long", label=0.2)
    undecided = PreferencePair("d", "long", "s", label=0.5)
    shorter = PreferencePair("e", "s", "long", weight=2.0)
    baseline = length_baseline([longer, tie, reversed_label, undecided, shorter])
    assert baseline.value == (1 + 0.5 + 1 + 0) / 5
    assert baseline.num_samples == 4


def test_the_length_baseline_has_the_textbook_error_on_independent_prompts():
    pairs = [PreferencePair(str(i), *(("long", "s") if i < 30 else ("s", "long"))) for i in range(100)]
    baseline = length_baseline(pairs)
    assert baseline.value == 0.3
    assert baseline.standard_error == pytest.approx((0.3 * 0.7 / 99) ** 0.5, rel=1e-9)


def test_repeating_every_pair_of_a_prompt_does_not_shrink_the_error():
    pairs = [PreferencePair(str(i), *(("long", "s") if i < 30 else ("s", "long"))) for i in range(100)]
    assert length_baseline(pairs * 5).standard_error == pytest.approx(length_baseline(pairs).standard_error, rel=1e-9)


def test_an_audit_survives_json():
    margin = PreferencePair("p", "aa", "b", margin=1.0, metadata={"source": "s"})
    tie = PreferencePair("q", "a", "b", label=0.5)
    data = PreferenceDataset(SourcePairs((margin, tie), (SkippedRow("a.csv", 3, "bad"),)))
    audit = audit_pairs({"train": data, "val": data}, CharacterRenderer(9))
    split = audit.splits["train"]
    assert (split.num_margins, split.num_soft_labels, split.num_skipped) == (1, 1, 1)
    assert DataAudit.from_json(audit.to_json()) == audit


def test_a_split_without_a_decided_pair_has_no_baseline():
    audit = audit_of(PreferencePair("p", "aa", "b", label=0.5))
    assert format(audit.splits["train"].longer_wins) == "n/a"
    assert DataAudit.from_json(audit.to_json()).to_json() == audit.to_json()


@pytest.mark.parametrize(
    "text",
    [
        *("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>", "<s>[INST] Hi [/INST]", "<extra_id_1>User", "<<SYS>>"),
        *("<end_of_turn>", "<\uff5cUser\uff5c>", "<|start_header_id|>", "[SEP]", "<pad>", "<own>"),
    ],
)
def test_control_tokens_in_any_text_of_a_pair_are_counted_and_named(text: str):
    pairs = [
        PreferencePair(f"a {text} b", "c", "d"),
        PreferencePair((Message("system", text), Message("user", "q")), "c", "d"),
        PreferencePair("q", f"c{text}", f"{text}{text}"),
        PreferencePair("is a < b and b > s? <b>[1]</b> <|>", "a[CLS", "x</ s>"),
    ]
    data = {"train": PreferenceDataset(pairs)}
    split = audit_pairs(data, CharacterRenderer(50), ["<own>"]).splits["train"]
    assert split.num_control_tokens == 3
    assert split.control_tokens
    assert all(token in text for token in split.control_tokens)


def test_the_best_single_word_is_found_in_the_better_response():
    pairs = [PreferencePair(f"q{i}", "Yes, it is", "it is", label=float(i < 3)) for i in range(4)]
    others = (PreferencePair("q", "a  b", "a b\n"), PreferencePair("q", "Yes", "No", label=0.5))
    split = audit_of(*pairs, *others).splits["train"]
    assert (split.marker, split.marker_wins.value, split.num_blank_only) == ("with 'yes'", 0.5 + (3 - 1) / 2 / 5, 1)

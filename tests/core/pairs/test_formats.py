from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.formats import (
    FORMATS,
    Comparison,
    detect_format,
    kwise_pairs,
)
from rm_optimizer.core.pairs.pair import Message, prompt_id
from rm_optimizer.core.pairs.winner import Verdict
from rm_optimizer.core.rows.gathering import PER_RESPONSE, gather_responses
from rm_optimizer.core.rows.prompts import parse_transcript, read_prompt
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.data import KwiseRule

USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."}
GOOD, BAD = {"role": "assistant", "content": "Hello!"}, {"role": "assistant", "content": "No."}
HH = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: No."}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "explicit": [{"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}],
    "hh": [HH],
    "messages": [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    "lists": [
        {"prompt": "Hi", "chosen": ["Hello!"], "rejected": ["No."]},
        {"prompt": [USER], "chosen": "Hello!", "rejected": ["No."]},
    ],
    "winner": [
        {"prompt": "Hi", "response_a": "Hello!", "response_b": "No.", "winner": Verdict(1.0)},
        {"prompt": "Hi", "response_a": "No.", "response_b": "Hello!", "winner": Verdict(0.0)},
        {"response_a": [USER, GOOD], "response_b": [USER, BAD], "winner": Verdict(1.0)},
    ],
    "kwise": [
        {"prompt": "Hi", "responses": ["No.", "Hello!"], "scores": [0, 1]},
        {"prompt": "Hi", "responses": ["No.", "Hello!"], "ranks": [2, 1]},
    ],
}


def compare(name: str, row: dict[str, Any], rule: KwiseRule = KwiseRule.all) -> list[Comparison]:
    return FORMATS[name].compare(row, rule)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_recognizes_its_rows_and_reads_the_same_pair(name: str):
    for row in EXAMPLES[name]:
        assert detect_format([row]) is FORMATS[name]
        (comparison,) = compare(name, row)
        assert prompt_id(comparison.prompt) == prompt_id("Hi")
        assert (comparison.chosen, comparison.rejected) == ("Hello!", "No.")


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_takes_the_rows_of_another(name: str):
    for row in EXAMPLES[name]:
        assert [other for other in FORMATS if FORMATS[other].fits(row)] == [name]


def test_a_broken_first_row_does_not_hide_the_format():
    assert detect_format([{"prompt": "Hi", "chosen": None, "rejected": None}, *EXAMPLES["explicit"]]).name == "explicit"
    assert detect_format([{"question": "Hi", "chosen": "a", "rejected": "b"}]) is None


def test_an_unknown_format_gets_a_hint():
    with pytest.raises(ConfigError, match=r"unknown data\.format 'kwize'; did you mean 'kwise'\?"):
        PreferenceDataset([EXAMPLES["explicit"][0]], format="kwize")


def test_the_prompt_of_a_transcript_is_everything_before_the_last_assistant_turn():
    before = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Sing:\n\none line"
    row = {"chosen": before + "\n\nAssistant: La\n\nla ", "rejected": before + "\n\nAssistant: No."}
    (comparison,) = compare("hh", row)
    assert comparison.prompt == (
        Message("user", "Hi"),
        Message("assistant", "Hello!"),
        Message("user", "Sing:\n\none line"),
    )
    assert comparison.chosen == "La\n\nla"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": "\n\nHuman: Ho\n\nAssistant: No."}, "prompts of chosen and rejected differ, from turn 1 on"),
        (
            {"rejected": "\n\nHuman: Hi\n\nAssistant: No.\n\nHuman: Oh?\n\nAssistant: No."},
            "prompts of chosen and rejected differ, from turn 2 on",
        ),
        ({"chosen": "\n\nHuman: Hi"}, "chosen must be a transcript that ends with an 'Assistant:' turn"),
        (
            {"chosen": HH["chosen"] + "\n\nHuman: Bye"},
            "chosen must be a transcript that ends with an 'Assistant:' turn",
        ),
        ({"chosen": "Hi\n\nAssistant: Hello!"}, "chosen: a transcript must begin with 'Human:'"),
        ({"rejected": None}, "rejected must be text, got nothing"),
    ],
)
def test_a_bad_transcript_is_refused_with_the_reason(change: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        compare("hh", HH | change)


def test_a_framed_prompt_is_the_same_prompt_as_the_messages_it_frames():
    framed = "Human: Hi\n\nAssistant: Hello!\n\nHuman: Bye\n\nAssistant:"
    messages = [USER, GOOD, {"role": "user", "content": "Bye"}]
    assert read_prompt(framed) == read_prompt("\n\n" + framed + " ") == read_prompt(messages)
    assert prompt_id(read_prompt("Human: Hi\n\nAssistant:")) == prompt_id("Hi")
    assert read_prompt("System: Be kind.\n\nHuman: Hi\n\nAssistant:") == read_prompt([SYSTEM, USER])


@pytest.mark.parametrize("text", ["Human: Hi", "Why say 'Assistant:'", "Assistant:", "Text\n\nHuman: Hi\n\nAssistant:"])
def test_text_that_is_no_framed_prompt_stays_as_it_is(text: str):
    assert read_prompt(text) == text


def test_turns_of_one_speaker_in_a_row_are_joined():
    assert parse_transcript("Human: a\n\nHuman: b\n\nAssistant: c") == (
        Message("user", "a\n\nb"),
        Message("assistant", "c"),
    )


def test_a_system_turn_stands_only_at_the_start():
    assert [m.role for m in parse_transcript("System: a\n\nHuman: b\n\nSystem: c")] == ["system", "user"]


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n:"), min_size=1).map(str.strip).filter(bool)


@given(st.lists(LINE, min_size=1, max_size=5))
def test_a_written_transcript_is_read_back(contents: list[str]):
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], content) for i, content in enumerate(contents))
    names = {"user": "Human", "assistant": "Assistant"}
    assert parse_transcript("".join(f"\n\n{names[m.role]}: {m.content}" for m in messages)) == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"chosen": [USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
            "prompts of chosen and rejected differ, from turn 1",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "chosen has no prompt before its response"),
        ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]}, "must end with a message of role assistant"),
        (
            {"prompt": [USER], "chosen": [SYSTEM, GOOD], "rejected": [BAD]},
            "must be a completion or begin with the prompt",
        ),
        ({"prompt": [USER], "chosen": [{"from": "gpt"}], "rejected": [BAD]}, "chosen must hold messages with role and"),
        ({"prompt": [USER], "chosen": [], "rejected": [BAD]}, "chosen must be a list of messages, got nothing"),
        ({"prompt": [USER], "chosen": [{"role": "assistant", "content": 3}], "rejected": [BAD]}, "chosen: .* got int"),
    ],
)
def test_bad_messages_are_refused_with_the_reason(row: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        compare("messages", row)


@pytest.mark.parametrize("name", ["explicit", "kwise"])
def test_a_prompt_that_is_a_number_is_refused(name: str):
    with pytest.raises(ValueError, match="prompt must be text or a list of messages, got int"):
        compare(name, EXAMPLES[name][0] | {"prompt": 7})


SCORES = st.lists(st.integers(0, 4).map(float), max_size=7)


@given(SCORES)
def test_all_pairs_are_those_with_different_scores_better_first(scores: list[float]):
    expected = {(i, j) for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b}
    pairs = kwise_pairs(scores, KwiseRule.all)
    assert set(pairs) == expected
    assert len(pairs) == len(expected)


@given(SCORES)
def test_best_worst_is_one_pair_with_the_widest_gap(scores: list[float]):
    pairs = kwise_pairs(scores, KwiseRule.best_worst)
    gaps = [scores[i] - scores[j] for i, j in pairs]
    assert gaps == ([max(scores) - min(scores)] if len(set(scores)) > 1 else [])


@given(SCORES)
def test_adjacent_gaps_add_up_to_the_widest_gap(scores: list[float]):
    pairs = kwise_pairs(scores, KwiseRule.adjacent)
    assert len(pairs) == max(0, len(set(scores)) - 1)
    assert sum(scores[i] - scores[j] for i, j in pairs) == (max(scores) - min(scores) if scores else 0)


def test_kwise_margins_are_score_gaps_also_of_equal_texts():
    row = {
        "prompt": "Hi",
        "responses": ["a", "b", "a"],
        "scores": [3, 1, 0],
        PER_RESPONSE: {"model": ["x", "y", "z"]},
    }
    comparisons = compare("kwise", row)
    assert [(c.chosen, c.rejected, c.margin) for c in comparisons] == [
        ("a", "b", 2.0),
        ("a", "a", 3.0),
        ("b", "a", 1.0),
    ]
    places = {"chosen_index": 0, "rejected_index": 1}
    assert comparisons[0].extra == places | {
        "chosen_model": "x",
        "rejected_model": "y",
        "chosen_score": 3.0,
        "rejected_score": 1.0,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scores": [1]}, "responses and scores must be lists of the same length"),
        ({"scores": [1, None]}, "each of scores must be a number, got None"),
        ({"scores": [1, float("nan")]}, "each of scores must be finite"),
        ({"responses": ["a", None]}, "the responses must be text, got nothing"),
    ],
)
def test_bad_kwise_rows_are_refused_with_the_reason(change: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        compare("kwise", EXAMPLES["kwise"][0] | change)


def test_one_response_a_row_gathers_to_the_same_as_lists():
    rows = [
        (1, {"prompt": "Hi", "response": "No.", "score": "0", "model": "x", "subset": "s"}),
        (2, {"prompt": "Bye", "response": "So long.", "score": 1.0, "model": "x", "subset": "s"}),
        (3, {"prompt": "Hi", "response": "Hello!", "score": 1.0, "model": "y", "subset": "s"}),
        (4, {"prompt": "Hi", "response": "Hm.", "score": None, "model": "y", "subset": "s"}),
    ]
    bad: list[tuple[int, str]] = []
    gathered = dict(gather_responses(iter(rows), lambda number, reason: bad.append((number, reason))))
    assert bad == [(4, "score must be a number, got None")]
    assert list(gathered) == [1, 2]
    assert gathered[1]["responses"] == ["No.", "Hello!"]
    assert gathered[1]["scores"] == [0.0, 1.0]
    assert gathered[1]["subset"] == "s"
    assert gathered[1][PER_RESPONSE] == {"model": ["x", "y"]}

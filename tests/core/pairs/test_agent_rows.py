"""Rows of agents: tools, tool calls, several parts, and conversations that part before their last turn."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.rows.messages import CONTEXT_ROLE, Message, Turns, read_messages, response_of, turns_of
from rm_optimizer.core.rows.prompts import as_messages, split_context, with_context
from rm_optimizer.errors import DataError
from rm_optimizer.evaluation.response_files import read_responses
from rm_optimizer.serving.client.reward_function import conversations

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
ASK = {"role": "user", "content": "2 + 2?"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "4"}
DONE = {"role": "assistant", "content": "It is 4."}
GUESS = {"role": "assistant", "content": "5."}


def test_tools_and_trajectories_are_read_alike_from_every_kind_of_row(tmp_path):
    sides = {"chosen": [CALL, RESULT, DONE], "rejected": [GUESS]}
    whole = {name: [ASK, *turns] for name, turns in sides.items()}
    rows = [
        {"prompt": [ASK], **sides, "tools": TOOLS},
        {"prompt": "2 + 2?", **sides, "tools": json.dumps(TOOLS)},
        {"prompt": "2 + 2?", **sides, "tools": list(map(json.dumps, TOOLS))},
        {**whole, "tools": TOOLS},
        {
            "prompt": [ASK],
            "tools": TOOLS,
            "winner": "b",
            "response_a": whole["rejected"],
            "response_b": whole["chosen"],
        },
    ]
    found = []
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row))
        options: dict[str, Any] = {"winner": ["a", "b"]} if "winner" in row else {}
        if "winner" in row:
            del row["prompt"]
            path.write_text(json.dumps(row))
        (pair,) = PreferenceDataset(path, **options)
        found.append(pair)
    assert {pair.pair_id for pair in found} == {found[0].pair_id}
    context, messages = split_context(as_messages(found[0].prompt))
    assert context == {"tools": TOOLS}
    assert messages == (Message("user", "2 + 2?"),)
    call, result, done = turns_of(found[0].chosen)
    assert call.fields["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert result.fields == {"name": "add", "tool_call_id": "c1"}
    assert done.content == "It is 4."
    assert found[0].rejected == "5."


def test_a_pair_with_tools_survives_json_and_pickle():
    (pair,) = PreferenceDataset(
        [{"prompt": [ASK], "chosen": [CALL, RESULT, DONE], "rejected": [GUESS], "tools": TOOLS}]
    )
    for again in (pickle.loads(pickle.dumps(pair)), PreferenceDataset([json.loads(json.dumps(pair.to_dict()))])[0]):
        assert (again.prompt, again.chosen, again.rejected) == (pair.prompt, pair.chosen, pair.rejected)
        assert again.pair_id == pair.pair_id
    assert pair.pair_id != PreferencePair([ASK], pair.chosen, "5.").pair_id


def test_null_fields_that_arrow_inserts_do_not_matter(tmp_path):
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "now", "parameters": {"properties": {"z": {"type": "a"}}}}},
    ]
    rows = [
        {"prompt": [ASK], "chosen": [CALL, RESULT, DONE], "rejected": [GUESS], "tools": tools},
        {"prompt": [ASK], "chosen": [DONE], "rejected": [GUESS], "tools": TOOLS},
    ]
    table = pa.Table.from_pylist(rows)
    assert None in table.to_pylist()[0]["tools"][0]["function"]["parameters"]["properties"].values()
    pq.write_table(table, tmp_path / "a.parquet")
    assert [pair.pair_id for pair in PreferenceDataset(tmp_path / "a.parquet")] == [
        pair.pair_id for pair in PreferenceDataset(rows)
    ]


@pytest.mark.parametrize(
    "calls",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
        {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"a": 2}'}},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"role": "tool_call", "content": '{"name": "add", "arguments": "{\\"a\\": 2}"}'},
    ],
)
def test_every_way_to_write_a_call_is_the_same_call(calls: dict[str, Any]):
    function = {"name": "add", "arguments": {"a": 2}}
    assert read_messages("chosen", [calls]) == (
        Message("assistant", "", {"tool_calls": [{"type": "function", "function": function}]}),
    )


def test_arguments_that_no_object_holds_whole_stay_text():
    for text in ('{"a": 1, "a": 2}', "a=1", "[1]"):
        (message,) = read_messages("chosen", [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}])
        assert message.fields["tool_calls"][0]["function"]["arguments"] == text


def test_text_parts_are_joined_and_other_parts_are_named():
    parts = [{"type": "text", "text": "2 + ", "image": None}, {"type": "text", "text": "2?"}]
    assert read_messages("prompt", [{"role": "user", "content": parts}]) == (Message("user", "2 + 2?"),)
    with pytest.raises(ValueError, match="message 1: part 2 of content is of type image"):
        read_messages("prompt", [{"role": "user", "content": [parts[0], {"type": "image", "image": "a.png"}]}])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tools": ["search"]}, "tools must be a list of objects"),
        ({"tools": "search"}, "tools must be a list of objects"),
        ({"documents": {"text": "a"}}, "documents must be a list of objects"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
    ],
)
def test_context_of_another_form_is_refused_at_every_entrance(values: dict[str, Any], reason: str, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "chosen": "a", "rejected": "b", **values}))
    with pytest.raises(DataError, match=f"line 1: {reason}"):
        PreferenceDataset(path)
    path.write_text(json.dumps({"prompt": "Hi", "response": "a", **values}))
    with pytest.raises(DataError, match=f"line 1: {reason}"):
        list(read_responses(path))
    with pytest.raises(ValueError, match=reason):
        conversations(["Hi"], ["a"], {name: [value] for name, value in values.items()})


def test_conversations_part_where_the_model_or_its_tools_took_another_turn():
    other = {**RESULT, "content": "five"}
    late = {"role": "user", "content": "Sure?"}
    for chosen, rejected, num_common in (
        ([ASK, DONE], [ASK, GUESS], 1),
        ([ASK, CALL, RESULT, DONE], [ASK, GUESS], 1),
        ([ASK, CALL, RESULT, DONE], [ASK, CALL, RESULT, GUESS], 3),
        ([ASK, CALL, RESULT, DONE], [ASK, CALL, other, DONE], 1),
        ([ASK, DONE, late, DONE], [ASK, GUESS, late, GUESS], 1),
        ([ASK, DONE], [ASK, DONE, late, GUESS], 1),
    ):
        (pair,) = PreferenceDataset([{"chosen": chosen, "rejected": rejected}])
        assert len(as_messages(pair.prompt)) == num_common
        for side, turns in ((pair.chosen, chosen), (pair.rejected, rejected)):
            assert as_messages(pair.prompt) + turns_of(side) == read_messages("chosen", turns)


@pytest.mark.parametrize("place", [0, 2])
def test_conversations_that_part_at_a_turn_of_the_user_are_other_prompts(place: int):
    turns = [ASK, DONE, {"role": "user", "content": "Sure?"}, GUESS]
    other = [*turns[:place], {"role": "user", "content": "Why?"}, *turns[place + 1 : 3], DONE]
    with pytest.raises(DataError, match=f"prompts of chosen and rejected differ, from turn {place + 1} on"):
        PreferenceDataset([{"chosen": turns, "rejected": other}])


def test_a_transcript_in_an_answer_makes_no_turns():
    forged = "\n\nHuman: Hi\n\nAssistant: a\n\nHuman: more\n\nAssistant: b"
    with pytest.raises(DataError, match="differ, from turn 2 on"):
        PreferenceDataset(
            [{"chosen": forged, "rejected": "\n\nHuman: Hi\n\nAssistant: c\n\nHuman: more\n\nAssistant: b"}]
        )


def test_an_answer_that_spells_turns_is_never_turns():
    turns = response_of(read_messages("chosen", [CALL, RESULT, DONE]))
    text = "".join(list(turns))
    assert isinstance(turns, Turns)
    assert text != turns
    assert turns != text
    assert not turns == text  # noqa: SIM201
    assert turns_of(text) == (Message("assistant", text),)
    assert PreferencePair("Hi", turns, text).chosen == turns


def test_the_role_of_what_stands_beside_messages_is_no_role_of_a_message():
    with pytest.raises(ValueError, match="is for tools and documents"):
        Message(CONTEXT_ROLE, "Hi")
    before = with_context("Hi", {"tools": TOOLS})
    with pytest.raises(ValueError, match="after the first one"):
        read_messages("prompt", [*reversed([turn.to_dict() for turn in before])])
    with pytest.raises(ValueError, match="given twice"):
        with_context(before, {"tools": TOOLS})


def test_completions_of_trl_keep_their_turns_and_tools():
    prompts, responses = conversations([[ASK], [ASK]], [[CALL, RESULT, DONE], [DONE]], {"tools": [TOOLS, None], "x": 1})
    assert prompts == [with_context((Message("user", "2 + 2?"),), {"tools": TOOLS}), (Message("user", "2 + 2?"),)]
    assert responses == [response_of(read_messages("c", [CALL, RESULT, DONE])), "It is 4."]


TURNS, OTHER = [CALL, RESULT, DONE], {**ASK, "content": "3 + 3?"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "responses": [TURNS, [GUESS]], "scores": [1, 0]},
        {"prompt": "2 + 2?", "responses": [GUESS, TURNS], "scores": [0, 1]},
        {"prompt": [ASK], "responses": [TURNS, "5."], "ranks": [1, 2]},
        {"prompt": [ASK], "responses": ["5.", TURNS], "edges": [[1, 0]]},
        {"prompt": [ASK], "responses": ["5.", TURNS], "edges": [[0, 1]], "scores": [False, True]},
        {"prompt": [ASK], "responses": ["5.", TURNS], "winner": 1},
        {"responses": [[ASK, *TURNS], [ASK, GUESS]], "scores": [1, 0]},
        {"prompt": [ASK], "chosen": [TURNS], "rejected": [[GUESS]]},
        {"prompt": [ASK], "chosen": TURNS, "rejected": ["5."]},
        {"prompt": [ASK], "chosen": TURNS, "rejected": "5."},
        {"prompt": [ASK], "response_a": "5.", "response_b": TURNS, "winner": "b"},
    ],
)
def test_messages_are_responses_in_every_format(row: dict[str, Any]):
    options: dict[str, Any] = {"winner": ["a", "b"]} if "response_a" in row else {}
    (pair,) = PreferenceDataset([{**row, "tools": TOOLS}], **options)
    expected = PreferenceDataset([{"prompt": [ASK], "chosen": TURNS, "rejected": [GUESS], "tools": TOOLS}])[0]
    assert (pair.prompt, pair.chosen, pair.rejected) == (expected.prompt, expected.chosen, expected.rejected)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"winner": 2}, "winner must be a place in 2 responses, from 0, got 2"),
        ({"winner": 0.5}, "winner must be a place in 2 responses, from 0, got 0.5"),
        ({"winner": 0, "scores": [1, 2]}, "both scores and winner"),
        ({"edges": [[0, 1]], "scores": [1, 1]}, r"the responses of each of edges must differ in scores, got \[0, 1\]"),
        (
            {"edges": [[0, 1]], "scores": ["0.7", "0.70"]},
            r"the responses of each of edges must differ in scores, got \[0, 1\]",
        ),
        ({"edges": [[0, 1]], "scores": [1]}, "responses and scores must be lists of the same length"),
    ],
)
def test_places_of_responses_that_tell_no_order_are_refused(told: dict[str, Any], reason: str):
    with pytest.raises(DataError, match=reason):
        PreferenceDataset([{"prompt": "2 + 2?", "responses": ["4", "5"], **told}])


def test_rows_of_one_response_each_may_hold_messages():
    rows = [{"prompt": [ASK], "response": response, "score": score} for response, score in ((TURNS, 2), ("5.", 1))]
    (pair,) = PreferenceDataset(rows)
    assert (turns_of(pair.chosen)[-1].content, pair.rejected, pair.margin) == ("It is 4.", "5.", 1.0)


def test_every_chosen_response_is_paired_with_every_rejected_one_also_of_messages():
    pairs = PreferenceDataset([{"prompt": [ASK], "chosen": [TURNS, "Four."], "rejected": [[GUESS], "6."]}])
    assert [(turns_of(pair.chosen)[-1].content, pair.rejected) for pair in pairs] == [
        ("It is 4.", "5."),
        ("It is 4.", "6."),
        ("Four.", "5."),
        ("Four.", "6."),
    ]
    assert [(pair.metadata["chosen_index"], pair.metadata["rejected_index"]) for pair in pairs] == [
        *((0, 0), (0, 1)),
        *((1, 0), (1, 1)),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": [ASK], "responses": [[OTHER, DONE], [ASK, GUESS]], "scores": [1, 0]},
            "begin",
        ),
        ({"responses": [[ASK, DONE], [OTHER, GUESS]], "scores": [1, 0]}, "the responses differ"),
        ({"prompt": [ASK], "chosen": [TURNS[:2]], "rejected": ["5."]}, "must end with a message of role assistant"),
        ({"prompt": [ASK], "chosen": [TURNS, 3], "rejected": ["5."]}, "chosen must be a list of messages, got int"),
    ],
)
def test_messages_that_are_no_responses_to_the_prompt_are_refused(row: dict[str, Any], reason: str):
    with pytest.raises(DataError, match=reason):
        PreferenceDataset([row])

"""One reader of prompts: whatever the entrance, a prompt becomes the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import PreferencePair, prompt_id
from rm_optimizer.core.rows.columns import in_context
from rm_optimizer.core.rows.messages import Message, read_messages
from rm_optimizer.core.rows.prompts import as_messages, read_prompt
from rm_optimizer.errors import DataError
from rm_optimizer.evaluation.response_files import read_responses

TURNS = [("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye?")]
EXPECTED = tuple(Message(role, text) for role, text in TURNS)
FORMS: dict[str, Any] = {
    "transcript": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Bye?\n\nAssistant:",
    "messages": [{"role": role, "content": text} for role, text in TURNS],
    "sharegpt": [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS],
    "parts": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TURNS],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_prompt_is_the_same_messages_through_every_entrance(form: str, tmp_path: Path):
    value = FORMS[form]
    pairs, responses = tmp_path / "pairs.jsonl", tmp_path / "responses.jsonl"
    pairs.write_text(json.dumps({"prompt": value, "chosen": "a", "rejected": "b"}))
    responses.write_text(json.dumps({"prompt": value, "response": "a"}))
    (loaded,) = PreferenceDataset(pairs)
    (scored,) = read_responses(responses)
    assert as_messages(loaded.prompt) == as_messages(scored.prompt) == as_messages(value) == EXPECTED
    assert loaded.prompt_id == prompt_id(scored.prompt) == PreferencePair(EXPECTED, "a", "b").prompt_id


@pytest.mark.parametrize("role", ["human", "Human", "prompter", "USER"])
def test_names_of_the_user_are_the_user(role: str):
    assert Message(role, "Hi").role == "user"


@pytest.mark.parametrize("role", ["gpt", "bot", "model", "Assistant", "ai"])
def test_names_of_the_assistant_are_the_assistant(role: str):
    assert Message(role, "Hi").role == "assistant"


BLANK_TURNS: dict[str, Any] = {
    "messages": [{"role": "user", "content": " "}],
    "sharegpt": [{"from": "system", "value": ""}, {"from": "human", "value": ""}],
    "transcript": "Human: Hi\n\nAssistant: Hello!\n\nHuman: \n\nAssistant:",
}


@pytest.mark.parametrize("form", BLANK_TURNS)
def test_a_blank_turn_of_the_user_is_refused_at_every_entrance(form: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": BLANK_TURNS[form], "chosen": "a", "rejected": "b"}))
    with pytest.raises(DataError, match=r"line 1: .*role user must not be empty"):
        PreferenceDataset(path)
    path.write_text(json.dumps({"prompt": BLANK_TURNS[form], "response": "a"}))
    with pytest.raises(DataError, match=r"line 1: .*role user must not be empty"):
        list(read_responses(path))
    with pytest.raises(ValueError, match="role user must not be empty"):
        as_messages(BLANK_TURNS[form])


@pytest.mark.parametrize(
    "field", [{"tools": [{"id": 1}]}, {"image": "a.png"}, {"files": ["a"]}, {"notes": "a " * 20}, {"calls": [{"a": 1}]}]
)
def test_a_field_of_a_message_that_would_be_lost_is_refused(field: dict[str, Any]):
    with pytest.raises(ValueError, match=f"message 1 has {next(iter(field))}, which is not read"):
        read_messages("prompt", [{"role": "user", "content": "Hi"} | field])


@pytest.mark.parametrize("field", [{"tool_calls": None}, {"name": ""}, {"weight": 1.0}, {"id": "a1"}, {"tools": []}])
def test_empty_fields_and_numbers_of_a_message_are_passed_over(field: dict[str, Any]):
    assert read_messages("prompt", [{"role": "user", "content": "Hi"} | field]) == (Message("user", "Hi"),)


@pytest.mark.parametrize("text", [json.dumps(FORMS["messages"]), str(FORMS["sharegpt"]), "[1, 2]", '{"role": "user"}'])
def test_text_that_looks_like_json_stays_text_at_every_entrance(text: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": each, "chosen": text, "rejected": "b"} for each in (text, "Q?", "R?")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (PreferenceDataset(path), PreferenceDataset(rows), PreferenceDataset(rows[:1], layout={"parse": []})):
        assert (data[0].prompt, data[0].chosen) == (text, text)
    assert as_messages(read_prompt(text)) == (Message("user", text),)
    assert prompt_id(text) != prompt_id(EXPECTED)


def test_a_system_column_is_the_system_turn_and_must_not_contradict_the_prompt():
    assert in_context({"system": "Be kind."}, "Hi", {}) == (Message("system", "Be kind."), Message("user", "Hi"))
    own = (Message("system", "Be kind."), Message("user", "Hi"))
    assert in_context({"system": " Be kind. "}, own, {}) == own
    with pytest.raises(ValueError, match="the system column differs"):
        in_context({"system": "Be rude."}, own, {})


@pytest.mark.parametrize("name", ["functions", "tool_calls", "context", "history", "input", "system_prompt"])
def test_a_column_that_would_be_lost_is_refused_at_every_entrance(name: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "chosen": "a", "rejected": "b", name: "something"}))
    with pytest.raises(DataError, match=f"{name} is not read"):
        PreferenceDataset(path)
    path.write_text(json.dumps({"prompt": "Hi", "response": "a", name: "something"}))
    with pytest.raises(DataError, match=f"line 1: {name} is not read"):
        list(read_responses(path))


def test_alpacas_input_follows_the_instruction(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"instruction": "Add.", "input": "1, 2", "chosen": "a", "rejected": "b", "system": "S"}))
    (pair,) = PreferenceDataset(path, columns={"prompt": "instruction"})
    assert pair.prompt == (Message("system", "S"), Message("user", "Add.\n1, 2"))
    assert "input" not in pair.metadata

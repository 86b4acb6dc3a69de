"""Sets of agents, of reasoning, of an arena and of pandas: each trains a small model, and its answers are scored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.interfaces.cli import app
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Seoul", "Accra", "Tunis", "Malmo", "Kyoto")


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(number: str, name: str, city: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps({"city": city})}}


def agent(city: str) -> dict[str, Any]:
    """A row with parallel calls, results by id, and tools and system in columns of their own."""
    calls = [call("c1", "get_weather", city), call("c2", "get_time", city)]
    return {
        "system": "You are an agent.",
        "tools": json.dumps([tool("get_weather", "Weather of a city."), tool("get_time", "Time in a city.")]),
        "prompt": [{"role": "user", "content": f"Weather and time in {city}?"}],
        "chosen": [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c2", "content": "10:30"},
            {"role": "assistant", "content": f"It is sunny in {city}, at 10:30."},
        ],
        "rejected": [{"role": "assistant", "content": "I cannot know that."}],
    }


def reasoning(city: str) -> dict[str, Any]:
    return {
        "prompt": f"Where is {city}?",
        "chosen": f"<think>\n{city} is a city.\n</think>\n\nOn a map.",
        "rejected": "<think>\nHm.\n</think>\n\nNowhere.",
    }


def reasoning_field(city: str) -> dict[str, Any]:
    asked = {"role": "user", "content": f"Where is {city}?"}
    return {
        "prompt": [asked, {"role": "assistant", "content": "Wait.", "reasoning_content": "A city."}, asked],
        "chosen": [{"role": "assistant", "content": "On a map.", "reasoning_content": f"{city} is one."}],
        "rejected": [{"role": "assistant", "content": "Nowhere.", "reasoning_content": "Hm."}],
    }


def arena(city: str) -> dict[str, Any]:
    def turns(answer: str) -> list[dict[str, Any]]:
        texts = (("user", f"Where is {city}?"), ("assistant", answer))
        return [{"role": role, "content": [{"type": "text", "text": text, "image": None}]} for role, text in texts]

    return {
        "id": city,
        "model_a": "one",
        "model_b": "other",
        "winner": ("model_a", "model_b", "tie", "both_bad")[CITIES.index(city) % 4],
        "evaluation_session_id": city,
        "evaluation_order": 1,
        "conversation_a": turns("On a map."),
        "conversation_b": turns("Nowhere."),
        "full_conversation": [{"user": turns("")[0]}],
        "conv_metadata": {"sum_user_tokens": 3},
        "category_tag": {"math_v0.1": {"math": False}},
        "language": "en",
        "is_code": False,
        "timestamp": "2025-06-01",
    }


def preference(city: str) -> dict[str, Any]:
    return {"prompt": f"Where is {city}?", "chosen": "On a map.", "rejected": "Nowhere.", "annotator": "a"}


@pytest.mark.parametrize("row", [agent, reasoning, reasoning_field, arena, preference])
def test_a_set_is_trained_on_and_its_answers_are_scored_by_one_command_each(
    row: Callable[[str], dict[str, Any]], small_config: Callable[..., TrainConfig], tmp_path: Path
):
    rows = list(map(row, CITIES))
    path = tmp_path / ("pairs.csv" if row is preference else "pairs.jsonl")
    if row is preference:
        pd.DataFrame(rows).to_csv(path)  # with the index that pandas writes by default
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    options = ("training.max_steps=1", "batching.batch_size=4", "model.max_length=512", "model.vocab_size=600")
    train_reward_model(small_config(tmp_path / "run", f"data.train={path}", *options))
    model = BradleyTerryRM.from_pretrained(tmp_path / "run")
    data = PreferenceDataset(path)
    assert len(data) == len(CITIES)
    expected = model.score_groups([pair.prompt for pair in data], [[pair.chosen, pair.rejected] for pair in data])
    if row is arena:
        return  # its rows are no responses to score
    beside = ("system", "tools")
    responses = [
        {name: each[name] for name in ("prompt", *beside) if name in each}
        | {"responses": [each["chosen"], each["rejected"]]}
        for each in rows
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in responses))
    arguments = ["score", str(tmp_path / "run"), *(str(tmp_path / name) for name in ("answers.jsonl", "scored.jsonl"))]
    scored = CliRunner().invoke(app, arguments)
    assert scored.exit_code == 0, scored.stderr
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    torch.testing.assert_close(torch.tensor(rewards), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("row", [agent, reasoning_field])
def test_data_check_reads_rows_of_agents_without_a_tokenizer(row: Callable[[str], dict[str, Any]], tmp_path: Path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row(city)) + "\n" for city in CITIES))
    checked = CliRunner().invoke(app, ["data", "check", str(path)])
    assert checked.exit_code == 0, checked.stderr
    assert "Rome" in checked.stdout
